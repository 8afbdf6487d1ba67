"""The kernels of casts on a GPU: the bytes of their references, at every run, up to more than 2**31 values."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch

from fp8booster import formats
from fp8booster.kernels import block_cast
from fp8booster.kernels.blockwise_cast import blockwise_cast
from fp8booster.kernels.cast import cast, cast_by, note_amax, saturate
from fp8booster.kernels.message_layout import MessageLayout
from fp8booster.kernels.rowwise_cast import rowwise_cast
from fp8booster.kernels.scales import amax_of, scale_of
from fp8booster.kernels.shard_cast import cast_shards, unpack
from fp8booster.kernels.stack_cast import stack_cast
from tests.kernels.matrices import SHAPES, VIEWS, same, special, spread

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
REPEATS = 50
LAYOUTS = [(True, False), (False, True), (True, True)]

formats_and_scales = pytest.mark.parametrize(("dtype", "power_of_two"), list(product(formats.FORMATS, (False, True))))
sources = pytest.mark.parametrize("source", formats.HIGH_PRECISION)
# each pair of a source, a format with its kind of scale, and layouts; each triple would be compiled for thrice as long
casts = pytest.mark.parametrize(
    ("source", "dtype", "power_of_two", "plain", "transposed"),
    [
        (source, dtype, exact, *LAYOUTS[(first + second) % 3])
        for first, source in enumerate(formats.HIGH_PRECISION)
        for second, (dtype, exact) in enumerate(product(formats.FORMATS, (False, True)))
    ],
)


@functools.cache
def matrices(source: torch.dtype) -> dict[str, torch.Tensor]:
    """Random shapes, views and edge values."""
    torch.manual_seed(0)
    sizes = random.Random(0)
    shapes = [*SHAPES, *((sizes.randint(1, 700), sizes.randint(1, 700)) for _ in range(10)), (4113, 4100)]
    return {
        **{str(shape): spread(shape, source).to(DEVICE) for shape in shapes},
        **{name: view(spread((129, 300), source).to(DEVICE)) for name, view in VIEWS.items()},
        **{name: matrix.to(DEVICE) for name, matrix in special(source)},
    }


def assert_same_every_time(
    case: str, run: Callable[[], tuple[torch.Tensor, ...]], expected: tuple[torch.Tensor, ...]
) -> None:
    """Check the first run against the reference, and all others against the first."""
    first = run()
    for index, (one, other) in enumerate(zip(first, expected, strict=True)):
        assert same(one, other), f"{case}: output {index}"
    for _ in range(REPEATS - 1):
        for index, (one, other) in enumerate(zip(run(), first, strict=True)):
            assert same(one, other), f"{case}: output {index} of another run"


@casts
def test_a_cast_is_its_reference(source, dtype, power_of_two, plain, transposed) -> None:
    options = {"plain": plain, "transposed": transposed, "power_of_two": power_of_two}
    for case, matrix in matrices(source).items():
        for amax in (None, 0.5 * amax_of(matrix).expand(3)):
            assert_same_every_time(
                case,
                lambda matrix=matrix, amax=amax: cast(matrix, dtype, amax=amax, **options),
                cast.reference(matrix, dtype, amax=amax, **options),
            )


@casts
def test_a_cast_by_the_past_is_its_reference(plain, transposed, dtype, power_of_two, source) -> None:
    options = {"plain": plain, "transposed": transposed, "power_of_two": power_of_two}
    past = torch.tensor([1.0, 7.0, 3.0], device=DEVICE)

    def cast_it(matrix: torch.Tensor, implementation=cast_by) -> tuple[torch.Tensor, ...]:
        *cast, amaxes = implementation(matrix, dtype, past, **options)
        return *cast, amaxes.max()

    for case, matrix in matrices(source).items():
        assert_same_every_time(case, functools.partial(cast_it, matrix), cast_it(matrix, cast_by.reference))


@pytest.mark.parametrize("value", [0.0, 1.5, 3e38, float("inf"), float("nan")])
@pytest.mark.parametrize("new_step", [False, True])
def test_noting_an_amax_is_its_reference(new_step, value) -> None:
    for steps in (1, 3, 16, 1000):
        for count in (1, 5, 9000, 150_000):

            def note_it(implementation=note_amax, steps=steps, count=count) -> tuple[torch.Tensor, ...]:
                history, amaxes = (torch.arange(1.0 + size, device=DEVICE) for size in (steps, count))
                amaxes.fill_(0.25)[-1] = value
                inverse_scale = torch.full((), 0.25, device=DEVICE)
                implementation(history, amaxes, inverse_scale, new_step=new_step, factor=2.0)
                return history, inverse_scale

            assert_same_every_time(f"{steps} {count}", note_it, note_it(note_amax.reference))


@casts
def test_a_rowwise_cast_is_its_reference(plain, transposed, dtype, power_of_two, source) -> None:
    options = {"plain": plain, "transposed": transposed, "power_of_two": power_of_two}
    for case, matrix in matrices(source).items():
        assert_same_every_time(
            case,
            lambda matrix=matrix: rowwise_cast(matrix, dtype, **options),
            rowwise_cast.reference(matrix, dtype, **options),
        )


@casts
@pytest.mark.parametrize("square", [False, True])
def test_a_blockwise_cast_is_its_reference(square, plain, transposed, dtype, power_of_two, source) -> None:
    options = {"square": square, "plain": plain, "transposed": transposed, "power_of_two": power_of_two}
    for case, matrix in matrices(source).items():
        assert_same_every_time(
            case,
            lambda matrix=matrix: blockwise_cast(matrix, dtype, **options),
            blockwise_cast.reference(matrix, dtype, **options),
        )


@casts
def test_a_cast_of_a_stack_is_that_of_one_matrix(plain, transposed, dtype, power_of_two, source) -> None:
    options = {"plain": plain, "transposed": transposed, "power_of_two": power_of_two}
    for case, matrix in matrices(source).items():
        stack = [part.clone() for part in matrix.split(48)]  # each in memory of its own
        assert_same_every_time(
            case, lambda stack=stack: stack_cast(stack, dtype, **options), stack_cast.reference(stack, dtype, **options)
        )


@sources
@formats_and_scales
def test_a_shard_cast_and_its_unpacking_are_their_references(dtype, power_of_two, source) -> None:
    for case, matrix in matrices(source).items():
        shard, amax = matrix.reshape(-1).contiguous(), amax_of(matrix)

        def cast_it(implementation=cast_shards, shard=shard, amax=amax) -> tuple[torch.Tensor, torch.Tensor]:
            out = torch.full(shard.shape, 0x55, dtype=torch.uint8, device=DEVICE).view(dtype)
            inverse_scale = torch.full((), -1.0, device=DEVICE)
            implementation([shard], amax.view(1), [out], [inverse_scale], power_of_two)
            return out, inverse_scale

        expected = cast_it(cast_shards.reference)
        assert_same_every_time(case, cast_it, expected)
        packed, inverse_scale = expected[0].view(matrix.shape), expected[1]

        def unpack_it(
            implementation=unpack, packed=packed, inverse_scale=inverse_scale
        ) -> tuple[torch.Tensor, torch.Tensor]:
            transpose = torch.full(packed.shape[::-1], 0x55, dtype=torch.uint8, device=DEVICE).view(dtype)
            weight = torch.full(packed.shape, -1.0, dtype=source, device=DEVICE)
            implementation([packed], [inverse_scale], [transpose], [weight])
            return transpose, weight.float()

        assert_same_every_time(case, unpack_it, unpack_it(unpack.reference))


@pytest.fixture(scope="module")
def huge() -> Iterator[torch.Tensor]:
    """More than 2**31 values, the largest in the last place."""
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("a matrix of 2**31 values and its casts take up to 24 GiB")
    torch.manual_seed(0)
    matrix = torch.empty(2**19 + 16, 4096, dtype=torch.bfloat16, device=DEVICE).normal_()
    matrix[-1, -1] = 1000.0
    yield matrix
    del matrix
    torch.cuda.empty_cache()


def test_a_cast_reaches_beyond_two_billion_values(huge) -> None:
    data, transpose, inverse_scale = cast(huge, formats.E4M3, transposed=True)
    scale, expected = scale_of(torch.tensor(1000.0, device=DEVICE), formats.E4M3)
    assert torch.equal(inverse_scale, expected)
    rows, columns = huge.shape
    for row in (0, rows // 2, rows - 64 - 16, rows - 64):
        for column in (0, columns - 128):
            there = slice(row, row + 64), slice(column, column + 128)
            tile = saturate(huge[there].float() * scale, formats.E4M3)
            assert same(data[there], tile)
            assert same(transpose[there[::-1]], tile.t())


def test_a_rowwise_cast_reaches_beyond_two_billion_values(huge) -> None:
    data, transpose, inverse_scale, transpose_inverse_scale = rowwise_cast(huge, formats.E4M3, transposed=True)
    for rows in (slice(0, 16), slice(-32, -16), slice(-16, None)):
        expected, _, scales, _ = rowwise_cast.reference(
            huge[rows], formats.E4M3, plain=True, transposed=False, power_of_two=True
        )
        assert same(data[rows], expected)
        assert torch.equal(inverse_scale[rows], scales)
    for columns in (slice(0, 16), slice(-16, None)):
        _, expected, _, scales = rowwise_cast.reference(
            huge[:, columns], formats.E4M3, plain=False, transposed=True, power_of_two=True
        )
        assert same(transpose[columns], expected)
        assert torch.equal(transpose_inverse_scale[columns], scales)


def test_a_message_reaches_to_two_billion_values() -> None:
    """From 2^31 - 1024 values on, the padded count of a piece does not fit in 32 bits."""
    if torch.cuda.mem_get_info()[0] < 16 * 2**30:
        pytest.skip("2**31 values, their message and what is decoded take 10 GiB")
    count = 2**31 - 512
    layout = MessageLayout.of(count, 1, 256)
    values = torch.zeros(count, dtype=torch.bfloat16, device=DEVICE)
    message = torch.empty(layout.bytes, dtype=torch.uint8, device=DEVICE)
    last = slice(-4096, None)
    values[last] = torch.randn(4096, device=DEVICE).bfloat16()
    block_cast.encode(values, message, layout, formats.E4M3)
    of_last = MessageLayout.of(4096, 1, 256)
    expected = torch.empty(of_last.bytes, dtype=torch.uint8, device=DEVICE)
    block_cast.encode.reference(values[last], expected, of_last, formats.E4M3, False)
    right = torch.empty(4096, dtype=torch.bfloat16, device=DEVICE)
    block_cast.decode.reference(expected, right, of_last, formats.E4M3)
    for decode in (block_cast.decode, block_cast.decode_sum):
        values.fill_(7)
        decode(message, values, layout, formats.E4M3)
        assert torch.equal(values[last], right)
        assert not values[:4096].any()
