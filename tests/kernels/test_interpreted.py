"""The kernels of casts in Triton's interpreter: which values they read, which they write and where, without a GPU.

The interpreter's own rounding to FP8 is not that of the hardware, so bytes are compared for values that FP8 holds
exactly, and scales for all but BF16 subnormals, which it widens wrongly (seen with Triton 3.6).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import product

import numpy as np
import pytest
import torch

from fp8booster import formats
from fp8booster.kernels.adamw import update
from fp8booster.kernels.blockwise_cast import blockwise_cast
from fp8booster.kernels.cast import cast, cast_by, note_amax
from fp8booster.kernels.norms import norms_of
from fp8booster.kernels.rowwise_cast import rowwise_cast
from fp8booster.kernels.scales import amax_of, scale_of
from fp8booster.kernels.shard_cast import cast_shards, unpack
from fp8booster.kernels.stack_cast import stack_cast
from tests.kernels.adam_shards import RATES, copied, far_apart, shards
from tests.kernels.interpreted import interpreted
from tests.kernels.matrices import VIEWS, exact, same, special, spread

pytest.importorskip("triton")

SHAPES = [(1, 1), (1, 300), (300, 1), (17, 5), (33, 130), (70, 300)]
"""One value, one row, one column, less than a tile, more than one."""

LAYOUTS = [(True, False), (False, True), (True, True)]
SETTINGS = [
    (formats.E4M3, False, torch.bfloat16),
    (formats.E5M2, True, torch.float32),
    (formats.E4M3, True, torch.float16),
]


def compare(case: str, ours: tuple, reference: tuple) -> Iterator[str]:
    """The case with each output that differs."""
    for index, (one, other) in enumerate(zip(ours, reference, strict=True)):
        if not same(one, other):
            yield f"{case}: output {index}"


def matrix_casts_differ() -> Iterator[str]:
    from fp8booster.kernels.blockwise_cast_triton import blockwise_cast_triton
    from fp8booster.kernels.cast_triton import cast_triton
    from fp8booster.kernels.rowwise_cast_triton import rowwise_cast_triton

    def both(case: str, matrix: torch.Tensor, dtype: torch.dtype, power_of_two: bool, **layouts: bool):
        options = {**layouts, "power_of_two": power_of_two}
        ours, reference = (f(matrix, dtype, amax=None, **options) for f in (cast_triton, cast.reference))
        yield "cast " + case, ours, reference
        options["power_of_two"] = True
        ours, reference = (f(matrix, dtype, **options) for f in (rowwise_cast_triton, rowwise_cast.reference))
        yield "rowwise cast " + case, ours, reference
        for square in (False, True):
            options["square"] = square
            ours, reference = (f(matrix, dtype, **options) for f in (blockwise_cast_triton, blockwise_cast.reference))
            yield f"blockwise cast {square} {case}", ours, reference

    for (dtype, power_of_two, source), shape in product(SETTINGS, SHAPES):
        for (name, view), (plain, transposed) in product(VIEWS.items(), LAYOUTS):
            both_layouts = plain and transposed
            if name != "as it lies" and (shape != (33, 130) or not both_layouts):
                continue
            if not both_layouts and source is not torch.bfloat16:  # which layouts are written is not a matter of values
                continue
            matrix = view(exact(shape, formats.MAX[dtype], source))
            case = f"{name} {shape} {dtype} {source} {plain} {transposed}"
            for what in both(case, matrix, dtype, power_of_two, plain=plain, transposed=transposed):
                yield from compare(*what)
    for dtype, power_of_two, source in SETTINGS:
        for name, matrix in [*special(source), ("random", spread((65, 130), source))]:
            if source is torch.bfloat16 and "subnormal" in name:
                continue
            case = f"scales of {name} {dtype} {source}"
            for what, ours, reference in both(case, matrix, dtype, power_of_two, plain=True, transposed=True):
                yield from compare(what, ours[2:], reference[2:])
    matrix, partials = exact((40, 70), 7 * 2.0**4, torch.float32), torch.tensor([3.0, 1e9, 448.0, 1e9])[::2]
    options = {"plain": True, "transposed": True, "power_of_two": False, "amax": partials}
    ours, reference = (f(matrix, formats.E4M3, **options) for f in (cast_triton, cast.reference))
    yield from compare("cast by a given amax", ours, reference)


def powers_of_two_differ() -> Iterator[str]:
    """The kernels find them by exponents, the definition by a division: at every power of two and where one follows."""
    from fp8booster.kernels.blockwise_cast_triton import blockwise_cast_triton

    powers = torch.arange(0, 255, dtype=torch.int32) << 23
    mantissas = torch.tensor([0, 1, 0x5FFFFF, 0x600000, 0x600001, 0x600002, 0x7FFFFF], dtype=torch.int32)
    amaxes = (powers[:, None] + mantissas).view(torch.float32).flatten()
    for dtype in formats.FORMATS:
        *_, inverse_scale, _ = blockwise_cast_triton(amaxes[:, None], dtype, square=False)
        if not torch.equal(inverse_scale[0, : len(amaxes)], scale_of(amaxes, dtype, power_of_two=True)[1]):
            yield f"{dtype}"


def amaxes_differ() -> Iterator[str]:
    from fp8booster.kernels.cast_triton import partial_amaxes_triton

    # where values lie is a matter of strides, not of their dtype or number
    others = [((33, 130), view) for view in VIEWS if view != "as it lies"]
    kinds = [*product(formats.HIGH_PRECISION, [((1, 1), "as it lies"), ((3, 9000), "as it lies")])]
    for source, (shape, name) in [*kinds, *((torch.bfloat16, other) for other in others)]:
        matrix = VIEWS[name](spread(shape, source))
        if not torch.equal(partial_amaxes_triton(matrix).amax(), amax_of(matrix)):
            yield f"amax {name} {shape} {source}"


def delayed_casts_differ() -> Iterator[str]:
    from fp8booster.kernels.cast_triton import cast_by_triton, note_amax_triton

    past = torch.tensor([3.0, 448.0, 7.0, 1e9])[:3]
    for (dtype, power_of_two, source), shape, (name, view) in product(SETTINGS, SHAPES, VIEWS.items()):
        if name != "as it lies" and shape != (33, 130):  # as in `matrix_casts_differ`, of the same kernel
            continue
        matrix = view(exact(shape, formats.MAX[dtype], source))
        options = {"transposed": True, "power_of_two": power_of_two}
        found = [
            (*given, amaxes.max())
            for *given, amaxes in (f(matrix, dtype, past, **options) for f in (cast_by_triton, cast_by.reference))
        ]
        yield from compare(f"cast by the past {name} {shape} {dtype} {source}", *found)
    values = (0.0, 1.5, 3e38, math.inf, math.nan)
    # how many there are, and what they are
    sizes = [(1, 1, 1.5), (3, 5, 1.5), (64, 9000, 1.5), (1, 9000, 1.5), (64, 1, 1.5)]
    for (steps, count, value), new_step in product([*sizes, *((3, 5, value) for value in values)], (False, True)):
        results = []
        for function in (note_amax_triton, note_amax.reference):
            history, amaxes, inverse_scale = torch.arange(2.0, 3.0 + steps), torch.zeros(count), torch.tensor(0.25)
            amaxes[-1] = value
            function(history, amaxes, inverse_scale, new_step=new_step, factor=2.0)
            results.append((history, inverse_scale))
        yield from compare(f"note {steps} {count} {new_step} {value}", *results)


def stack_casts_differ() -> Iterator[str]:
    from fp8booster.kernels.stack_cast_triton import stack_cast_triton

    # rows of each: of experts; that pad; more than a tile, and an empty one
    for rows, columns in (((16, 16, 16), 32), ((5, 17, 1), 30), ((70, 0, 33), 130)):
        for (dtype, power_of_two, source), (plain, transposed) in zip(SETTINGS, LAYOUTS, strict=True):
            whole = exact((sum(rows), columns), formats.MAX[dtype], source)
            options = {"plain": plain, "transposed": transposed, "power_of_two": power_of_two}
            # each in memory of its own, and one where no whole vectors can be moved
            matrices = [part.clone() for part in whole.split(rows)]
            matrices[-1] = torch.nn.functional.pad(matrices[-1].view(-1), (1, 0))[1:].view(-1, columns)
            found = [function(matrices, dtype, **options) for function in (stack_cast_triton, stack_cast.reference)]
            yield from compare(f"stack {rows} {columns} {dtype} {source}", *found)
    for value in (math.nan, math.inf, 0.0):  # the interpreter gives a NaN other bytes
        matrices = [torch.zeros(16, 32), torch.full((16, 32), value)]
        found = [function(matrices, formats.E4M3)[2:] for function in (stack_cast_triton, stack_cast.reference)]
        yield from compare(f"stack of {value}", *found)
    on_two_devices = [torch.ones(16, 32), torch.ones(16, 32, device="meta")]
    with pytest.raises(RuntimeError, match="device"):
        stack_cast_triton(on_two_devices, formats.E4M3)
    apart = [torch.randn(32, 16).bfloat16().t(), torch.ones(16, 32, dtype=torch.bfloat16)]
    found = [f(apart, formats.E5M2, power_of_two=True)[2:] for f in (stack_cast_triton, stack_cast.reference)]
    yield from compare("stack of a transposed view", *found)


def shard_casts_differ() -> Iterator[str]:
    from fp8booster.kernels.shard_cast_triton import cast_shards_triton, unpack_triton

    def filled(shape: tuple[int, ...], fill: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full(shape, fill, dtype=torch.uint8).view(dtype)

    counts = (1, 255, 4096, 4097, 9000, 80000)  # the last takes more programs than a run has
    for dtype, power_of_two, source in SETTINGS:
        shards = [
            exact((1, count), formats.MAX[dtype], source).view(-1) / 2**place for place, count in enumerate(counts)
        ]
        results = []
        for function in (cast_shards_triton, cast_shards.reference):
            outs = [filled((count + 1,), 0x55, dtype) for count in counts]
            inverse_scales = list(torch.full((len(counts),), -1.0).unbind())
            given = [out[:count] for out, count in zip(outs, counts, strict=True)]
            function(shards, torch.stack(list(map(amax_of, shards))), given, inverse_scales, power_of_two)
            results.append((*outs, *inverse_scales))
        yield from compare(f"shards {dtype} {power_of_two} {source}", *results)
    shards, amaxes = [exact((1, 300), 7.0, torch.float32).view(-1)] * 2, torch.tensor([448.0, 300.0])
    results = []
    for function in (cast_shards_triton, cast_shards.reference):
        outs = [filled((300,), 0x55, dtype) for dtype in formats.FORMATS]
        function(shards, amaxes, outs, [torch.tensor(0.0), torch.tensor(0.0)])
        results.append(outs)
    yield from compare("shards of two formats", *results)
    for dtype, _, target in SETTINGS:
        matrices = [exact(shape, 7.0, torch.float32).to(dtype) for shape in SHAPES]
        inverse_scales = [torch.tensor(2.0**-place) for place in range(len(SHAPES))]
        results = []
        for function in (unpack_triton, unpack.reference):
            beside = [filled((columns, rows + 6), 0x55, dtype) for rows, columns in SHAPES]
            weights = [torch.full(shape, -1.0).to(target) for shape in SHAPES]
            transposes = [each[:, 2 : shape[0] + 2] for each, shape in zip(beside, SHAPES, strict=True)]
            # of the first few one of both is wanted
            function(matrices, inverse_scales, [None, *transposes[1:]], [weights[0], None, *weights[2:]])
            results.append((*beside, *(weight.float() for weight in weights)))
        yield from compare(f"unpack {dtype} {target}", *results)


def tables_differ() -> Iterator[str]:
    """What a captured launch fills by itself."""
    from fp8booster.kernels import tables_triton

    runs, device = (1, 3, 1, 40), torch.device("cpu")
    rows = np.array([(2**40 + place, 16 * place, 1, place, 16 * sum(runs[:place])) for place in range(len(runs))])
    (entries, owners), (captured, of_captured) = (
        make(rows, runs, device) for make in (tables_triton._table, tables_triton._captured_table)
    )
    if not torch.equal(entries, captured):
        yield f"entries: {entries} {captured}"
    if not torch.equal(owners, of_captured):
        yield f"owners: {owners} {of_captured}"


def adam_updates_differ() -> Iterator[str]:
    from fp8booster.kernels.adamw_triton import update_triton

    kinds = (torch.float32, torch.bfloat16), (torch.float32, torch.float32), (torch.float16, torch.float16)
    divisors = (None, torch.tensor(7.0))
    # a divisor is a matter of the gradient, before rates and dtypes are: each alternates between with it and without
    for place, ((name, rates), (dtype, gradients)) in enumerate(product(RATES.items(), kinds)):
        divisor = divisors[place % 2]
        case = f"{name} {dtype} {gradients} {divisor}"
        ours = shards(dtype, gradients)
        theirs = copied(ours)
        amaxes = update_triton(ours, rates, divisor)
        update.reference(theirs, rates, divisor)
        yield from (f"{case}: {what}" for what in far_apart(ours, theirs))
        if not torch.equal(amaxes, torch.stack([value.abs().max().float() for value in ours.values])):
            yield f"{case}: amaxes"
    ours = shards(torch.float32, torch.float32)
    ours.gradients[3][17] = math.nan
    if update_triton(ours, RATES["AdamW"], None).isnan().tolist() != [False, False, False, True, False]:
        yield "one NaN"


def norms_differ() -> Iterator[str]:
    from fp8booster.kernels.norms_triton import norms_of_triton

    for source in formats.HIGH_PRECISION:
        tensors = [torch.randn(shape).to(source) for shape in ((), 1, 0, 3000, (7, 4097), 4096)]
        tensors[3][17] = math.inf
        for index, (norm, expected) in enumerate(
            zip(norms_of_triton(tensors), norms_of.reference(tensors), strict=True)
        ):
            if not math.isclose(norm, expected, rel_tol=1e-5):
                yield f"norm {index} {source}: {norm} {expected}"
        tensors[4][3, 5] = math.nan
        if [bool(norm.isnan()) for norm in norms_of_triton(tensors)] != [index == 4 for index in range(6)]:
            yield f"one NaN {source}"


CHECKS: tuple[Callable[[], Iterator[str]], ...] = (
    amaxes_differ,
    powers_of_two_differ,
    matrix_casts_differ,
    delayed_casts_differ,
    stack_casts_differ,
    shard_casts_differ,
    tables_differ,
    adam_updates_differ,
    norms_differ,
)


def what_differs() -> dict[str, list[str]]:
    """By check, the cases where a kernel does not give what its reference does."""
    torch.manual_seed(0)
    return {check.__name__: list(check()) for check in CHECKS}


def test_the_kernels_interpreted_agree_with_their_references() -> None:
    assert interpreted(what_differs) == {check.__name__: [] for check in CHECKS}
