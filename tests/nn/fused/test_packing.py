"""Packed batches are computed as their sequences are apart."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend
from transformers import DataCollatorWithFlattening

from fp8booster import convert_to_fp8, fuse, report
from fp8booster.nn.fused import attention
from fp8booster.nn.fused.attention import attend, attend_packed, kernels
from fp8booster.nn.fused.packing import Packing, Sequences, checked_sequences, find_sequences, positions_in
from tests.nn.fused.models import FAMILIES, FILLS_CACHES_IN_16_BITS, INSTALLED, MAJOR, VOCABULARY, build
from tests.nn.fused.test_decoder import sqnr
from tests.nn.fused.test_transformers import make

ALL = [*FAMILIES, "mixtral"]
OTHERS = [
    "qwen3",
    "qwen3_moe",
    "gemma3_text",
    "phi3",
    "olmo2",
    "granite",
    "cohere",
    "cohere2",
    "glm4",
    "stablelm",
    "gpt_neox",
    "llama4_text",
    *(["gpt_oss"] if "gpt_oss" in INSTALLED else []),
]
"""Whose attention has norms, one layer for q, k and v, another scale or another rotation."""
LENGTHS = (5, 16, 1, 10)


def documents(lengths: tuple[int, ...] = LENGTHS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (length,), generator=generator) for length in lengths]


def body(model: nn.Module) -> nn.Module:
    """Without its head."""
    return model.gpt_neox if hasattr(model, "gpt_neox") else model.model


def flat(texts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """One row, as transformers packs it."""
    batch = DataCollatorWithFlattening()([{"input_ids": text.tolist()} for text in texts], return_tensors="pt")
    return {name: batch[name] for name in ("input_ids", "labels", "position_ids")}


def cumulated(lengths: tuple[int, ...] = LENGTHS) -> torch.Tensor:
    return torch.tensor((0, *lengths)).cumsum(0).int()


def apart(model: nn.Module, texts: list[torch.Tensor]) -> tuple[torch.Tensor, float, dict[str, torch.Tensor]]:
    """Hidden states one behind the other, the mean loss over all tokens, and its gradients, a sequence at a time."""
    model.zero_grad()
    targets = sum(len(text) - 1 for text in texts)
    hidden, loss = [], 0.0
    for text in texts:
        hidden.append(body(model)(text[None]).last_hidden_state[0].detach())
        if len(text) > 1:
            part = model(input_ids=text[None], labels=text[None]).loss * (len(text) - 1) / targets
            part.backward()
            loss += part.item()
    return torch.cat(hidden), loss, gradients(model)


def packed(model: nn.Module, **batch: Any) -> tuple[torch.Tensor, float, dict[str, torch.Tensor]]:
    """The same of a packed batch."""
    model.zero_grad()
    hidden = body(model)(**{name: each for name, each in batch.items() if name != "labels"}).last_hidden_state
    loss = model(**batch).loss
    loss.backward()
    return hidden.flatten(0, 1).detach(), loss.item(), gradients(model)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def check(found: tuple, right: tuple, **tolerance: float) -> None:
    torch.testing.assert_close(found[0], right[0], **tolerance)
    assert found[1] == pytest.approx(right[1], rel=1e-5)
    assert found[2].keys() == right[2].keys()
    for name, gradient in right[2].items():
        torch.testing.assert_close(found[2][name], gradient, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


@pytest.mark.parametrize("family", ALL + OTHERS)
@pytest.mark.parametrize("use_cache", [False, True])
def test_a_packed_batch_is_its_sequences(family: str, use_cache: bool) -> None:
    use_cache &= family not in FILLS_CACHES_IN_16_BITS
    model, texts = make(family, use_cache=use_cache), documents()
    fuse(model)
    check(packed(model, **flat(texts)), apart(model, texts))


@pytest.mark.parametrize("family", [each for each in ("deepseek_v2", "deepseek_v3") if each in INSTALLED])
def test_packed_heads_may_be_made_of_latents(family: str) -> None:
    model, texts = build(family, torch.float32), documents()
    fuse(model)
    check(packed(model, **flat(texts)), apart(model, texts))


FUSED = {"llama", "mistral", "qwen2", "qwen3", "gemma3_text", "phi3", "olmo2", "granite", "mixtral", "qwen3_moe"}
"""Families whose attention is fused, in each version of transformers that has them."""


@pytest.mark.parametrize("family", sorted(FUSED & set(INSTALLED)))
def test_windows_slide_within_sequences(family: str) -> None:
    """In each family whose attention is fused; where it has no window, tokens attend to all before them."""
    changes: dict[str, Any] = {}
    if hasattr(build(family).config, "sliding_window"):
        changes = {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 0}
    texts = documents()
    model = build(family, torch.float32, **changes)
    fuse(model)
    found = packed(model, **flat(texts))
    check(found, apart(model, texts))
    if changes:
        unlimited = build(family, torch.float32)
        fuse(unlimited)
        assert not torch.allclose(packed(unlimited, **flat(texts))[0], found[0], atol=1e-3)


@pytest.mark.parametrize("reentrant", [False, True])
def test_packed_batches_are_computed_again_in_backward(reentrant: bool) -> None:
    model, texts = build("llama", torch.float32), documents()
    fuse(model)
    batches = [flat(texts), flat(texts[::-1])]
    right = [packed(model, **each) for each in batches]
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.zero_grad()
    # the second forward runs before the backward of the first, as in a pipeline
    first, second = (model(**each).loss for each in batches)
    first.backward()
    assert first.item() == right[0][1]
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, right[0][2][name], rtol=0, atol=0)
    model.zero_grad()
    second.backward()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, right[1][2][name], rtol=0, atol=0)


@pytest.mark.parametrize("given", ["positions", "boundaries", "boundaries alone", "both, and a mask of ones"])
def test_how_sequences_are_told(given: str) -> None:
    model, texts = build("llama", torch.float32), documents()
    fuse(model)
    right = packed(model, **flat(texts))
    batch = flat(texts)
    boundaries = {"cu_seq_lens_q": cumulated(), "cu_seq_lens_k": cumulated(), "max_length_q": 16, "max_length_k": 16}
    if given == "boundaries":
        batch |= boundaries
    elif given == "boundaries alone":
        del batch["position_ids"]
        batch["cu_seq_lens_q"] = cumulated()
    elif given == "both, and a mask of ones":
        batch |= {**boundaries, "attention_mask": torch.ones_like(batch["input_ids"])}
    check(packed(model, **batch), right, rtol=0, atol=0)


@pytest.mark.parametrize("family", ["stablelm", "gpt_neox", "mistral"])
def test_boundaries_alone_reach_attention_through_each_familys_head(family: str) -> None:
    """StableLM's of 4.51 hands nothing on that it does not know."""
    model, texts = make(family), documents()
    fuse(model)
    fuse(model)
    right, batch = packed(model, **flat(texts)), flat(texts)
    del batch["position_ids"]
    check(packed(copy.deepcopy(model), **batch, cu_seq_lens_q=cumulated()), right)


