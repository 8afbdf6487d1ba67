"""Time variants of one piece of work, interleaved: A B C A B C ...

A sample is a burst of calls between two CUDA events, with nothing that waits for the GPU inside. One call runs ahead of
the first event, so that a sample sees the steady state of a training loop: where the host is slower than the GPU, its
time is what counts. A variant with `graph` is replayed from a CUDA graph instead, which leaves the host out.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.harness.statistics import Samples

WARM_UP_CALLS = 3
LARGEST_BURST = 1000
MOST_INPUT_SETS = 64


@dataclass(frozen=True)
class Variant:
    """One way to do the work that is measured."""

    name: str
    call: Callable[[int], object]
    """`call(i)` does the work once, on input set i, and returns what it made."""

    sets: int = 1
    """Input sets to go through in turn, so that a call finds nothing of its input in the cache."""

    graph: bool = False
    """Measure the GPU alone, by replaying a CUDA graph of one call for each input set."""


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call."""

    ms: Samples
    """From the first event to the second, divided by the calls between them."""

    host_ms: Samples
    """What the host took to issue a call; of a graph, its share of a replay."""


@dataclass(frozen=True)
class Alone:
    """The times that `time_alone` found."""

    ms: float
    """Of one call."""

    begin: float
    end: float
    """When it was counted, of `time.perf_counter`."""


@dataclass(frozen=True)
class _Pass:
    """One call for each input set."""

    run: Callable[[], None]
    calls: int


def input_sets(bytes_read: int, device: torch.device) -> int:
    """Return the number of input sets of `bytes_read` that fill the GPU's L2 cache twice, so that none is in it when it
    is read again.

    One on the CPU, which is not measured in earnest.
    """
    if device.type != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return min(MOST_INPUT_SETS, math.ceil(2 * cache / bytes_read))


def time_interleaved(
    variants: Sequence[Variant], *, device: torch.device, rounds: int, sample_ms: float
) -> dict[str, Timing]:
    """Time every variant once a round, interleaved.

    Args:
        variants: what to time; each is warmed up first.
        device: where the work runs.
        rounds: samples of each variant; one round more runs first and is not counted.
        sample_ms: a burst repeats its calls until it lasts about this long.

    Returns:
        name: timing, in the order of `variants`.
    """
    if device.type == "cuda":
        gc.collect()  # what earlier measurements left in cycles, and the pools of their graphs
        torch.cuda.empty_cache()
    sample = _sample_cuda if device.type == "cuda" else _sample_cpu
    bursts: dict[str, tuple[_Pass, int]] = {}
    for variant in variants:
        one_pass = _prepare(variant, device)
        pass_ms, _ = sample(one_pass.run, 1)
        bursts[variant.name] = one_pass, max(1, min(LARGEST_BURST, math.ceil(sample_ms / pass_ms)))

    elapsed = {name: [] for name in bursts}
    issued = {name: [] for name in bursts}
    for counted in [False] + [True] * rounds:
        for name, (one_pass, repeats) in bursts.items():
            gpu_ms, host_ms = sample(one_pass.run, repeats)
            if counted:
                elapsed[name].append(gpu_ms / (repeats * one_pass.calls))
                issued[name].append(host_ms / (repeats * one_pass.calls))
    return {name: Timing(Samples.of(elapsed[name]), Samples.of(issued[name])) for name in bursts}


def time_alone(variant: Variant, *, device: torch.device, seconds: float) -> Alone:
    """Run one variant without a pause, once so long for power and clock to settle and once more to count.

    Args:
        variant: what to time.
        device: where the work runs.
        seconds: that each of the two lasts at least.
    """
    one_pass = _prepare(variant, device)
    sample = _sample_cuda if device.type == "cuda" else _sample_cpu
    pass_ms, _ = sample(one_pass.run, 1)
    repeats = max(1, math.ceil(_BURST_MS / pass_ms))
    for _ in ("settles", "counted"):
        begin = end = time.perf_counter()
        elapsed = bursts = 0
        while end - begin < seconds:
            # the GPU waits a few microseconds between two of them
            elapsed += sample(one_pass.run, repeats)[0]
            bursts += 1
            end = time.perf_counter()
    return Alone(elapsed / (bursts * repeats * one_pass.calls), begin, end)


_BURST_MS = 50.0


def _prepare(variant: Variant, device: torch.device) -> _Pass:
    def one_pass() -> None:
        for index in range(variant.sets):
            variant.call(index)

    if not (variant.graph and device.type == "cuda"):
        for _ in range(WARM_UP_CALLS):
            one_pass()
        return _Pass(one_pass, variant.sets)

    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):  # a capture records no compilation and no creation of handles
        for _ in range(WARM_UP_CALLS):
            one_pass()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # alive together, so that every call writes to memory of its own
        outputs = [variant.call(index) for index in range(variant.sets)]
    del outputs
    return _Pass(graph.replay, variant.sets)


def _sample_cuda(run: Callable[[], None], repeats: int) -> tuple[float, float]:
    """Milliseconds on the GPU and on the host."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    run()
    start.record()
    issue_start = time.perf_counter()
    for _ in range(repeats):
        run()
    issue_ms = (time.perf_counter() - issue_start) * 1e3
    end.record()
    end.synchronize()
    return start.elapsed_time(end), issue_ms


def _sample_cpu(run: Callable[[], None], repeats: int) -> tuple[float, float]:
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    elapsed_ms = (time.perf_counter() - start) * 1e3
    return elapsed_ms, elapsed_ms


def let_weights_stay(parameters: Iterable[torch.Tensor]) -> None:
    """Let FP8 copies of weights stay from one backward to the next, as between two steps of an optimizer.

    Until an optimizer has stepped once after layers were made, each backward counts as a change of their weights.

    Args:
        parameters: of the layers, without gradients, so that the step changes nothing.
    """
    torch.optim.SGD(parameters).step()
