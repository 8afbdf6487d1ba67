"""Casts with blockwise scales, and their products."""

from __future__ import annotations

import pytest
import torch

from fp8booster import formats
from fp8booster.kernels import device as devices
from fp8booster.kernels.blockwise_cast import blockwise_cast, decoded, transposed_blocks
from fp8booster.kernels.product import product
from fp8booster.kernels.scales import scale_of
from tests.kernels.matrices import same, spread

E4M3, E5M2 = formats.E4M3, formats.E5M2


def blocks_of(shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    """Values whose magnitude changes from block to block and from row to row, by up to 2**12."""
    rows, columns = shape
    sizes = torch.randint(-6, 7, (-(-rows // 128), -(-columns // 128)), device=device)
    by_block = sizes.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    by_row = torch.randint(-2, 3, (rows, 1), device=device)
    return torch.randn(shape, device=device) * torch.exp2(by_block + by_row)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (130, 260), (256, 640)])
def test_each_tile_is_cast_by_its_own_scale(shape, square, power_of_two, device) -> None:
    matrix = spread(shape, torch.bfloat16).to(device)
    options = {"square": square, "power_of_two": power_of_two}
    data, transpose, inverse, transpose_inverse = blockwise_cast(matrix, E4M3, transposed=True, **options)
    whole = torch.zeros(data.shape, device=device)
    whole[: shape[0], : shape[1]] = matrix
    for layout, scales, values in ((data, inverse, whole), (transpose, transpose_inverse, whole.t())):
        height = 128 if square else 1
        for row in range(0, len(values), 128):  # of groups the first row in 128 stands for all
            for group in range(values.shape[1] // 128):
                tile = slice(row, row + height), slice(128 * group, 128 * group + 128)
                scale, expected = scale_of(values[tile].abs().max(), E4M3, power_of_two)
                found = scales[row // 128, group] if square else scales[group, row]
                assert torch.equal(found, expected)
                assert same(layout[tile], (values[tile] * scale).clamp(-448, 448).to(E4M3))


def test_scales_beyond_the_blocks_are_zero(device) -> None:
    *_, inverse, transpose_inverse = blockwise_cast(
        torch.ones(128, 640, device=device), E4M3, square=True, transposed=True
    )
    assert inverse.shape == (1, 8)
    assert transpose_inverse.shape == (5, 4)
    assert inverse[:, 5:].eq(0).all()
    assert transpose_inverse[:, 1:].eq(0).all()


def test_a_transposed_view_has_the_bytes_of_the_matrix(device) -> None:
    matrix = blocks_of((200, 300), device)
    for square in (False, True):
        one = blockwise_cast(matrix, E4M3, square=square, transposed=True)
        other = blockwise_cast(matrix.t().contiguous().t(), E4M3, square=square, transposed=True)
        assert all(map(same, one, other))


def test_the_scales_of_blocks_give_those_of_the_transpose(device) -> None:
    for shape in ((128, 640), (640, 128), (384, 512)):
        data, _, inverse, expected = blockwise_cast(blocks_of(shape, device), E4M3, square=True, transposed=True)
        assert torch.equal(transposed_blocks(inverse, *data.shape), expected)


@pytest.mark.parametrize("emulate", [False, True])
@pytest.mark.parametrize("out_dtype", formats.HIGH_PRECISION)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("square", [False, True], ids=["groups", "blocks"])
@pytest.mark.parametrize("shape", [(128, 128, 128), (384, 640, 256), (256, 128, 1152)])
def test_a_product_undoes_each_scale(shape, square, with_bias, out_dtype, emulate, device) -> None:
    rows, inner, columns = shape
    a = blockwise_cast(blocks_of((rows, inner), device), E4M3, square=False)
    b = blockwise_cast(blocks_of((columns, inner), device), E4M3, square=square)
    bias = torch.randn(columns, device=device).to(out_dtype) if with_bias else None
    one, other = decoded(a[0], a[2]).double(), decoded(b[0], b[2]).double()
    exact = one @ other.t() + (0 if bias is None else bias.double())
    # FP16 does not hold all of these sums
    exact = exact.clamp(-65504, 65504) if out_dtype is torch.float16 else exact
    found = product(a[0], b[0], a[2], b[2], out_dtype=out_dtype, bias=bias, emulate=emulate)
    assert found.dtype is out_dtype
    found = found.double()
    found = found.clamp(-65504, 65504) if out_dtype is torch.float16 else found
    # beside the output's rounding, what a Hopper GPU drops in the accumulator of 128 products: after each 32 of them,
    # what lies 13 bits below its largest
    lost = (one.abs() @ other.abs().t()) * (2.0**-11 if device.type == "cuda" and not emulate else 2.0**-20)
    assert ((found - exact).abs() <= exact.abs() * torch.finfo(out_dtype).eps + lost).all()


def test_a_product_is_cropped_and_no_view(device) -> None:
    a, b = (blockwise_cast(blocks_of((256, 128), device), E4M3, square=False) for _ in range(2))
    whole = product(a[0], b[0], a[2], b[2], out_dtype=torch.bfloat16)
    found = product(a[0], b[0], a[2], b[2], out_dtype=torch.bfloat16, shape=(200, 130))
    assert torch.equal(found, whole[:200, :130])
    assert found.is_contiguous()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_reaches_the_products_of_its_group(bad, device) -> None:
    matrix, ones = torch.ones(256, 256, device=device), torch.ones(128, 256, device=device)
    matrix[3, 200] = bad
    a, b = blockwise_cast(matrix, E4M3, square=False), blockwise_cast(ones, E4M3, square=True)
    found = product(a[0], b[0], a[2], b[2], out_dtype=torch.bfloat16).isnan()
    assert found[3].all()
    assert found.sum() == found.shape[1]


def test_autocast_changes_no_product(device) -> None:
    a = blockwise_cast(blocks_of((128, 512), device), E4M3, square=False)
    expected = product(a[0], a[0], a[2], a[2], out_dtype=torch.float32, emulate=True)
    with torch.autocast(device.type, torch.bfloat16):
        assert torch.equal(product(a[0], a[0], a[2], a[2], out_dtype=torch.float32, emulate=True), expected)


def test_gpus_other_than_hopper_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "why_no_fp8", lambda device: None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    gpu = torch.device("cuda", 0)
    for capability, refused in (((8, 9), True), ((9, 0), False), ((10, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        if refused:
            with pytest.raises(ValueError, match="need a Hopper GPU; use FP8Config"):
                devices.require_fp8(gpu, False, "blockwise")
            devices.require_fp8(gpu, True, "blockwise")
            devices.require_fp8(gpu, False, "rowwise")
        else:
            devices.require_fp8(gpu, False, "blockwise")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    with pytest.raises(ValueError, match=r"need CUDA 12.9 and this torch has 12.8"):
        devices.require_fp8(gpu, False, "blockwise")