def test_rows_may_hold_different_sequences() -> None:
    model, texts = build("llama", torch.float32), documents()
    fuse(model)
    rows = [texts[:2], [texts[3], texts[0], texts[2], texts[0]]]
    batches = [flat(row) for row in rows]
    rows = {name: torch.cat([batch[name][:, :21] for batch in batches]) for name in batches[0]}
    hidden = model.model(**{name: each for name, each in rows.items() if name != "labels"}).last_hidden_state
    for row, batch in zip(hidden, batches, strict=True):
        alone = model.model(batch["input_ids"][:, :21], position_ids=batch["position_ids"][:, :21]).last_hidden_state
        torch.testing.assert_close(row, alone[0])
    # a row of one sequence, beside one of two
    batch = flat(texts[:2])
    rows = {name: torch.cat((each, torch.arange(21)[None])) for name, each in batch.items() if name != "labels"}
    one = model.model(torch.arange(21)[None]).last_hidden_state[0]
    torch.testing.assert_close(model.model(**rows).last_hidden_state[1], one)


def test_a_packed_batch_in_fp8_and_in_evaluation() -> None:
    model = build("llama")
    convert_to_fp8(model)
    fuse(model)
    texts = documents((16, 32))
    for training in (True, False):
        model.train(training)
        found, right = packed(model, **flat(texts)), apart(model, texts)
        assert sqnr(found[0], right[0]) > 15  # each cast has the scale of other tokens
        assert found[1] == pytest.approx(right[1], rel=0.01)
        for name, gradient in right[2].items():
            assert sqnr(found[2][name], gradient) > 12, name


