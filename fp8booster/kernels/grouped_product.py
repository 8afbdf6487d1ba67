"""Products of several matrices whose rows lie in groups, one weight a group: `torch._scaled_grouped_mm` or one by one.

The CUDA kernel (ATen/native/cuda/GroupedBlas.cpp, ScaledGroupMM.cu) multiplies E4M3 by E4M3 to BF16, with a float32
scale for each row of either operand. It refuses sizes that are no multiples of 16, and an empty sum: a group has 16
rows or more. On the CPU, on other GPUs, and where products are emulated, `product` runs group by group on the same
operands.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from fp8booster.kernels.product import product
from fp8booster.kernels.repeated_scales import repeat_scales

CAPABILITY = (9, 0)
"""Compute capability of the GPUs on which the kernel was measured and its values compared (Hopper)."""


class Groups(NamedTuple):
    """Rows in G groups, each of a multiple of 16 rows and not of 0."""

    rows: int
    """The number of rows of all groups."""
    ends: Tensor
    """int32 [G], on the device of the operands: the row behind each group's last. The host need not know them."""

    def slices(self) -> list[slice]:
        """Return the rows of each group; the host waits for them."""
        return [slice(*each) for each in pairwise([0, *self.ends.tolist()])]


def why_no_grouped_product(device: torch.device, emulate: bool) -> str | None:
    """Return why grouped products do not run on a device, or None where they do."""
    return None if emulate else _examined(device)


@functools.cache
def _examined(device: torch.device) -> str | None:
    if device.type == "cpu":
        return None
    if not hasattr(torch, "_scaled_grouped_mm"):
        return "this version of torch has no grouped FP8 product"
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != CAPABILITY:
        return "grouped FP8 products were measured on Hopper alone"
    return None


def grouped_product(
    a: Tensor,
    b: Tensor,
    inverse_scale_a: Tensor,
    inverse_scale_b: Tensor,
    groups: Groups,
    *,
    fast_accumulation: bool,
    emulate: bool,
) -> Tensor:
    """Multiply each group of a's rows by the transpose of its own matrix: `a[group] @ b[group].T`.

    Args:
        a: [M, K] E4M3, each row contiguous.
        b: [G, N, K] E4M3, the last dimension contiguous.
        inverse_scale_a: float32, one for all of a (shape []).
        inverse_scale_b: float32, contiguous, one for all of b or [G, P], each for N / P features in a row.
        groups: of the M rows.
        fast_accumulation, emulate: as in `kernels.product.product`.

    Returns:
        [M, N] BF16.
    """
    scale_a, scale_b = repeat_scales(inverse_scale_a, len(a), inverse_scale_b, len(b) * b.shape[1])
    scale_b = scale_b.view(len(b), -1)
    if _runs_kernel(a, emulate):
        return _by_kernel(a, b.transpose(1, 2), scale_a, scale_b, groups, fast_accumulation)
    products = ((a[rows], b[group], scale_a[rows], scale_b[group]) for group, rows in enumerate(groups.slices()))
    return torch.cat(_one_by_one(products, fast_accumulation, emulate))


def summed_product(
    a: Tensor,
    b: Tensor,
    inverse_scale_a: Tensor,
    inverse_scale_b: Tensor,
    groups: Groups,
    *,
    factor: float = 1.0,
    fast_accumulation: bool,
    emulate: bool,
) -> Tensor:
    """Return for each group the sum over its columns: `a[:, group] @ b[:, group].T`.

    Args:
        a: [N, M] E4M3, contiguous.
        b: [K, M] E4M3, contiguous.
        inverse_scale_a, inverse_scale_b: float32, one for all of a, and of b (shape []).
        groups: of the M columns.
        factor: multiplies the sums.
        fast_accumulation, emulate: as in `kernels.product.product`.

    Returns:
        [G, N, K] BF16.
    """
    count = len(groups.ends)
    # each group has its rows of scales: one for each row of a, and of b
    scale_a, scale_b = repeat_scales(inverse_scale_a, count * len(a), inverse_scale_b, count * len(b), factor)
    if _runs_kernel(a, emulate):
        return _by_kernel(a, b.t(), scale_a, scale_b, groups, fast_accumulation)
    of_groups = zip(groups.slices(), scale_a.view(count, -1), scale_b.view(count, -1), strict=True)
    products = ((a[:, columns], b[:, columns], *scales) for columns, *scales in of_groups)
    return torch.stack(_one_by_one(products, fast_accumulation, emulate))


def _runs_kernel(operand: Tensor, emulate: bool) -> bool:
    return operand.is_cuda and not emulate and _examined(operand.device) is None


def _by_kernel(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, groups: Groups, fast: bool) -> Tensor:
    return torch._scaled_grouped_mm(
        a, b, scale_a, scale_b, offs=groups.ends, out_dtype=torch.bfloat16, use_fast_accum=fast
    )


def _one_by_one(products: Iterable[tuple[Tensor, Tensor, Tensor, Tensor]], fast: bool, emulate: bool) -> list[Tensor]:
    """Return the product of each (a, b, inverse scale of a, inverse scale of b)."""
    return [
        product(
            _contiguous(a),
            _contiguous(b),
            scale_a,
            scale_b,
            out_dtype=torch.bfloat16,
            fast_accumulation=fast,
            emulate=emulate,
        )
        for a, b, scale_a, scale_b in products
    ]


def _contiguous(matrix: Tensor) -> Tensor:
    # through uint8: torch copies few FP8 tensors on CPU
    return matrix if matrix.is_contiguous() else matrix.view(torch.uint8).contiguous().view(matrix.dtype)
