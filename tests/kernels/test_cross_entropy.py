"""Cross entropy of rows of logits: the reference against torch, the kernel against the reference."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from fp8booster import formats
from fp8booster.kernels.cross_entropy import cross_entropy, logsumexp, multiply_, write_gradient
from fp8booster.kernels.operators import Operator
from fp8booster.kernels.scales import amax_of
from tests.kernels.blocks import within_rounding
from tests.kernels.interpreted import interpreted
from tests.kernels.matrices import same

SHAPES = [(3, 16), (9, 100), (2, 2048), (3, 4096), (2, 2049), (5, 5000), (1, 1), (6, 4099), (5, 100)]
"""Less than a block, whole blocks, a tail; fewer rows than programs and more."""

IGNORED = -100
FACTOR = 0.37

ADJUSTED = ({"scale": 0.3}, {"cap": 5.0}, {"scale": 2.0, "cap": 5.0})


def same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal bit for bit, NaN too."""
    return one.dtype == other.dtype and same(one.float(), other.float())


def logits_of(rows: int, columns: int, dtype: torch.dtype, device: torch.device, pad: int = 0) -> torch.Tensor:
    """Rows of logits that lie `pad` columns apart."""
    return (3 * torch.randn(rows, columns + pad, device=device)).to(dtype)[:, :columns]


