"""The loss over chunks of logits: values, gradients, memory, refusals."""

from __future__ import annotations

import math
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fp8booster import FP8Config, fp8_linear
from fp8booster.config import Formats
from fp8booster.kernels.alignment import aligned
from fp8booster.kernels.cast import cast
from fp8booster.kernels.scales import amax_of
from fp8booster.nn.fused import loss as loss_module
from fp8booster.nn.fused.loss import HeadProducts, default_chunk, linear_cross_entropy
from fp8booster.nn.weights.casting import Casts
from fp8booster.nn.weights.delivered import deliver_amax
from tests.nn.reference import signal_to_noise

TOKENS, FEATURES, VOCABULARY = 50, 32, 100
TOLERANCES = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Of gradients, by norm: what rounding logits, their gradient and sums over chunks to each dtype leaves."""


def operands(dtype: torch.dtype, bias: bool = True, device: str = "cpu") -> tuple[list[Any], torch.Tensor]:
    """([hidden, weight, bias or None], targets), the first tokens and every seventh ignored."""
    torch.manual_seed(0)
    values = [torch.randn(TOKENS, FEATURES), 0.3 * torch.randn(VOCABULARY, FEATURES), torch.randn(VOCABULARY)]
    leaves = [value.to(device, dtype).requires_grad_() for value in values]
    targets = torch.randint(0, VOCABULARY, (TOKENS,), device=device)
    targets[:3] = targets[::7] = -100
    return [*leaves[:2], leaves[2] if bias else None], targets


def exact(leaves: list[Any], targets: torch.Tensor, **options: Any) -> tuple[torch.Tensor, list[Any]]:
    """Loss and gradients in double precision."""
    doubles = [None if leaf is None else leaf.detach().double().requires_grad_() for leaf in leaves]
    loss = F.cross_entropy(F.linear(*doubles), targets, **options)
    loss.backward()
    return loss.detach(), [None if leaf is None else leaf.grad for leaf in doubles]


def error(found: torch.Tensor, right: torch.Tensor) -> float:
    return ((found.double() - right).norm() / right.norm()).item()


def fused(leaves: list[Any], targets: torch.Tensor, **options: Any) -> torch.Tensor:
    return linear_cross_entropy(*leaves[:2], targets, bias=leaves[2], **options)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("chunk_tokens", [None, 50, 16, 7, 1])
@pytest.mark.parametrize("bias", [False, True])
def test_value_and_gradients_are_those_in_double_precision(dtype, chunk_tokens, bias) -> None:
    for reduction in ("mean", "sum"):
        leaves, targets = operands(dtype, bias)
        right, gradients = exact(leaves, targets, reduction=reduction)
        loss = fused(leaves, targets, chunk_tokens=chunk_tokens, reduction=reduction)
        loss.backward()
        assert loss.dtype is torch.float32
        assert abs(loss.item() - right.item()) <= TOLERANCES[dtype] * right.item()
        for leaf, gradient in zip(leaves, gradients, strict=True):
            if leaf is not None:
                assert leaf.grad.dtype is dtype
                assert error(leaf.grad, gradient) < TOLERANCES[dtype]


@pytest.mark.parametrize("config", [None, FP8Config(emulate=True)], ids=["FP32", "FP8"])
@pytest.mark.parametrize(("scale", "cap"), [(0.25, None), (1.0, 3.0), (2.0, 3.0)])
def test_logits_that_are_scaled_and_capped(scale, cap, config, device) -> None:
    leaves, targets = operands(torch.float32, device=device)
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    logits = scale * F.linear(*doubles)
    right = F.cross_entropy(logits if cap is None else cap * (logits / cap).tanh(), targets)
    right.backward()
    loss = fused(leaves, targets, chunk_tokens=16, scale=scale, cap=cap, casts=config and Casts(config))
    loss.backward()
    torch.testing.assert_close(loss.double(), right, rtol=1e-5 if config is None else 0.02, atol=0)
    for leaf, other in zip(leaves, doubles, strict=True):
        assert error(leaf.grad, other.grad) < (1e-5 if config is None else 0.15)


def test_what_lies_between_rows_of_logits_is_not_left_to_chance(monkeypatch) -> None:
    """A product may read it, and multiply it by zero: NaN would stay."""
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, shape: self.new_full(shape, math.nan))
    products = HeadProducts(torch.randn(VOCABULARY, FEATURES), None, (True, True, False), torch.float32)
    logits = products.logits(torch.randn(TOKENS, FEATURES))
    rows = torch.as_strided(logits, (TOKENS, logits.stride(0)), logits.stride(), 0)
    assert rows.shape[1] == aligned(VOCABULARY) > VOCABULARY
    assert rows[:, :VOCABULARY].isfinite().all()
    assert (rows[:, VOCABULARY:] == 0).all()


@pytest.mark.parametrize("ignored", [5, -1, VOCABULARY])
def test_another_ignored_target(ignored, device) -> None:
    """A token, or none; then what is ignored otherwise is none."""
    leaves, targets = operands(torch.float32, device=device)
    if device.type == "cpu":
        with pytest.raises(ValueError, match=f"holds -100, .*; tokens that do not count are {ignored}"):
            fused(leaves, targets, ignore_index=ignored)
    targets = torch.where(targets == -100, ignored, targets)
    right, gradients = exact(leaves, targets, ignore_index=ignored)
    loss = fused(leaves, targets, ignore_index=ignored, chunk_tokens=13)
    loss.backward()
    torch.testing.assert_close(loss.double(), right, rtol=1e-5, atol=0)
    for leaf, gradient in zip(leaves, gradients, strict=True):
        assert error(leaf.grad, gradient) < 1e-5


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("tokens", [TOKENS, 0])
def test_nothing_to_count_is_torchs_result_and_all_gradients_vanish(tokens, dtype) -> None:
    for reduction, nothing in (("mean", math.nan), ("sum", 0.0)):
        leaves, targets = operands(dtype)
        loss = linear_cross_entropy(
            leaves[0][:tokens],
            leaves[1],
            torch.full_like(targets[:tokens], -100),
            bias=leaves[2],
            chunk_tokens=16,
            reduction=reduction,
        )
        loss.backward()
        torch.testing.assert_close(loss.item(), nothing, equal_nan=True)
        for leaf in leaves:
            assert torch.equal(leaf.grad, torch.zeros_like(leaf))


def test_nothing_to_count_divided_by_none_leaves_gradients_zero(device) -> None:
    """As where a batch of all ranks has no token that counts: its loss is NaN, and the weights are not."""
    leaves, targets = operands(torch.float32, device=device)
    ignored = torch.full_like(targets, -100)
    loss = linear_cross_entropy(*leaves[:2], ignored, bias=leaves[2], reduction="sum") / torch.zeros_like(
        leaves[0][0, 0]
    )
    loss.backward()
    assert loss.isnan()
    for leaf in leaves:
        assert torch.equal(leaf.grad, torch.zeros_like(leaf))


def test_what_is_no_number_reaches_loss_and_gradients() -> None:
    leaves, targets = operands(torch.float32)
    with torch.no_grad():
        leaves[0][20, 3] = math.nan
    loss = fused(leaves, targets, chunk_tokens=16)
    loss.backward()
    assert loss.isnan()
    assert leaves[0].grad[20].isnan().all()
    assert leaves[0].grad[19].isfinite().all()
    assert leaves[1].grad.isnan().all()


class LiveMemory(TorchDispatchMode):
    """The matrices of some numbers of columns that operators made: most rows, and by dtype the most bytes at once."""

    def __init__(self, columns: set[int], *besides: torch.Tensor) -> None:
        super().__init__()
        self.columns, self.live, self.most, self.largest_rows = columns, {}, {}, 0
        self.besides = {tensor.untyped_storage().data_ptr() for tensor in besides}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **kwargs or {})
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.dim() == 2 and tensor.shape[1] in self.columns:
                storage = tensor.untyped_storage()
                key = storage.data_ptr()
                if key in self.besides:
                    continue
                self.largest_rows = max(self.largest_rows, tensor.shape[0])
                self.live[key] = (weakref.ref(storage), tensor.dtype, storage.nbytes())
        self.live = {key: entry for key, entry in self.live.items() if entry[0]() is not None}
        for dtype in {entry[1] for entry in self.live.values()}:
            now = sum(entry[2] for entry in self.live.values() if entry[1] is dtype)
            self.most[dtype] = max(self.most.get(dtype, 0), now)
        return result


@pytest.mark.parametrize("config", [None, FP8Config(always=True)], ids=["BF16", "FP8"])
@pytest.mark.parametrize("gradients", [True, False])
def test_the_logits_of_one_chunk_live_at_a_time(gradients, config) -> None:
    vocabulary, tokens, chunk = 1003, 160, 32
    hidden, weight = torch.randn(tokens, 16).bfloat16(), torch.randn(vocabulary, 16).bfloat16()
    leaves = [leaf.requires_grad_(gradients) for leaf in (hidden, weight)]
    targets = torch.randint(0, vocabulary, (tokens,))
    with LiveMemory({vocabulary, aligned(vocabulary)}, *leaves) as memory:
        loss = linear_cross_entropy(*leaves, targets, chunk_tokens=chunk, casts=config and Casts(config))
        assert memory.largest_rows == chunk
        if gradients:
            loss.backward()
    assert memory.largest_rows == chunk
    assert memory.most[torch.bfloat16] == chunk * aligned(vocabulary) * 2
    with LiveMemory({vocabulary}) as memory:  # what this would see otherwise
        F.cross_entropy(F.linear(*leaves).float(), targets)
    assert memory.most[torch.float32] >= tokens * vocabulary * 4


def test_only_what_needs_a_gradient_is_multiplied() -> None:
    class Products(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
            self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
            return func(*args, **kwargs or {})

    for hidden, weight in ((True, True), (True, False), (False, True), (False, False)):
        leaves, targets = operands(torch.bfloat16, bias=False)
        leaves[0].requires_grad_(hidden), leaves[1].requires_grad_(weight)
        with Products() as products:
            loss = fused(leaves, targets, chunk_tokens=25)
        assert products.count == 2 * (1 + hidden + weight)
        assert loss.requires_grad == (hidden or weight)
        if loss.requires_grad:
            loss.backward()
        assert [leaf.grad is not None for leaf in leaves[:2]] == [hidden, weight]
        with_bias = [*leaves[:2], torch.zeros(VOCABULARY, dtype=torch.bfloat16)]
        for bias in (False, True):
            loss_of_bias = fused([*leaves[:2], with_bias[2].requires_grad_(bias)], targets)
            assert loss_of_bias.requires_grad == (hidden or weight or bias)
            if loss_of_bias.requires_grad:
                made = [each is not None for each in loss_of_bias.grad_fn.gradients]
                assert made == [hidden, weight, bias]
        with Products() as products, torch.no_grad():
            assert torch.equal(fused(leaves, targets, chunk_tokens=25), loss.detach())
        assert products.count == 2


def test_a_loss_used_twice_in_one_backward_pass_is_right_and_a_second_pass_is_refused() -> None:
    leaves, targets = operands(torch.float32)
    _, gradients = exact(leaves, targets)
    loss = fused(leaves, targets, chunk_tokens=16)
    (loss * 0.5 + loss * 2).backward(retain_graph=True)
    for leaf, gradient in zip(leaves, gradients, strict=True):
        assert error(leaf.grad, 2.5 * gradient) < 1e-6
    with pytest.raises(RuntimeError, match="add up all losses before one backward"):
        loss.backward()
    other = fused(leaves, targets)
    torch.autograd.grad(other, leaves[0], retain_graph=True)
    with pytest.raises(RuntimeError, match="compute the loss again"):
        other.backward()


def test_gradients_are_handed_over_without_a_copy() -> None:
    leaves, targets = operands(torch.bfloat16, bias=False)
    loss = fused(leaves, targets)
    places = [gradient.data_ptr() for gradient in loss.grad_fn.gradients[:2]]
    loss.backward()
    assert [leaf.grad.data_ptr() for leaf in leaves[:2]] == places


def test_fp16_gradients_survive_where_the_loss_is_scaled_in_backward_alone() -> None:
    torch.manual_seed(0)
    tokens, scale = 2**17, 2.0**16  # 1 / tokens is no normal FP16 number
    leaves = [torch.randn(tokens, 8).half().requires_grad_(), torch.randn(20, 8).half().requires_grad_()]
    targets = torch.randint(0, 20, (tokens,))
    _, gradients = exact(leaves, targets)
    (linear_cross_entropy(*leaves, targets, chunk_tokens=tokens // 2) * scale).backward()
    for leaf, gradient in zip(leaves, gradients, strict=True):
        assert leaf.grad.dtype is torch.float16
        assert error(leaf.grad, gradient * scale) < 1e-3


def test_fp16_sums_over_tokens_do_not_overflow() -> None:
    hidden = torch.full((8192, 16), 20.0).half().requires_grad_()
    weight = torch.zeros(20, 16).half().requires_grad_()
    targets = torch.zeros(8192, dtype=torch.int64)
    linear_cross_entropy(hidden, weight, targets).backward()
    assert weight.grad[0, 0].item() == pytest.approx(-19.0, rel=1e-3)


def test_a_chunk_is_added_to_the_gradient_before_that_is_rounded() -> None:
    """256 + (1 + 2^-9) is 258 in BF16; with the chunk's sum rounded first it would be 256."""
    products = HeadProducts(torch.zeros(1, 1).bfloat16(), None, (False, True, False), torch.bfloat16)
    gradient, hidden = torch.tensor([[1.0], [2.0**-9]]).bfloat16(), torch.ones(2, 1).bfloat16()
    total = torch.full((1, 1), 256.0).bfloat16()
    _, found = products.gradients(hidden, gradient, None, total)
    assert found.item() == 258
    assert found.data_ptr() == total.data_ptr()