IN_ORDER = [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("positions", "mask", "expected"),
    [
        ([IN_ORDER], None, None),
        ([IN_ORDER, IN_ORDER], None, None),
        ([[0, 1, 2, 0, 1, 2], IN_ORDER], None, ([0, 3, 6, 12], 6)),
        ([[0, 1, 2, 0, 1, 2]] * 2, None, ([0, 3, 6, 9, 12], 3)),
        ([[0, 1, 2, 3, 4, 0]], None, ([0, 5, 6], 5)),
        ([[0, 0, 1, 2, 3, 4]], None, ([0, 1, 6], 5)),
        ([[3, 4, 5, 2, 3, 4]], None, ([0, 3, 6], 3)),
        ([[0, 2, 4, 6, 8, 10]], None, None),
        ([[7, 8, 9, 10, 11, 12]], None, None),
        ([[0, 0, 0, 1, 2, 3]], [[0, 0, 1, 1, 1, 1]], None),
        ([[0, 1, 2, 3, 1, 1]], [[1, 1, 1, 1, 0, 0]], None),
        ([[0, 1, 2, 0, 1, 2]], [[1, 1, 1, 1, 1, 1]], ([0, 3, 6], 3)),
        ([[0, 0, 0, 1, 2, 3]], [[0, 1, 1, 0, 0, 1, 1, 1, 1]], None),
        ([[0, 1, 2, 0, 1, 2]], [[0, 0, 0, 1, 1, 1, 1, 1, 1]], ([0, 3, 6], 3)),
        ([[0, 1, 2, 0, 1, 2]], [[1, 1, 1, 1, 1, 0]], "attention_mask has padding; leave the mask out"),
        ([[0, 1, 2, 0, 1, 2]], [[0, 1, 1, 1, 1, 1]], "attention_mask has padding; leave the mask out"),
    ],
)
def test_sequences_begin_where_positions_do_not_grow(positions: list, mask: list | None, expected: Any) -> None:
    given = torch.tensor(positions), None if mask is None else torch.tensor(mask)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            find_sequences((len(positions), 6), *given)
        return
    found = find_sequences((len(positions), 6), *given)
    assert (found is None) == (expected is None)
    if found is not None:
        assert (found.on_host, found.longest) == expected
        assert found.boundaries.dtype is torch.int32
        assert torch.equal(find_sequences((len(positions), 6), given[0].int(), given[1]).boundaries, found.boundaries)


def test_positions_of_one_row_are_those_of_all() -> None:
    assert find_sequences((2, 6), torch.tensor([IN_ORDER])) is None
    assert find_sequences((2, 6), torch.tensor([[0, 1, 2, 0, 1, 2]])).on_host == [0, 3, 6, 9, 12]


@pytest.mark.parametrize(
    ("boundaries", "positions"),
    [
        ([0, 3, 6, 12], [[0, 1, 2, 0, 1, 2], IN_ORDER]),
        ([0, 6, 7, 12], [IN_ORDER, [0, 0, 1, 2, 3, 4]]),
        ([0, 0, 2, 2, 6, 12], [[0, 1, 0, 1, 2, 3], IN_ORDER]),
    ],
)
def test_boundaries_tell_positions_and_the_longest(boundaries: list[int], positions: list[list[int]]) -> None:
    sequences = checked_sequences((2, 6), torch.tensor(boundaries), 99, torch.device("cpu"))
    assert (sequences.on_host, sequences.longest) == (boundaries, 6)
    assert sequences.boundaries.dtype is torch.int32
    found = positions_in(sequences, (2, 6))
    assert torch.equal(found, torch.tensor(positions))
    assert found.dtype is torch.int64