def targets_of(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """Every third row is ignored; one each has its target in the first and in the last column."""
    targets = torch.randint(0, columns, (rows,), device=device)
    targets[0], targets[-1] = 0, columns - 1
    targets[1::3] = IGNORED
    return targets


def special_logits(dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """What is no number, or a row without a finite one, in the first block, the last, and everywhere."""
    for value in (math.nan, math.inf, -math.inf):
        for where in (slice(0, 1), slice(2100, None), slice(None)):
            logits = logits_of(3, 2200, dtype, device)
            logits[1, where] = value
            yield f"{value} at {where}", logits
    yield "the largest", torch.full((3, 40), torch.finfo(dtype).max, dtype=dtype, device=device)


def both(
    logits: torch.Tensor,
    targets: torch.Tensor,
    factor: torch.Tensor | None,
    ignore_index: int = IGNORED,
    **adjusted: float,
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...], torch.Tensor | None]:
    """(losses, what lies in the logits' place) of kernel and reference, and the kernel's amax."""
    from fp8booster.kernels.cross_entropy_triton import cross_entropy_triton

    options_of_memory = {"dtype": logits.dtype, "device": logits.device}
    written = torch.empty_strided(logits.shape, logits.stride(), **options_of_memory).copy_(logits)
    reference = logits.clone()
    options = {"ignore_index": ignore_index, "factor": factor, **adjusted}
    losses, amax = cross_entropy_triton(written, targets, **options)
    return (losses, written), (cross_entropy.reference(reference, targets, **options)[0], reference), amax


def kernel_differs(device: torch.device, shapes: list[tuple[int, int]], every: bool) -> Iterator[str]:
    """What is wrong with the kernel's results, with every dtype for every shape or with one dtype after the other."""
    factor = torch.tensor(FACTOR, device=device)
    for index, dtype in enumerate(formats.HIGH_PRECISION):
        for rows, columns in shapes if every else shapes[index::3]:
            for pad in (0, 3) if columns in (100, 5000) else (0,):
                logits = logits_of(rows, columns, dtype, device, pad)
                for ignore_index, targets in (
                    (IGNORED, targets_of(rows, columns, device)),
                    (IGNORED, torch.full((rows,), IGNORED, device=device)),
                    (min(5, columns - 1), torch.randint(0, min(columns, 8), (rows,), device=device)),
                ):
                    case = f"{rows} x {columns} + {pad} {dtype} ignoring {ignore_index}"
                    ours, right, amax = both(logits, targets, factor, ignore_index)
                    if not all(within_rounding(*pair) for pair in zip(ours, right, strict=True)):
                        yield case
                    if not torch.equal(amax.amax(), amax_of(ours[1])):
                        yield f"{case}: amax"
                    ours, right, amax = both(logits, targets, None, ignore_index)
                    if not within_rounding(ours[0], right[0]) or not same_values(ours[1], logits) or amax is not None:
                        yield f"{case}: losses alone"
                    for adjusted in ADJUSTED if columns > 1 else ():  # of one, rounding of a difference of equals
                        ours, right, amax = both(logits, targets, factor, ignore_index, **adjusted)
                        # the slope of a capped logit is 1 - tanh^2, a difference of equals where the cap holds it
                        largest = FACTOR * adjusted.get("scale", 1.0) if "cap" in adjusted else 0.0
                        if not all(within_rounding(*pair, largest) for pair in zip(ours, right, strict=True)):
                            yield f"{case} {adjusted}"
                        if not torch.equal(amax.amax(), amax_of(ours[1])):
                            yield f"{case} {adjusted}: amax"
        for (name, logits), adjusted in product(special_logits(dtype, device), ({}, *ADJUSTED)):
            targets = torch.tensor([1, 2, 3], device=device)
            ours, right, amax = both(logits, targets, factor, **adjusted)
            for one, other in zip(ours, right, strict=True):
                finite = other.isfinite()
                if (
                    not torch.equal(finite, one.isfinite())
                    or not torch.equal(one.isnan(), other.isnan())
                    or not within_rounding(one[finite], other[finite])
                ):
                    yield f"{name} {dtype} {adjusted}"
            if not same(amax.amax(), amax_of(ours[1]).abs()):  # of zeros it may be a negative one
                yield f"{name} {dtype} {adjusted}: amax"
        outside = torch.tensor([3000, -1, 7, -2], device=device)
        ours, right, _ = both(logits_of(4, 3000, dtype, device), outside, factor)
        if not all(torch.equal(one.isnan(), other.isnan()) for one, other in zip(ours, right, strict=True)):
            yield f"targets outside {dtype}"
    ours, right, amax = both(logits_of(0, 50, torch.float32, device), outside[:0], factor)
    if not same(ours[0], right[0]) or amax.amax() != 0:
        yield "no rows"


def logsumexp_differs(device: torch.device, shapes: list[tuple[int, int]], every: bool) -> Iterator[str]:
    """The same for the sum of exponentials alone."""
    from fp8booster.kernels.cross_entropy_triton import logsumexp_triton

    for index, dtype in enumerate(formats.HIGH_PRECISION):
        for rows, columns in shapes if every else shapes[index::3]:
            logits = logits_of(rows, columns, dtype, device, 3)
            logits[:, :1] = torch.finfo(dtype).min
            targets = targets_of(rows, columns, device)
            ours = logsumexp_triton(logits, targets, ignore_index=IGNORED)
            right = logits.double().logsumexp(1).where(targets != IGNORED, 0.0).float()
            for found in (ours, logsumexp.reference(logits, targets, ignore_index=IGNORED)):
                if not within_rounding(found, right):
                    yield f"logsumexp {rows} x {columns} {dtype}"
        for name, logits in special_logits(dtype, device):
            targets = torch.zeros(3, dtype=torch.int64, device=device)
            ours = logsumexp_triton(logits, targets, ignore_index=IGNORED)
            right = logsumexp.reference(logits, targets, ignore_index=IGNORED)
            finite = right.isfinite()
            if not same(ours[~finite], right[~finite]) or not within_rounding(ours[finite], right[finite]):
                yield f"logsumexp of {name} {dtype}"
    if logsumexp_triton(logits[:0], targets[:0], ignore_index=IGNORED).shape != (0,):
        yield "logsumexp of no rows"


def written_gradient_differs(device: torch.device, shapes: list[tuple[int, int]], every: bool) -> Iterator[str]:
    """The same for the gradient alone."""
    from fp8booster.kernels.cross_entropy_triton import write_gradient_triton

    factor = torch.tensor(FACTOR, device=device)
    for index, dtype in enumerate(formats.HIGH_PRECISION):
        for rows, columns in shapes if every else shapes[index::3]:
            targets = targets_of(rows, columns, device)
            targets[2::3] = columns + 5  # which other ranks have
            for pad in (0, 3) if columns in (100, 5000) else (0,):
                for last in (2.0, math.nan):
                    logits = logits_of(rows, columns, dtype, device, pad)
                    sums = logits.double().logsumexp(1).float() + 0.5
                    sums[-1] += last
                    ours = torch.empty_strided(logits.shape, logits.stride(), dtype=dtype, device=device)
                    ours.copy_(logits)
                    options = {"ignore_index": IGNORED, "factor": factor}
                    amax = write_gradient_triton(ours, targets, sums, **options)
                    write_gradient.reference(logits, targets, sums, **options)
                    case = f"gradient {rows} x {columns} + {pad} {dtype} {last}"
                    numbers = ~logits.isnan()
                    if not torch.equal(numbers, ~ours.isnan()):
                        yield f"{case}: NaN"
                    if numbers.any() and not within_rounding(ours[numbers], logits[numbers]):
                        yield case
                    if not same(amax.amax(), amax_of(ours)):
                        yield f"{case}: amax"
    for empty in (logits[:0], logits[:, :0]):
        if write_gradient_triton(empty, targets[: len(empty)], sums[: len(empty)], **options) != 0:
            yield f"{tuple(empty.shape)}"


def writing_is_not_counted() -> Iterator[str]:
    """Which entries write over logits without a change of the version that torch counts, on a GPU as on a CPU."""
    targets, factor = torch.zeros(3, dtype=torch.int64), torch.ones(())
    calls = {
        "cross_entropy": lambda logits: cross_entropy(logits, targets, ignore_index=IGNORED, factor=factor),
        "write_gradient": lambda logits: write_gradient(
            logits, targets, torch.ones(3), ignore_index=IGNORED, factor=factor
        ),
    }
    with mock.patch.object(Operator, "uses_triton", return_value=True):
        for name, call in calls.items():
            logits = torch.randn(3, 20)
            call(logits)
            if logits._version == 0:
                yield f"{name} is not counted"


def multiplication_differs(device: torch.device, sizes: list[int]) -> Iterator[str]:
    """The same for the multiplication by one number."""
    from fp8booster.kernels.cross_entropy_triton import multiply_triton

    for dtype in formats.HIGH_PRECISION:
        for size in sizes:
            for number in (1.0, 0.5, 0.3, math.nan):
                tensor, factor = (torch.randn(size, device=device).to(dtype), torch.tensor(number, device=device))
                if number == 0.3 and device.type == "cpu" and dtype is torch.bfloat16:
                    continue  # the interpreter rounds FP32 to BF16 otherwise than the hardware
                right = multiply_.reference(tensor.clone(), factor)
                if not same_values(multiply_triton(tensor.clone(), factor), right):
                    yield f"{size} {dtype} by {number}"


def what_differs() -> list[str]:
    """By the interpreter."""
    torch.manual_seed(0)
    device = torch.device("cpu")
    return [
        *kernel_differs(device, SHAPES, every=False),
        *logsumexp_differs(device, SHAPES, every=False),
        *written_gradient_differs(device, SHAPES, every=False),
        *multiplication_differs(device, [0, 1, 4096, 40000]),
        *writing_is_not_counted(),
    ]


def test_the_kernels_interpreted_agree_with_their_references() -> None:
    assert interpreted(what_differs) == []


@pytest.mark.gpu
def test_the_kernels_agree_with_their_references_every_time() -> None:
    torch.manual_seed(0)
    device = torch.device("cuda")
    shapes = [*SHAPES, (2000, 32000), (300, 128256), (70, 50257), (1000, 151936)]
    for _ in range(5):
        assert list(kernel_differs(device, shapes, every=True)) == []
        assert list(logsumexp_differs(device, shapes, every=True)) == []
        assert list(written_gradient_differs(device, shapes, every=True)) == []
        assert list(multiplication_differs(device, [0, 1, 4096, 70000, 2**24 + 5])) == []


@pytest.mark.gpu
def test_rows_beyond_two_billion_values_are_reached() -> None:
    device = torch.device("cuda")
    logits = torch.randn(70000, 32000, dtype=torch.bfloat16, device=device)
    targets = torch.randint(0, 32000, (70000,), device=device)
    factor = torch.tensor(1.0, device=device)
    last = logits[-8:].clone()
    losses, _ = cross_entropy(logits, targets, ignore_index=IGNORED, factor=factor)
    right, _ = cross_entropy.reference(last, targets[-8:], ignore_index=IGNORED, factor=factor)
    assert within_rounding(losses[-8:], right)
    assert within_rounding(logits[-8:], last)


@pytest.mark.parametrize("dtype", formats.HIGH_PRECISION)
@pytest.mark.parametrize("adjusted", [{}, *ADJUSTED])
def test_loss_and_gradient_are_those_of_torch_in_double_precision(adjusted, dtype: torch.dtype, device) -> None:
    logits, targets = logits_of(33, 130, dtype, device), targets_of(33, 130, device)
    exact = logits.double().requires_grad_()
    scaled, cap = exact * adjusted.get("scale", 1.0), adjusted.get("cap")
    losses = F.cross_entropy(scaled if cap is None else cap * (scaled / cap).tanh(), targets, reduction="none")
    losses.sum().mul(0.25).backward()
    factor = torch.tensor(0.25, device=device)
    ours, amax = cross_entropy(logits, targets, ignore_index=IGNORED, factor=factor, **adjusted)
    torch.testing.assert_close(ours.double(), losses.detach(), rtol=1e-5, atol=1e-5)
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(logits.double(), exact.grad, rtol=rounding, atol=1e-6)
    if amax is not None:
        assert torch.equal(amax.amax(), amax_of(logits))


@pytest.mark.parametrize("dtype", formats.HIGH_PRECISION)
def test_the_gradient_alone_is_that_of_whole_rows(dtype: torch.dtype, device) -> None:
    logits, targets = logits_of(33, 130, dtype, device), targets_of(33, 130, device)
    factor = torch.tensor(0.25, device=device)
    sums = logits.double().logsumexp(1).float()
    whole, left, right = logits.clone(), logits[:, :70].clone(), logits[:, 70:].clone()
    cross_entropy(whole, targets, ignore_index=IGNORED, factor=factor)
    for part, first in ((left, 0), (right, 70)):
        columns = torch.where(targets == IGNORED, IGNORED, targets - first)
        amax = write_gradient(part, columns, sums, ignore_index=IGNORED, factor=factor)
        if amax is not None:
            assert torch.equal(amax.amax(), amax_of(part))
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(torch.cat((left, right), 1), whole, rtol=rounding, atol=1e-6)
    sums[:] = torch.nan
    write_gradient(left, targets, sums, ignore_index=IGNORED, factor=factor)
    assert torch.equal(left.isnan().all(1), targets != IGNORED)
    assert not left[targets == IGNORED].any()


def test_a_right_and_certain_prediction_keeps_its_small_gradient(device) -> None:
    logits = torch.tensor([[16.0, 0.0]], device=device)
    losses, _ = cross_entropy(
        logits, torch.tensor([0], device=device), ignore_index=IGNORED, factor=torch.ones((), device=device)
    )
    small = math.exp(-16)
    torch.testing.assert_close(losses, torch.tensor([small], device=device), rtol=0.1, atol=0)
    torch.testing.assert_close(logits, torch.tensor([[-small, small]], device=device), rtol=0.1, atol=0)


def test_an_ignored_row_counts_for_nothing_whatever_it_holds(device) -> None:
    logits = torch.full((2, 40), math.nan, device=device)
    losses, _ = cross_entropy(
        logits,
        torch.tensor([IGNORED, 3], device=device),
        ignore_index=IGNORED,
        factor=torch.tensor(math.inf, device=device),
    )
    assert losses[0] == 0
    assert losses[1].isnan()
    assert torch.equal(logits[0], torch.zeros(40, device=device))
    assert logits[1].isnan().all()


def test_a_multiplication_by_one_leaves_every_bit_and_another_rounds_once(device) -> None:
    tensor = torch.randn(1000, device=device).to(torch.bfloat16)
    tensor[3] = math.nan
    one, third = torch.tensor(1.0, device=device), torch.tensor(1 / 3, device=device)
    assert same_values(multiply_(tensor.clone(), one), tensor)
    assert same_values(multiply_(tensor.clone(), third), (tensor.float() * third).to(torch.bfloat16))
