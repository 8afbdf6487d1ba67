"""What Colossal-AI gives its ring attention reaches ours, and what ours gives comes back as Colossal-AI has it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fp8booster.colossal  # noqa: F401  (patches colossalai before it is imported)

BATCH, HEADS, TOKENS, SIZE = 2, 3, 5, 4


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What ours was given last; it gives v and numbered sums, [B, H, S]."""
    from fp8booster.colossal.tensor import attention as ring

    given: dict[str, Any] = {}

    def ring_attention(q: Any, k: Any, v: Any, group: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        given.clear()
        given.update(q=q, k=k, v=v, group=group, **options)
        return v, torch.arange(BATCH * HEADS * TOKENS, dtype=torch.float32).view(BATCH, HEADS, TOKENS)

    monkeypatch.setattr(ring, "ring_attention", ring_attention)
    monkeypatch.setattr(ring, "encoding_of", lambda group: "FP8" if group == "group of axis 2" else None)
    return given


def attention(mask: str = "CAUSAL", axis: int = 2, **options: Any) -> Any:
    from colossalai.shardformer.layer.attn import AttnMaskType

    from fp8booster.colossal.tensor.attention import attend_in_ring

    q, k, v = (torch.randn(BATCH, HEADS, TOKENS, SIZE) for _ in range(3))
    mesh = SimpleNamespace(get_group_along_axis=lambda axis: f"group of axis {axis}")
    return v, attend_in_ring(q, k, v, axis, AttnMaskType[mask], pg_mesh=mesh, **options)


@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_group_scale_and_compression_are_those_of_the_call(seen, axis, scale) -> None:
    v, output = attention(axis=axis, softmax_scale=scale)
    assert output is v
    assert (seen["group"], seen["scale"], seen["lengths"]) == (f"group of axis {axis}", scale, None)
    assert seen["encoding"] == ("FP8" if axis == 2 else None)


def test_sums_come_back_by_token_and_head(seen) -> None:
    _, (_, lse) = attention(return_softmax=True)
    assert lse.shape == (BATCH * TOKENS, HEADS)
    expected = torch.arange(BATCH * HEADS * TOKENS, dtype=torch.float32).view(BATCH, HEADS, TOKENS)
    for batch in range(BATCH):
        for token in range(TOKENS):
            assert torch.equal(lse[batch * TOKENS + token], expected[batch, :, token])


def test_lengths_are_read_where_there_is_padding_alone(seen) -> None:
    padded = {"cu_seqlens": torch.tensor([0, 5, 8]), "valid_indices": torch.arange(8)}
    attention("PADDED_CAUSAL", **padded)
    assert seen["lengths"] == [5, 3]
    attention("PADDED_CAUSAL", cu_seqlens=torch.tensor([0, 5, 10]), valid_indices=torch.arange(10))
    assert seen["lengths"] is None
    attention("CAUSAL", **padded)
    assert seen["lengths"] is None


@pytest.mark.parametrize(
    ("options", "words"),
    [({"mask": "PADDED"}, "ring attention is causal"), ({"dropout_p": 0.1}, "set attention_dropout=0.1 to 0")],
)
def test_what_a_ring_does_not_compute_is_refused(seen, options, words) -> None:
    with pytest.raises(ValueError, match=words):
        attention(**options)
    assert not seen
