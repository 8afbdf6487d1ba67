"""Stands for `torch._scaled_grouped_mm` where there is no GPU for it: what it computes, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fp8booster.formats import E4M3
from fp8booster.kernels import grouped_product

refuse_what_torch_refuses = torch._scaled_grouped_mm


def meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def scaled_grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    *,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> torch.Tensor:
    """What `torch._scaled_grouped_mm` computes and what it refuses, where there is no GPU for it."""
    like = refuse_what_torch_refuses(*map(meta, (a, b, scale_a, scale_b)), meta(offs), out_dtype=out_dtype)
    computed = _scaled_grouped_mm(a, b, scale_a, scale_b, offs)
    assert computed.shape == like.shape
    return computed.to(out_dtype)


def _scaled_grouped_mm(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, offs: torch.Tensor
) -> torch.Tensor:
    assert a.dtype is b.dtype is E4M3
    assert offs.dtype is torch.int32
    assert all(size % 16 == 0 for size in (a.shape[-1], *b.shape[-2:]))
    assert a.stride(-1) == 1
    assert a.stride(-2) % 16 == 0
    assert b.stride(-2) == 1
    assert b.stride(-1) % 16 == 0
    assert scale_a.is_contiguous()
    assert scale_a.dtype is scale_b.dtype is torch.float32
    groups, ends = len(offs), offs.tolist()
    begins = [0, *ends[:-1]]
    if b.dim() == 3:
        assert scale_a.shape == a.shape[:1]
        assert scale_b.shape == (groups, b.shape[2])
        assert scale_b.stride(1) == 1
        parts = [
            (a[begin:end].float() * scale_a[begin:end, None]) @ (b[group].float() * scale_b[group])
            for group, (begin, end) in enumerate(zip(begins, ends, strict=True))
        ]
        return torch.cat(parts)
    assert scale_a.shape == (groups * a.shape[0],)
    assert scale_b.shape == (groups * b.shape[1],)
    assert all(end > begin and begin % 16 == 0 for begin, end in zip(begins, ends, strict=True))
    rows, columns = scale_a.view(groups, -1), scale_b.view(groups, -1)
    return torch.stack(
        [
            (a[:, begin:end].float() * rows[group, :, None]) @ (b[begin:end].float() * columns[group])
            for group, (begin, end) in enumerate(zip(begins, ends, strict=True))
        ]
    )


def stand_in(monkeypatch: pytest.MonkeyPatch, function: Callable = scaled_grouped_mm) -> None:
    """Let products that are not emulated reach a function in place of torch's, on the CPU too."""
    monkeypatch.setattr(torch, "_scaled_grouped_mm", function, raising=False)
    monkeypatch.setattr(grouped_product, "_runs_kernel", lambda _, emulate: not emulate)
