"""What backward makes again and casts in one pass has the bytes of a kernel and a cast, interpreted and on a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
import torch

from fp8booster import formats
from fp8booster.kernels import activation, row_norm
from fp8booster.kernels.cast import cast
from fp8booster.kernels.group_codes import encode_groups, values_of
from tests.kernels.interpreted import interpreted

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SMALL = (70, 150)


def _norms_that_differ(
    kernels: bool, device: torch.device, shape: tuple[int, int], dtype: torch.dtype
) -> Iterator[str]:
    """Args: kernels: compare Triton's, whatever the device; else what the operators run there."""
    norm, transposed, cast_again = _ways(row_norm.row_norm, row_norm.row_norm_transposed, kernels)
    for unit_offset in (False, True):
        h, weight = torch.randn(shape, device=device).to(dtype), torch.randn(shape[1], device=device).to(dtype)
        made = norm(h, weight, 1e-5, unit_offset=unit_offset)
        codes = encode_groups(h)
        # by torch: `row_norm` finds another root mean square for what the codes decode to
        decoded = values_of(codes) * made.inverse_rms[:, None] * (weight.float() + unit_offset)
        for given, y in ((h, made.y), (codes, decoded.to(dtype))):
            if kernels and given is codes and dtype is torch.bfloat16 and device.type == "cpu":
                continue  # the interpreter rounds FP32 to BF16 otherwise than torch
            for of_cast in _casts(made.amax, dtype):
                found = transposed(given, weight, made.inverse_rms, unit_offset=unit_offset, **of_cast)
                if not _same(found, cast_again(y, **of_cast, plain=False, transposed=True)[1:]):
                    yield f"{shape} {dtype} {unit_offset} {type(given).__name__} {of_cast['dtype']}"


def _activations_that_differ(
    kernels: bool, device: torch.device, shape: tuple[int, int], dtype: torch.dtype, kinds: Iterable[str]
) -> Iterator[str]:
    """Args: kernels: as in `_norms_that_differ`."""
    activate, transposed, cast_again = _ways(activation.activate, activation.activate_transposed, kernels)
    rows, columns = shape
    for kind in kinds:
        halves = (3 * torch.randn(rows, 2 * columns, device=device)).to(dtype).chunk(2, 1)
        of_codes = [encode_groups(half) for half in halves]
        for parts in (halves, halves[:1], of_codes, of_codes[:1]):
            y, amax, *_ = activate(*parts, kind=kind)
            for of_cast in _casts(amax, dtype):
                found = transposed(*parts, kind=kind, **of_cast)
                if not _same(found, cast_again(y, **of_cast, plain=False, transposed=True)[1:]):
                    yield f"{rows} x {columns} {dtype} {kind} {len(parts)} {type(parts[0]).__name__} {of_cast['dtype']}"


def _ways(kernel, transposed, kernels: bool):
    if not kernels:
        return kernel, transposed, cast
    return kernel.triton, transposed.triton, cast.triton


def _casts(amax: torch.Tensor, dtype: torch.dtype) -> Iterator[dict]:
    """By the amax of forward; of values of one dtype, by a larger and by a smaller one, as what codes decode to has."""
    yield {"amax": amax, "dtype": formats.E4M3, "power_of_two": False}
    if dtype is not torch.float16:
        return
    yield {"amax": 1.5 * amax, "dtype": formats.E5M2, "power_of_two": True}
    yield {"amax": 0.5 * amax, "dtype": formats.E4M3, "power_of_two": True}


def _same(found: tuple[torch.Tensor, ...], right: tuple[torch.Tensor, ...]) -> bool:
    return all(
        one.shape == other.shape and torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))
        for one, other in zip(found, right, strict=True)
    )


def _small_cases_that_differ(kernels: bool) -> list[str]:
    cpu = torch.device("cpu")
    # what an activation computes is no matter of the dtype in which it is stored
    kinds = {dtype: activation.KINDS if dtype is torch.float16 else ["silu"] for dtype in DTYPES}
    return [
        each
        for dtype in DTYPES
        for each in (
            *_norms_that_differ(kernels, cpu, SMALL, dtype),
            *_activations_that_differ(kernels, cpu, SMALL, dtype, kinds[dtype]),
        )
    ]


def test_the_kernels_interpreted_have_the_bytes_of_a_cast() -> None:
    assert interpreted(_small_cases_that_differ, True) == []


def test_the_references_have_the_bytes_of_a_cast() -> None:
    torch.manual_seed(0)
    assert _small_cases_that_differ(False) == []


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 1), (7, 100), (130, 4096), (8192, 4096), (300, 5120), (64, 11008)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernels_have_the_bytes_of_a_cast(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    cuda = torch.device("cuda")
    for _ in range(2):
        assert list(_norms_that_differ(True, cuda, shape, dtype)) == []
        assert list(_activations_that_differ(True, cuda, shape, dtype, ["silu"])) == []


@pytest.mark.gpu
@pytest.mark.parametrize("kind", activation.KINDS)
def test_the_kernels_of_each_activation_have_the_bytes_of_a_cast(kind: str) -> None:
    torch.manual_seed(0)
    assert list(_activations_that_differ(True, torch.device("cuda"), (130, 4096), torch.bfloat16, [kind])) == []


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_an_amax_of_zero_and_values_that_are_not_finite_are_those_of_a_cast(value: float) -> None:
    h, weight = torch.full((4, 16), value), torch.ones(16)
    made = row_norm.row_norm(h, weight, 1e-5)
    of_cast = {"amax": made.amax, "dtype": formats.E4M3}
    found = row_norm.row_norm_transposed(h, weight, made.inverse_rms, **of_cast)
    assert _same(found, cast(made.y, **of_cast, plain=False, transposed=True)[1:])
