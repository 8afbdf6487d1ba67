from __future__ import annotations

import math
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from fp8booster import formats
from fp8booster.kernels import block_cast
from fp8booster.kernels.cast import saturate
from fp8booster.kernels.message_layout import MessageLayout
from fp8booster.kernels.scales import scale_of
from tests.kernels.interpreted import interpreted

PIECES = [  # values of a piece, pieces, and values in all
    (7, 1, 7),
    (1, 1, 1),
    (1, 5, 5),
    (64, 3, 190),
    (64, 3, 100),
    (2500, 2, 5000),
    (17, 60, 1020),
    (300, 3, 301),
    (256, 22, 5632),
    (4096, 3, 9000),
]
BLOCKS = (32, 256, 1024, None)
OPERATORS = ("encode", "decode", "decode_sum", "decode_sum_encode")
REFERENCE = SimpleNamespace(**{name: getattr(block_cast, name).reference for name in OPERATORS})
SETTINGS = list(product(formats.FORMATS, (False, True)))


def triton_kernels() -> SimpleNamespace:
    """The operators of `block_cast` as Triton computes them."""
    return SimpleNamespace(**{name: getattr(block_cast, name).triton for name in OPERATORS})


def gradient_like(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(count) * torch.exp(2 * torch.randn(count))).to(dtype)


def encoded(
    implementation: object, values: torch.Tensor, layout: MessageLayout, dtype: torch.dtype, power_of_two: bool
) -> torch.Tensor:
    message = torch.full((layout.bytes,), 0xAA, dtype=torch.uint8, device=values.device)
    implementation.encode(values, message, layout, dtype, power_of_two)
    return message