@pytest.mark.parametrize(
    "boundaries",
    [[0, 3, 6], [0, 3, 6, 9], [0, 6, 12, 15], [3, 6, 12], [0, 3, 12], [0, 6, 3, 12], [0, 12, 6], [-1, 0, 6, 12], [0]],
)
def test_boundaries_that_do_not_divide_the_rows_are_refused(boundaries: list[int]) -> None:
    with pytest.raises(ValueError, match=r"for 2 rows of 6 tokens; give 0, where the second .*, \.\.\., 12"):
        checked_sequences((2, 6), torch.tensor(boundaries), None, torch.device("cpu"))


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_boundaries_are_integers(kind: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"cu_seq_lens_q is {kind} with 1 dimensions; give the integers"):
        checked_sequences((1, 6), torch.tensor([0, 3, 6]).to(kind), None, torch.device("cpu"))


def test_boundaries_and_masks_do_not_reach_the_model() -> None:
    """Whose mask of tokens by tokens would cost memory that no layer reads."""
    model, batch = build("llama", torch.float32).model, flat(documents())
    ids = batch["input_ids"]
    more = {"max_length_q": 16, "max_length_k": 16, "cu_seq_lens_k": cumulated()}
    ones = torch.ones_like(ids)
    for given in ({"cu_seq_lens_q": cumulated(), **more}, {"position_ids": batch["position_ids"]}):
        packing = Packing()
        left, passed = packing.before_model(model, (ids,), {"attention_mask": ones, "use_cache": False, **given})
        assert left == ()
        assert passed.keys() == {"input_ids", "attention_mask", "use_cache", "position_ids"}
        assert passed["input_ids"] is ids
        assert torch.equal(passed["position_ids"], batch["position_ids"])
        assert passed["attention_mask"] is None if MAJOR < 5 else passed["attention_mask"].shape == (1, 1, 1, 1)
        assert packing.sequences.on_host == cumulated().tolist()
        assert packing.before_model(model, (ids,), {"attention_mask": ones}) is None
        assert packing.sequences is None


@pytest.mark.parametrize("mask", [None, torch.ones(1, 1, 32, 32, dtype=torch.bool)])
def test_a_mask_of_queries_by_keys_has_the_last_word_over_positions(mask: torch.Tensor | None) -> None:
    packing, batch = Packing(), flat(documents())
    batch = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"], "attention_mask": mask}
    changed = packing.before_model(build("llama").model, (), batch)
    assert (changed is None) == (packing.sequences is None) == (mask is not None)


def test_a_stage_of_a_pipeline_takes_no_boundaries() -> None:
    given = {"hidden_states": torch.zeros(1, 32, 64), "cu_seq_lens_q": cumulated()}
    with pytest.raises(ValueError, match="cuts batches by rows, and cu_seq_lens_q has none; give position_ids"):
        Packing().before_model(build("llama").model, (), given)


