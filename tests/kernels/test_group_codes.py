"""Values in 8 bits by groups: their error, what is no number, and the bytes that kernels write."""

from __future__ import annotations

import math

import pytest
import torch

from fp8booster.kernels import activation, code_statistics, row_norm
from fp8booster.kernels.cast_statistics import statistics
from fp8booster.kernels.group_codes import GROUP, LEAST_AMAX, GroupCodes, decode_groups, encode_groups
from tests.kernels.interpreted import interpreted

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = ((1, 1), (3, 100), (2, 128), (5, 1040), (4, 129))


def values(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Over some octaves, with groups of zeros, and first ones that are no numbers."""
    made = (torch.randn(rows, columns) * torch.exp(2 * torch.randn(rows, columns))).to(dtype)
    if rows > 2:
        made[1] = 0
        made[0, 0], made[2, -1] = math.nan, -math.inf
    return made.to(device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_error_is_half_a_step_of_the_roots(dtype, shape, device) -> None:
    x = values(*shape, dtype, device)
    codes = encode_groups(x)
    assert codes.codes.shape == shape
    assert codes.amaxes.shape == (shape[0], math.ceil(shape[1] / GROUP))
    assert codes.dtype is dtype
    assert decode_groups(codes).is_contiguous()  # kernels read it
    amax = codes.amaxes.float().repeat_interleave(GROUP, 1)[:, : shape[1]]
    found, number = decode_groups(codes), ~amax.isnan()
    roots = (found.abs() / amax.clamp(min=1e-30)).sqrt() * found.sign()
    exact = (x.float().abs() / amax.clamp(min=1e-30)).sqrt() * x.float().sign()
    assert ((roots - exact).abs() <= 0.708 / 127)[number].all()
    assert torch.equal((found.abs() == amax) & number, (x.float().abs() == amax) & number) or torch.allclose(
        found[number & (x.abs() == amax)].abs(), amax[number & (x.abs() == amax)], rtol=1e-6
    )
    # a group is NaN where one of its values is no number, and there alone
    bad = ~x.isfinite()
    expected = torch.stack([part.any(1) for part in bad.split(GROUP, 1)], 1)
    assert torch.equal(codes.amaxes.isnan(), expected)
    assert torch.equal(found.isnan(), expected.repeat_interleave(GROUP, 1)[:, : shape[1]])


@pytest.mark.parametrize("size", [3e38, 1.0, 1e-20])
def test_normal_values_err_by_less_than_a_percent_at_any_size(size, device) -> None:
    x = torch.randn(64, 1024, device=device).clamp(-3, 3) / 3 * size
    error = (decode_groups(encode_groups(x)).double() - x.double()).square().sum() / x.double().square().sum()
    assert 10 * math.log10(1 / error) > 43


def test_groups_too_small_are_zeros(device) -> None:
    x = torch.full((1, 2 * GROUP), LEAST_AMAX / 2, device=device)
    x[0, GROUP:] = LEAST_AMAX
    found = decode_groups(encode_groups(x))
    assert (found[0, :GROUP] == 0).all()
    torch.testing.assert_close(found[0, GROUP:], x[0, GROUP:])


def same_bytes(ours: GroupCodes, right: GroupCodes) -> bool:
    """Whether codes are equal, and amaxes are or are both NaN."""
    return torch.equal(ours.codes, right.codes) and torch.equal(ours.amaxes.nan_to_num(-1), right.amaxes.nan_to_num(-1))


def what_differs(device: str = "cpu", shapes: tuple = (*SHAPES, (3, 2200))) -> list[str]:
    """Cases whose bytes are not those of the definition."""
    from fp8booster.kernels.activation_triton import activate_triton
    from fp8booster.kernels.row_norm_triton import row_norm_triton

    torch.manual_seed(0)
    different = []
    for dtype in DTYPES:
        for shape in shapes:
            x, other = (values(*shape, dtype, torch.device(device)) for _ in range(2))
            made = activate_triton(x, other, encoded=True)
            plain = activate_triton(x, other)
            if not torch.equal(made.y.nan_to_num(), plain.y.nan_to_num()):
                different.append(f"y of SwiGLU {dtype} {shape}")
            if not (same_bytes(made.x, encode_groups(x)) and same_bytes(made.up, encode_groups(other))):
                different.append(f"SwiGLU {dtype} {shape}")
            made, plain = (activate_triton(x, kind="gelu_tanh", encoded=encoded) for encoded in (True, False))
            if not torch.equal(made.y.nan_to_num(), plain.y.nan_to_num()) or made.up is not None:
                different.append(f"y of GELU {dtype} {shape}")
            if not same_bytes(made.x, encode_groups(x)):
                different.append(f"GELU {dtype} {shape}")
            weight = torch.ones(shape[1], dtype=dtype, device=device)
            for residual in (None, other.nan_to_num(0, 0, 0)):
                made = row_norm_triton(x, weight, 1e-5, residual, encoded=True)
                plain = row_norm_triton(x, weight, 1e-5, residual)
                if not torch.equal(made.y.nan_to_num(), plain.y.nan_to_num()):
                    different.append(f"y of norm {dtype} {shape}")
                if not same_bytes(made.encoded, encode_groups(made.h)):
                    different.append(f"norm {dtype} {shape} residual {residual is not None}")
    return different


def test_kernels_interpreted_write_the_bytes_of_the_definition() -> None:
    assert interpreted(what_differs) == []


@pytest.mark.gpu
def test_kernels_write_the_bytes_of_the_definition_and_the_same_output() -> None:
    shapes = (*SHAPES, (130, 4096), (300, 5120), (64, 11008), (1000, 8192))
    for _ in range(5):
        assert what_differs("cuda", shapes) == []


def test_what_is_encoded_changes_no_result() -> None:
    x, other = (values(4, 300, torch.bfloat16, torch.device("cpu")) for _ in range(2))
    for made, plain in (
        (activation.activate(x, other, encoded=True), activation.activate(x, other)),
        (row_norm.row_norm(x, other[0], 1e-5, other, encoded=True), row_norm.row_norm(x, other[0], 1e-5, other)),
    ):
        for one, same in zip(made, plain, strict=True):
            if isinstance(one, torch.Tensor):
                assert torch.equal(one.nan_to_num(), same.nan_to_num())


@pytest.mark.parametrize("most", [2**20, 600])
def test_of_a_large_matrix_evenly_spaced_rows_are_compared_with_their_own_codes(most, monkeypatch) -> None:
    monkeypatch.setattr(code_statistics, "MOST", most)
    matrix = torch.randn(40, 150) * torch.logspace(-3, 3, 40)[:, None]
    count, found = code_statistics.activation_statistics(matrix, encode_groups(matrix))
    some = matrix[:: max(1, matrix.numel() // most)]
    assert count == some.numel()
    assert torch.equal(found, statistics(some, decode_groups(encode_groups(some))))