def expected_piece(
    values: torch.Tensor, layout: MessageLayout, piece: int, dtype: torch.dtype, power_of_two: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 values and inverse scales of a piece, block by block from the definition."""
    count, start = layout.count, piece * layout.count
    part = torch.zeros(count)
    inside = values[start : start + count].float()
    part[: inside.numel()] = inside
    bits, inverse_scales = [], []
    for block in part.split(layout.block_size or max(count, 1)):
        amax = (values if layout.block_size is None else block).float().abs().max()
        scale, inverse_scale = scale_of(amax, dtype, power_of_two)
        bits.append(saturate(block * scale, dtype).view(torch.uint8))
        inverse_scales.append(inverse_scale)
    return torch.cat(bits), torch.stack(inverse_scales)


def test_pieces_follow_each_other_and_begin_at_multiples_of_sixteen() -> None:
    for (count, pieces, _), block in product([*PIECES, (0, 3, 0)], BLOCKS):
        layout = MessageLayout(count, pieces, block)
        size = layout.piece_bytes
        assert layout.bytes == pieces * size
        assert size % 16 == 0
        scales = 0 if count == 0 else 1 if block is None else math.ceil(count / block)
        assert count + 4 * scales <= size < count + 4 * scales + 32


@pytest.mark.parametrize(("dtype", "power_of_two"), SETTINGS)
@pytest.mark.parametrize("source", formats.HIGH_PRECISION)
@pytest.mark.parametrize("block", BLOCKS)
def test_a_message_holds_each_block_cast_by_its_own_scale(block, source, dtype, power_of_two) -> None:
    torch.manual_seed(0)
    for count, pieces, total in PIECES:
        layout = MessageLayout(count, pieces, block)
        values = gradient_like(total, source)
        message = encoded(REFERENCE, values, layout, dtype, power_of_two)
        decoded = torch.full((total,), 7.0)
        block_cast.decode(message, decoded, layout, dtype)
        for piece, part in enumerate(message.view(pieces, -1)):
            bits, inverse_scales = expected_piece(values, layout, piece, dtype, power_of_two)
            start = piece * count
            assert torch.equal(part[:count], bits)
            stored = part[layout.payload_bytes :].view(torch.float32)
            assert torch.equal(stored[: inverse_scales.numel()], inverse_scales)
            exact = bits.view(dtype).float() * inverse_scales.repeat_interleave(block or count)[:count]
            assert torch.equal(decoded[start : start + count], exact[: max(0, total - start)])


@pytest.mark.parametrize("block", BLOCKS)
def test_pieces_are_added_in_fp32_in_order_and_cast_again(block) -> None:
    torch.manual_seed(0)
    layout = MessageLayout.of(1000, 3, block)
    message = encoded(REFERENCE, gradient_like(3000), layout, formats.E4M3, False)
    decoded, thirds = torch.empty(3, 1000), torch.empty(3, 1000)
    block_cast.decode(message, decoded.view(-1), layout, formats.E4M3)
    for piece, third in zip(message.split(layout.piece_bytes), thirds, strict=True):
        block_cast.decode_sum(piece, third, MessageLayout.of(1000, 1, block), formats.E4M3, 1 / 3)
    torch.testing.assert_close(thirds, decoded / 3, rtol=2**-22, atol=0)
    expected = (thirds[0] + thirds[1]) + thirds[2]
    mean = torch.empty(1000)
    block_cast.decode_sum(message, mean, layout, formats.E4M3, 1 / 3)
    assert torch.equal(mean, expected)
    half = torch.empty(1000, dtype=torch.bfloat16)
    block_cast.decode_sum(message, half, layout, formats.E4M3, 1 / 3)
    assert torch.equal(half, expected.bfloat16())
    one = MessageLayout.of(1000, 1, block)
    again = torch.full((one.bytes,), 0x55, dtype=torch.uint8)
    block_cast.decode_sum_encode(message, again, layout, formats.E4M3, factor=1 / 3)
    assert torch.equal(again, encoded(REFERENCE, expected, one, formats.E4M3, False))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", formats.FORMATS)
def test_a_bad_value_makes_its_block_nan_and_no_other(dtype, bad, device) -> None:
    values = torch.ones(1000, device=device)
    values[300] = bad
    layout = MessageLayout.of(500, 2, 32)
    message = encoded(block_cast, values, layout, dtype, False)
    decoded = torch.empty(1000, device=device)
    block_cast.decode(message, decoded, layout, dtype)
    assert decoded[288:320].isnan().all()
    assert torch.equal(decoded[:288], values[:288])
    assert torch.equal(decoded[320:], values[320:])
    total = torch.empty(500, device=device)
    block_cast.decode_sum(message, total, layout, dtype)
    assert total[288:320].isnan().all()
    assert total[:288].eq(2).all()
    one = MessageLayout.of(500, 1, 32)
    again = torch.empty(one.bytes, dtype=torch.uint8, device=device)
    block_cast.decode_sum_encode(message, again, layout, dtype)
    block_cast.decode(again, total, one, dtype)
    assert total[288:320].isnan().all()
    assert total[:288].eq(2).all()


def test_zeros_have_scale_one_and_the_smallest_values_survive(device) -> None:
    values = torch.zeros(64, device=device)
    values[40] = 2.0**-120
    layout = MessageLayout.of(64, 1, 32)
    message = encoded(block_cast, values, layout, formats.E4M3, False)
    inverse_scales = message[64:].view(torch.float32)
    assert inverse_scales[0] == 1
    decoded = torch.empty(64, device=device)
    block_cast.decode(message, decoded, layout, formats.E4M3)
    torch.testing.assert_close(decoded, values, rtol=2**-20, atol=0)


PARTS = [  # sizes of tensors for two pieces
    (64,),
    (512, 128, 64),
    (64, 1024, 70, 2 * 33),
    (30, 2048),
    (4096, 10240, 2048),
]


def encoded_parts(
    implementation: object, tensors: list[torch.Tensor], layout: MessageLayout, dtype: torch.dtype
) -> torch.Tensor:
    message = torch.full((layout.bytes,), 0xAA, dtype=torch.uint8, device=tensors[0].device)
    implementation.encode(tensors, message, layout, dtype, True)
    return message


@pytest.mark.parametrize("block", BLOCKS)
def test_parts_of_tensors_lie_side_by_side_in_each_piece(block) -> None:
    torch.manual_seed(0)
    for sizes in PARTS:
        tensors = [gradient_like(size).view(2, -1) for size in sizes]
        layout = MessageLayout.of(sum(sizes) // 2, 2, block)
        whole = torch.cat([torch.cat([tensor[piece] for tensor in tensors]) for piece in (0, 1)])
        expected = encoded(REFERENCE, whole, layout, formats.E4M3, True)
        assert torch.equal(encoded_parts(block_cast, tensors, layout, formats.E4M3), expected)


def differing_parts(device: str, exact: bool) -> list[str]:
    """What the kernel encodes otherwise than the reference; `exact` values are held exactly by FP8."""
    kernels = triton_kernels()

    torch.manual_seed(0)
    wrong = []
    for sizes, block, dtype in product(PARTS, (32, 1024, None), formats.FORMATS):
        layout = MessageLayout.of(sum(sizes) // 2, 2, block)
        if exact:
            tensors = [torch.randint(-7, 8, (size,), device=device) * 8.0 for size in sizes]
        else:
            tensors = [gradient_like(size).to(device) for size in sizes]
        for _ in range(1 if exact else 50):
            ours = encoded_parts(kernels, tensors, layout, dtype)
            if not torch.equal(ours, encoded_parts(REFERENCE, tensors, layout, dtype)):
                wrong.append(f"{sizes} {block} {dtype}")
    return wrong


@pytest.mark.gpu
def test_parts_of_tensors_have_the_bytes_of_the_reference_every_time() -> None:
    assert differing_parts("cuda", exact=False) == []


def interpreted_kernels_agree() -> list[str]:
    """What differs where the interpreter rounds as the hardware does: on values that FP8 holds exactly."""
    kernels = triton_kernels()

    torch.manual_seed(0)
    wrong = []
    settings = [(formats.E4M3, False, torch.bfloat16), (formats.E5M2, True, torch.float32)]
    for (count, pieces, total), block, (dtype, power_of_two, source) in product(PIECES, (32, 1024, None), settings):
        layout = MessageLayout(count, pieces, block)
        # three bits each, beside the largest value of the format or alone: exact at any power of two
        values = (torch.randint(-7, 8, (total,)) * 8.0).to(source)
        values[:: block or total] = formats.MAX[dtype]
        ours = encoded(kernels, values, layout, dtype, True)
        reference = encoded(REFERENCE, values, layout, dtype, True)
        case = f"{count} {pieces} {block} {dtype} {power_of_two} {source}"
        if not torch.equal(ours, reference):
            wrong.append(f"encode {case}")
        outputs = [torch.full((total,), fill, dtype=torch.float32) for fill in (1.0, 2.0)]
        kernels.decode(reference, outputs[0], layout, dtype)
        REFERENCE.decode(reference, outputs[1], layout, dtype)
        if not torch.equal(*outputs):
            wrong.append(f"decode {case}")
        random = gradient_like(total, source)
        ours = encoded(kernels, random, layout, dtype, power_of_two)
        reference = encoded(REFERENCE, random, layout, dtype, power_of_two)
        of_pieces = [each.view(pieces, -1)[:, layout.payload_bytes :] for each in (ours, reference)]
        if not torch.equal(*of_pieces):
            wrong.append(f"scales {case}")
        if pieces > 8:  # no group of ranks
            continue
        sums = [torch.full((count,), fill) for fill in (1.0, 2.0)]
        for implementation, output in zip((kernels, REFERENCE), sums, strict=True):
            implementation.decode_sum(reference, output, layout, dtype, 1 / 3)
        if not torch.equal(*sums):
            wrong.append(f"decode_sum {case}")
        if block is not None:
            exact = encoded(REFERENCE, values, layout, dtype, True)
            one = layout.piece
            again = [torch.full((one.bytes,), fill, dtype=torch.uint8) for fill in (0x55, 0xAA)]
            for implementation, message in zip((kernels, REFERENCE), again, strict=True):
                implementation.decode_sum_encode(exact, message, layout, dtype, True, 2.0**-pieces)
            if pieces == 1 and not torch.equal(*again):
                wrong.append(f"decode_sum_encode {case}")
            scales = slice(layout.payload_bytes, one.bytes)
            if not torch.equal(again[0][scales], again[1][scales]):
                wrong.append(f"scales of decode_sum_encode {case}")
    return wrong + differing_parts("cpu", exact=True)


def test_the_kernels_interpreted_agree_with_the_reference() -> None:
    assert interpreted(interpreted_kernels_agree) == []


def same_bytes(one: torch.Tensor, other: torch.Tensor, layout: MessageLayout, dtype: torch.dtype) -> bool:
    """Equal byte for byte, where one NaN is as good as another."""
    differing = (one != other).nonzero().view(-1)
    if differing.numel() == 0:
        return True
    pieces = [each.view(layout.pieces, -1).tensor_split([layout.payload_bytes], 1) for each in (one, other)]
    for parts, kind in zip(zip(*pieces, strict=True), (dtype, torch.float32), strict=True):
        a, b = (part.contiguous().view(kind).float() for part in parts)
        if not torch.equal(a.nan_to_num(12345.0), b.nan_to_num(12345.0)) or not torch.equal(a.isnan(), b.isnan()):
            return False
    return True


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "power_of_two"), SETTINGS)
@pytest.mark.parametrize("source", formats.HIGH_PRECISION)
def test_the_kernels_have_the_bytes_of_the_reference_every_time(source, dtype, power_of_two) -> None:
    kernels = triton_kernels()

    torch.manual_seed(0)
    edges = torch.tensor([0.0, -0.0, 1e-45, 1e-38, -1e-30, 65504.0, 3e38, math.inf, -math.inf, math.nan, 448, 57344])
    more = [(100_000, 4, 399_999), (2048, 70_000, 2048 * 70_000)]  # more pieces than a second dimension of a grid has
    for (count, pieces, total), block in product([*PIECES, *more], (*BLOCKS, 4096)):
        if pieces > 1000 and block != 256:
            continue
        layout = MessageLayout(count, pieces, block)
        values = gradient_like(total)
        values[:: max(1, total // 37)] = 0
        if total > 5000:
            values[2000 : 2000 + edges.numel()] = edges
        values = values.to(source).cuda()
        reference = encoded(REFERENCE, values, layout, dtype, power_of_two)
        decoded = torch.empty_like(values)
        REFERENCE.decode(reference, decoded, layout, dtype)
        for _ in range(50 if pieces < 1000 else 1):
            assert same_bytes(encoded(kernels, values, layout, dtype, power_of_two), reference, layout, dtype)
            output = torch.full_like(values, 3)
            kernels.decode(reference, output, layout, dtype)
            assert torch.equal(output.nan_to_num(7), decoded.nan_to_num(7))
        if pieces > 8:
            continue
        total_of_pieces, output = (torch.empty(count, dtype=source, device="cuda") for _ in range(2))
        REFERENCE.decode_sum(reference, total_of_pieces, layout, dtype, 1 / 3)
        kernels.decode_sum(reference, output, layout, dtype, 1 / 3)
        assert torch.equal(output.nan_to_num(7), total_of_pieces.nan_to_num(7))
        if block is not None:
            one = layout.piece
            expected, again = (torch.zeros(one.bytes, dtype=torch.uint8, device="cuda") for _ in range(2))
            REFERENCE.decode_sum_encode(reference, expected, layout, dtype, power_of_two, 1 / 3)
            kernels.decode_sum_encode(reference, again, layout, dtype, power_of_two, 1 / 3)
            assert same_bytes(again, expected, one, dtype)