def test_attention_of_packed_sequences_drops_out_in_training_alone() -> None:
    model, texts = build("llama", torch.float32, attention_dropout=0.5), documents()
    fuse(model)

    def hidden(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return packed(model, **flat(texts))[0]

    assert torch.equal(hidden(0), hidden(0))
    assert not torch.allclose(hidden(0), hidden(1), atol=1e-3)
    model.eval()
    assert torch.equal(hidden(0), hidden(1))
    check(packed(model, **flat(texts)), apart(model, texts))


def test_an_ordinary_batch_after_a_packed_one_is_not_cut() -> None:
    model, texts = build("llama", torch.float32), documents()
    ids = texts[1][None]
    right = model.model(ids).last_hidden_state
    fuse(model)
    model.model(input_ids=torch.cat(texts)[None][:, :16], cu_seq_lens_q=torch.tensor([0, 3, 16]))
    torch.testing.assert_close(model.model(ids).last_hidden_state, right)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("stop", [True, False])
def test_layers_that_are_run_by_hand_after_a_packed_batch_are_not_cut(training: bool, stop: bool) -> None:
    model, exact = (build(dtype=torch.float32).train(training) for _ in range(2))
    fuse(model)
    if stop:
        model.model.norm.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(**flat(documents()))
    else:
        model(**flat(documents()))
    hidden, positions = torch.randn(1, 32, 64), torch.arange(32)[None]
    found, right = (
        each.model.layers[0].self_attn(hidden, each.model.rotary_emb(hidden, positions), attention_mask=None)[0]
        for each in (model, exact)
    )
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 4])
def test_packed_attention_has_the_scale_window_and_sinks_that_it_is_given(
    window: int | None, with_sinks: bool, scale: float | None
) -> None:
    """Against softmax written out; heads that share a key, and a sequence of one token and of none."""
    q, k, v = tensors(torch.device("cpu"), torch.float32)
    sinks = torch.linspace(-1, 2, 4) if with_sinks else None
    boundaries = torch.tensor([0, 5, 5, 21, 22, 32], dtype=torch.int32)
    y = attend_packed(q, k, v, Sequences(boundaries, 16), window=window, sinks=sinks, scale=scale)
    place = torch.arange(32)
    sequence = torch.searchsorted(boundaries, place, right=True)
    seen = (sequence[:, None] == sequence) & (place[:, None] >= place) & (place[:, None] - place < (window or 32))
    for head in range(4):
        scores = q[0, head] @ k[0, head // 2].t() * (64**-0.5 if scale is None else scale)
        parts = scores.masked_fill(~seen, -torch.inf).exp()
        total = parts.sum(-1, keepdim=True) + (sinks[head].exp() if with_sinks else 0)
        torch.testing.assert_close(y[0, head], parts / total @ v[0, head // 2])


@pytest.mark.parametrize("window", [None, 4])
def test_packed_attention_is_bit_for_bit_that_of_each_sequence(window: int | None) -> None:
    q, k, v = tensors(torch.device("cpu"), torch.float32)
    y = attend_packed(q, k, v, Sequences(cumulated(), 16), window=window)
    for begin, end in zip(cumulated()[:-1], cumulated()[1:], strict=True):
        mask = None
        if window is not None and end - begin > window:
            distance = torch.arange(end - begin)[:, None] - torch.arange(end - begin)
            mask = (distance >= 0) & (distance < window)
        alone = attend(q[:, :, begin:end], k[:, :, begin:end], v[:, :, begin:end], mask)
        torch.testing.assert_close(y[:, :, begin:end], alone, rtol=0, atol=0)


def tensors(device: torch.device, dtype: torch.dtype, size: int = 64) -> list[torch.Tensor]:
    """Query of 4 heads, key and value of 2, [1, H, S, D], as layers have them."""
    rows = torch.randn(1, sum(LENGTHS), 8, size, device=device).to(dtype)
    return [each.transpose(1, 2).requires_grad_() for each in rows.split((4, 2, 2), 2)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_one_kernel_attends_as_one_by_one(dtype: torch.dtype, size: int, window: int | None, with_sinks: bool) -> None:
    torch.manual_seed(0)
    inputs = tensors(torch.device("cuda"), dtype, size)
    if with_sinks:
        inputs.append(torch.randn(4, device="cuda").to(dtype).requires_grad_())
    exact = [each.detach().float().requires_grad_() for each in inputs]
    sequences = Sequences(cumulated().cuda(), 16)
    y, reference = (
        attend_packed(*each[:3], sequences, window=window, sinks=each[3] if with_sinks else None)
        for each in (inputs, exact)
    )
    assert sqnr(y, reference) > 40
    dy = torch.randn_like(y)
    for found, right in zip(
        torch.autograd.grad(y, inputs, dy), torch.autograd.grad(reference, exact, dy.float()), strict=True
    ):
        assert sqnr(found, right) > 35


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "value_size"), [(192, 128), (64, 24)])
def test_one_kernel_attends_to_values_narrower_than_keys(size: int, value_size: int) -> None:
    torch.manual_seed(0)
    query, key, _ = tensors(torch.device("cuda"), torch.bfloat16, size)
    inputs = [query, key, tensors(torch.device("cuda"), torch.bfloat16, value_size)[2]]
    exact = [each.detach().float().requires_grad_() for each in inputs]
    y, reference = (attend_packed(*each, Sequences(cumulated().cuda(), 16)) for each in (inputs, exact))
    assert y.shape[-1] == value_size
    assert sqnr(y, reference) > 40
    dy = torch.randn_like(y)
    for found, right in zip(
        torch.autograd.grad(y, inputs, dy), torch.autograd.grad(reference, exact, dy.float()), strict=True
    ):
        assert sqnr(found, right) > 35


@pytest.mark.parametrize("window", [None, 4])
def test_sinks_around_a_kernel_that_knows_none(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of flash attention what it computes: its backward reads its output, and the sums of its softmax."""

    def scores(q, k, sequences):
        places = torch.arange(len(q))
        sequence = torch.searchsorted(sequences.boundaries, places, right=True)
        distance = places[:, None] - places
        inside = (sequence[:, None] == sequence) & (distance >= 0) & (distance < (window or len(q)))
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        return torch.einsum("ihd,jhd->hij", q, k).mul(q.shape[-1] ** -0.5).masked_fill(~inside, -torch.inf)

    def forward(q, k, v, how):
        found = scores(q, k, how.sequences)
        v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
        none = torch.zeros(0)
        return torch.einsum("hij,jhd->ihd", found.softmax(-1), v), found.logsumexp(-1), none, none, none

    def backward(dy, saved, state, how):
        q, k, v, y, sums = saved
        groups = q.shape[1] // k.shape[1]
        softmax = (scores(q, k, how.sequences) - sums[..., None]).exp()
        dv = torch.einsum("hij,ihd->jhd", softmax, dy)
        given = torch.einsum("ihd,jhd->hij", dy, v.repeat_interleave(groups, 1))
        back = softmax * (given - (dy * y).sum(-1).t()[..., None]) * q.shape[-1] ** -0.5
        dq = torch.einsum("hij,jhd->ihd", back, k.repeat_interleave(groups, 1))
        dk = torch.einsum("hij,ihd->jhd", back, q)
        return dq, *(each.unflatten(1, (-1, groups)).sum(2) for each in (dk, dv))

    leaves = [*tensors(torch.device("cpu"), torch.float32), torch.randn(4, requires_grad=True)]
    sequences = Sequences(cumulated(), 16)
    right = attend_packed(*leaves[:3], sequences, window=window, sinks=leaves[3])
    monkeypatch.setattr(attention, "why_one_by_one", lambda query: None)
    monkeypatch.setattr(attention, "_flash_forward", forward)
    monkeypatch.setattr(attention, "_flash_backward", backward)
    found = attend_packed(*leaves[:3], sequences, window=window, sinks=leaves[3])
    torch.testing.assert_close(found, right)
    dy = torch.randn_like(right)
    gradients = [torch.autograd.grad(each, leaves, dy) for each in (found, right)]
    torch.testing.assert_close(*gradients)


def test_batches_of_one_sequence_a_row_stay_as_they_were() -> None:
    model = build("llama", torch.float32)
    plain = copy.deepcopy(model)
    fuse(model)
    ids = torch.arange(32).view(2, 16)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    skipped = torch.arange(16)[None] * 3  # positions may leave some out
    for more in (
        {"attention_mask": mask, "position_ids": positions},
        {"attention_mask": mask.flip(1), "position_ids": torch.arange(16)[None]},
        {"attention_mask": torch.ones_like(mask), "position_ids": skipped},
    ):
        right = plain.model(ids, **more).last_hidden_state
        valid = more["attention_mask"].bool()
        torch.testing.assert_close(model.model(ids, **more).last_hidden_state[valid], right[valid])


def test_several_tokens_go_on_from_a_cache() -> None:
    """As in the next turn of a conversation, or where tokens were drafted: the mask has those of the cache too."""
    model = build("llama", torch.float32).eval()
    plain = copy.deepcopy(model)
    fuse(model)
    ids = torch.arange(32).view(2, 16)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)

    def states(model: nn.Module) -> torch.Tensor:
        begun = model.model(ids[:, :11], attention_mask=mask[:, :11], position_ids=positions[:, :11], use_cache=True)
        more = {"attention_mask": mask, "position_ids": positions[:, 11:], "past_key_values": begun.past_key_values}
        return model.model(ids[:, 11:], **more).last_hidden_state

    torch.testing.assert_close(states(model), states(plain))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_mask": torch.arange(32)[None] < 30}, "attention_mask has padding; leave the mask out"),
        ({"output_attentions": True}, "attention of packed sequences is causal"),
        ({"cu_seq_lens_q": torch.tensor([0, 5, 21])}, "for 1 rows of 32 tokens; give 0, where the second"),
        ({"cu_seq_lens_q": torch.tensor([0, 21, 5, 32])}, "for 1 rows of 32 tokens; give 0, where the second"),
        ({"cu_seq_lens_q": torch.tensor([0, 16, 32, 40])}, "for 1 rows of 32 tokens; give 0, where the second"),
        ({"cu_seq_lens_q": torch.tensor([[0, 32]])}, "with 2 dimensions; give the integers"),
        ({"cu_seq_lens_q": cumulated(), "attention_mask": torch.arange(32)[None] < 30}, "takes no attention_mask; le"),
        ({"cu_seq_lens_q": cumulated(), "attention_mask": torch.ones(1, 1, 32, 32)}, "takes no attention_mask; leave"),
        ({"cu_seq_lens_q": cumulated(), "cu_seq_lens_k": torch.tensor([0, 32])}, "queries and keys are of the same"),
        ({"cu_seq_lens_q": cumulated(), "cu_seq_lens_k": torch.tensor([0, 6, 21, 32])}, "the same boundaries as both"),
    ],
)
def test_what_packing_does_not_cover_is_refused(change: dict[str, Any], message: str) -> None:
    model = build("llama", torch.float32)
    fuse(model)
    with pytest.raises(ValueError, match=message):
        model(**flat(documents()) | change)


@pytest.mark.parametrize("change", [{"floor_scale": 16}, *([{"attention_chunk_size": 15}] if MAJOR >= 5 else [])])
def test_sequences_that_llama_4_would_attend_to_otherwise_are_refused(change: dict[str, int]) -> None:
    """The longest has 16 tokens; the fourth layer has no positions in any version."""
    model = build("llama4_text", torch.float32, num_hidden_layers=4, no_rope_layers=[1, 1, 1, 0], **change)
    fuse(model)
    with pytest.raises(ValueError, match="has 16 tokens, and FusedLlama4TextAttention attends in chunks, or by a temp"):
        model(**flat(documents()))


def test_norms_of_heads_keep_sequences_apart() -> None:
    model, texts = build("cohere", torch.float32, use_qk_norm=True), documents()
    fuse(model)
    check(packed(model, **flat(texts)), apart(model, texts))


def test_a_model_with_an_attention_that_is_not_fused_refuses() -> None:
    model = build("llama", torch.float32)
    model.model.layers[1].self_attn.k_proj = nn.Sequential(model.model.layers[1].self_attn.k_proj)
    assert "attention" in fuse(model)
    model(torch.arange(8)[None])
    with pytest.raises(ValueError, match="some attention of the model is not fused"):
        model(**flat(documents()))


def test_a_copy_knows_its_own_batches() -> None:
    model, texts = build("llama", torch.float32), documents()
    fuse(model)
    fuse(model)
    right = packed(model, **flat(texts))
    other = copy.deepcopy(model)
    model.model(torch.arange(8)[None])
    check(packed(other, **flat(texts)), right)
    assert len(other.model._forward_pre_hooks) == 2  # no more than one of packing and one of caches


def test_the_kernels_of_attention_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert kernels(cpu) == "flash attention, of packed sequences one call for each (there is no kernel for the CPU)"
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *args, **kwargs: SDPBackend.MATH.value)
    assert kernels(cpu, key_heads=8).startswith("products that hold all scores in memory, of packed")


@pytest.mark.gpu
def test_the_report_names_the_kernels_of_attention() -> None:
    model = build("llama").cuda()
    assert report(model).attention is None
    fuse(model)
    assert report(model).attention == kernels(torch.device("cuda"), key_heads=2, query_heads=4, features=16)
    assert ", attention by " in report(model).summary()
    assert "of packed sequences flash attention" in report(model).attention