@pytest.mark.parametrize("config", [None, FP8Config(emulate=True)], ids=["BF16", "FP8"])
def test_many_chunks_are_added_up_in_fp32(config, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(2048, 32).bfloat16(), (0.1 * torch.randn(64, 32)).bfloat16()
    bias, targets = torch.randn(64).bfloat16(), torch.randint(0, 64, (2048,))
    _, gradients = exact([hidden, weight, bias], targets)

    def errors(chunks: float) -> list[float]:
        """Of the gradients of weight and bias; in FP8 but for what its casts err by, which chunks change little."""
        leaves = [leaf.clone().requires_grad_() for leaf in (weight, bias)]
        amax = deliver_amax(hidden.clone(), amax_of(hidden))
        chunk_tokens = int(2048 / chunks)
        linear_cross_entropy(
            amax, leaves[0], targets, bias=leaves[1], chunk_tokens=chunk_tokens, casts=config and Casts(config)
        ).backward()
        assert [leaf.grad.dtype for leaf in leaves] == [torch.bfloat16] * 2
        return [error(leaf.grad, gradient) for leaf, gradient in zip(leaves, gradients[1:], strict=True)]

    one, limit = errors(1), loss_module.MOST_CHUNKS_IN_BF16
    several, over, many = errors(limit), errors(limit + 0.5), errors(64)
    assert max(each[1] for each in (several, over, many)) < 1.1 * one[1]  # in FP32 always
    monkeypatch.setattr(loss_module, "MOST_CHUNKS_IN_BF16", 64)
    rounded = errors(64)
    if config is None:
        assert one[0] < several[0] < 2.5 * one[0]
        assert max(over[0], many[0]) < 1.05 * one[0]
        assert rounded[0] > 3 * one[0]
    else:
        assert max(over[0], many[0]) < 1.05 * one[0]
        assert rounded[0] > 1.02 * many[0]


@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_head_in_fp8_is_the_fp8_linear_layer_and_its_loss(bias, rowwise, products, casts) -> None:
    config = FP8Config(scaling="rowwise" if rowwise else "tensorwise")
    leaves, targets = operands(torch.bfloat16, bias)
    native = [None if leaf is None else leaf.detach().clone().requires_grad_() for leaf in leaves]
    expected = F.cross_entropy(fp8_linear(*native, config).float(), targets)
    expected.backward()
    products.clear(), casts.clear()
    loss = fused(leaves, targets, casts=Casts(config))
    assert len(products) == 3
    if not rowwise:
        assert [matrix.shape for matrix, _ in casts] == [
            (VOCABULARY, FEATURES),
            (TOKENS, FEATURES),
            (TOKENS, VOCABULARY),
        ]
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    for leaf, other in zip(leaves, native, strict=True):
        if leaf is not None:
            assert signal_to_noise(other.grad, leaf.grad) > 45


def test_chunks_of_a_head_in_fp8_share_its_weight(products, casts) -> None:
    config = FP8Config()
    leaves, targets = operands(torch.bfloat16, bias=False)
    _, gradients = exact(leaves[:2], targets)
    w = Casts(config).quantize_weight(leaves[1], transposed=True)
    casts.clear()
    fused(leaves, targets, casts=Casts(config), quantized_weight=w, chunk_tokens=20).backward()
    assert len(products) == 9
    assert len(casts) == 6
    for leaf, gradient in zip(leaves[:2], gradients, strict=True):
        assert signal_to_noise(gradient, leaf.grad) > 20
    plain_alone = Casts(config).quantize_weight(leaves[1], transposed=False)
    with pytest.raises(ValueError, match="no transpose"):
        fused(leaves, targets, casts=Casts(config), quantized_weight=plain_alone)
    leaves[0].requires_grad_(False)  # nothing reads the transpose
    leaves[1].grad = None
    fused(leaves, targets, casts=Casts(config), quantized_weight=plain_alone, chunk_tokens=20).backward()
    assert signal_to_noise(gradients[1], leaves[1].grad) > 20


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("weight", [False, True])
def test_a_head_in_fp8_casts_the_layouts_that_its_products_read(hidden, weight, monkeypatch) -> None:
    leaves, targets = operands(torch.bfloat16, bias=False)
    leaves[0].requires_grad_(hidden), leaves[1].requires_grad_(weight)
    layouts, right_cast = [], cast.run

    def seen(matrix, *args, plain=True, transposed, **options):
        layouts.append((tuple(matrix.shape), plain, transposed))
        return right_cast(matrix, *args, plain=plain, transposed=transposed, **options)

    monkeypatch.setattr(cast, "run", seen)
    fused(leaves, targets, casts=Casts(FP8Config()))
    expected = [((VOCABULARY, FEATURES), True, hidden), ((TOKENS, FEATURES), True, weight)]
    assert layouts == expected + ([((TOKENS, VOCABULARY), hidden, weight)] if hidden or weight else [])


@pytest.mark.parametrize("products_of", ["fprop", "dgrad", "wgrad"])
def test_each_product_of_a_head_in_fp8_is_added_up_as_its_configuration_says(products_of, monkeypatch) -> None:
    fast = {name: name == products_of for name in ("fprop", "dgrad", "wgrad")}
    config = FP8Config(fast_accumulation=tuple(name for name, is_fast in fast.items() if is_fast))
    seen, right_product = [], loss_module.product

    def product(*args, fast_accumulation, **options):
        seen.append(fast_accumulation)
        return right_product(*args, fast_accumulation=fast_accumulation, **options)

    monkeypatch.setattr(loss_module, "product", product)
    leaves, targets = operands(torch.bfloat16, bias=False)
    fused(leaves, targets, casts=Casts(config))
    assert seen == [fast["fprop"], fast["wgrad"], fast["dgrad"]]


@pytest.mark.parametrize("gradient_format", [torch.float8_e5m2, torch.float8_e4m3fn])
def test_the_gradient_of_logits_is_cast_to_the_gradients_format(gradient_format, casts) -> None:
    leaves, targets = operands(torch.bfloat16, bias=False)
    fused(leaves, targets, casts=Casts(FP8Config(formats=Formats(gradient=gradient_format))))
    assert [format for matrix, format in casts if matrix.shape == (TOKENS, VOCABULARY)] == [gradient_format]


def test_an_amax_that_came_with_the_hidden_states_serves_all_chunks() -> None:
    def loss(chunk_tokens: int, deliver: bool) -> float:
        leaves, targets = operands(torch.bfloat16, bias=False)
        if deliver:
            deliver_amax(leaves[0], amax_of(leaves[0]).expand(3))
        return fused(leaves, targets, casts=Casts(FP8Config()), chunk_tokens=chunk_tokens).item()

    assert loss(TOKENS, True) == pytest.approx(loss(16, True), rel=1e-6)
    assert loss(TOKENS, True) == loss(TOKENS, False)
    assert loss(16, True) != pytest.approx(loss(16, False), rel=1e-6)


def test_under_autocast_products_run_in_16_bits_and_gradients_keep_their_dtypes() -> None:
    leaves, targets = operands(torch.float32)
    right, gradients = exact(leaves, targets)
    with torch.autocast("cpu", torch.bfloat16), LiveMemory({VOCABULARY}) as memory:
        loss = fused(leaves, targets, chunk_tokens=16)
    loss.backward()
    assert torch.bfloat16 in memory.most
    assert loss.dtype is torch.float32
    assert abs(loss - right) < 1e-2 * right
    for leaf, gradient in zip(leaves, gradients, strict=True):
        assert leaf.grad.dtype is torch.float32
        assert 1e-5 < error(leaf.grad, gradient) < 1e-2


@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_a_checkpoint(reentrant) -> None:
    leaves, targets = operands(torch.float32)
    _, gradients = exact(leaves, targets)

    def block(hidden: torch.Tensor) -> torch.Tensor:
        return fused([hidden * 2 / 2, *leaves[1:]], targets, chunk_tokens=16)

    checkpoint(block, leaves[0], use_reentrant=reentrant).backward()
    for leaf, gradient in zip(leaves, gradients, strict=True):
        assert error(leaf.grad, gradient) < 1e-6


def test_in_compiled_code() -> None:
    leaves, targets = operands(torch.float32)
    right, gradients = exact(leaves, targets)

    def double_loss(*inputs: Any) -> torch.Tensor:
        return fused([inputs[0] * 1, *inputs[1:]], targets, chunk_tokens=16) * 2

    loss = torch.compile(double_loss, backend="aot_eager")(*leaves)
    loss.backward()
    torch.testing.assert_close(loss.double(), 2 * right, rtol=1e-5, atol=0)
    for leaf, gradient in zip(leaves, gradients, strict=True):
        assert error(leaf.grad, 2 * gradient) < 1e-5


@pytest.mark.parametrize("tokens", [1, 100, 8192, 8193, 16384, 100_000])
@pytest.mark.parametrize("vocabulary", [100, 32000, 128256, 300_000_000])
def test_default_chunks_fit_the_budget_and_are_of_one_size(vocabulary, tokens) -> None:
    chunk = default_chunk(tokens, vocabulary, 256, 2)
    assert chunk % loss_module.ROWS == 0
    assert chunk == loss_module.ROWS or chunk * vocabulary * 2 <= loss_module.CHUNK_BYTES
    count = -(-tokens // chunk)
    assert tokens > chunk * count - loss_module.ROWS * count
    assert default_chunk(8192, 32000, 4096, 2) == 8192
    assert default_chunk(16384, 32000, 2048, 2) == 16384
    assert default_chunk(16384, 128256, 4096, 2) == 4096
    assert default_chunk(8192, 256000, 8192, 2) == 4096  # half of the weight


@pytest.mark.parametrize(
    ("change", "kind", "sentence"),
    [
        ({"hidden": torch.zeros(2, 25, 32)}, ValueError, "give a matrix of"),
        ({"hidden": torch.zeros(50, 31)}, ValueError, "the last size of both"),
        ({"hidden": torch.zeros(50, 32).double()}, TypeError, "cast it to"),
        ({"hidden": torch.zeros(50, 32).half()}, TypeError, "torch.autocast"),
        ({"targets": torch.zeros(49, dtype=torch.int64)}, ValueError, "give 50 values"),
        ({"targets": torch.zeros(50, dtype=torch.int32)}, TypeError, "int64"),
        ({"targets": torch.full((50,), 100)}, ValueError, "holds 100, which is no token"),
        ({"targets": torch.full((50,), -1)}, ValueError, "holds -1, which is no token"),
        ({"bias": torch.zeros(99)}, ValueError, "give 100 values"),
        ({"reduction": "none"}, ValueError, "'mean' or 'sum'"),
        ({"chunk_tokens": 0}, ValueError, "give 1 or more"),
        ({"cap": 0.0}, ValueError, "give positive numbers"),
        ({"scale": -1.0}, ValueError, "give positive numbers"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_sentence(change, kind, sentence) -> None:
    leaves, targets = operands(torch.float32)
    arguments = {"hidden": leaves[0], "weight": leaves[1], "targets": targets, "bias": leaves[2]} | change
    with pytest.raises(kind, match=sentence):
        linear_cross_entropy(**arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [None, FP8Config()], ids=["BF16", "FP8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu_at_the_sizes_of_a_model(dtype, config) -> None:
    torch.manual_seed(0)
    device = torch.device("cuda")
    hidden = torch.randn(2000, 1024, device=device).to(dtype).requires_grad_()
    weight = (0.02 * torch.randn(32000, 1024, device=device)).to(dtype).requires_grad_()
    targets = torch.randint(0, 32000, (2000,), device=device)
    native = [leaf.detach().float().requires_grad_() for leaf in (hidden, weight)]
    expected = F.cross_entropy(F.linear(*native), targets)
    (expected * 8).backward()
    for chunk_tokens in (None, 512, 100):
        torch.cuda.set_sync_debug_mode("error")
        try:
            loss = linear_cross_entropy(
                hidden, weight, targets, chunk_tokens=chunk_tokens, casts=config and Casts(config)
            )
            (loss * 8).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.testing.assert_close(loss, expected, rtol=1e-3, atol=0)
        for leaf, other in zip((hidden, weight), native, strict=True):
            assert signal_to_noise(other.grad, leaf.grad) > (40 if config is None else 20)
            leaf.grad = None
