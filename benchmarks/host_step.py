"""Measure Python's time and calls for a training step, under `LowLevelZeroPlugin` or otherwise, without a GPU.

    python -m benchmarks.host_step --out results --json results/host-step.json
    python -m benchmarks.host_step --model micro-moe --layers 2 --engine gemini
    python -m benchmarks.host_step --engine fsdp2 --layers 16
    python -m benchmarks.host_step --engine ep2 --model micro-mixtral --layers 12

One rank, or with `--engine fsdp2`, `tp2` and `ep2` one of two, and a model of many small layers, or of small experts,
which `ep2` spreads over the ranks (`harness.calls.idle_ranks`). Tensors of the CPU take the way of a GPU's, launches do
nothing, and replays of CUDA graphs do nothing either (`harness.calls.idle_gpu`). So what is timed is what the host does
for a GPU, and what PyTorch computes on the CPU where no kernel of fp8booster's does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from operator import attrgetter, sub
from typing import Annotated, Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
import typer

from benchmarks.harness import command, environment
from benchmarks.harness.calls import (
    EXCHANGED,
    MULTIPLIED,
    WAITED,
    Moment,
    idle_gpu,
    idle_ranks,
    launches,
    moments,
    python_calls,
)
from benchmarks.harness.results import Column, Record, Result, Table, spread
from benchmarks.harness.statistics import Samples
from benchmarks.training.job import Job
from fp8booster.nn.graphs.recorder import Memory, Place
from fp8booster.training.batches import Replica
from fp8booster.training.models import MODELS, build
from fp8booster.training.optimizers import make_optimizer

WARM_UP = 8
"""Steps, after which layers have been captured."""

PHASES = ("forward", "backward", "update")


class Replays:
    """Captures work by doing it once; a replay does nothing, and no memory is shared."""

    def __call__(self, work: Callable[[], Any], memory: Any = None) -> tuple[Callable[[], None], Any]:
        return _nothing, work()

    def in_pieces(
        self, work: Callable[[Any], Any], memory: Any = None, *, across_threads: bool = False
    ) -> tuple[list[Callable[[], None]], Any]:
        pieces: list[Any] = [None]
        made = work(pieces.append)
        return [_nothing] * len(pieces), made

    def new_memory(self) -> Any:
        return Memory(object)

    def in_use(self, memory: Any) -> dict[int, int]:
        return {}

    def allocated(self) -> tuple[int, int]:
        return 0, 0

    def why_no_room(self, memory: Any, kept: int, passing: int) -> None:
        return None

    def let_go(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def outside(self, shape: tuple[int, ...], dtype: torch.dtype, number: int | None = None) -> Place:
        return Place(torch.empty(shape, dtype=dtype), 1)

    def follow_stream(self) -> None:
        pass

    def timer(self) -> Callable[[], Callable[[], float]]:
        return lambda: lambda: 0.0

    def synchronize(self) -> None:
        pass

    def holders(self, tensor: torch.Tensor) -> int:
        return 1

    def place_like(self, tensor: torch.Tensor, number: int) -> torch.Tensor:
        return torch.zeros_like(tensor)


def _nothing() -> None:
    pass


class _Plain:
    """A training step without a plugin, in its phases: a model that is converted and fused, and torch's AdamW."""

    def __init__(self, job: Job) -> None:
        from fp8booster import convert_to_fp8, fuse
        from fp8booster.cli.train.key_values import fp8_config

        self._model = build(job.architecture.config(job.sequence), device=torch.device("cpu"))
        fuse(convert_to_fp8(self._model, fp8_config(job.fp8_options)))
        self._optimizer = make_optimizer(job.optimizer, self._model.parameters(), lr=job.lr)
        self._batch = _batch(job, Replica(0, 1))

    def forward(self) -> None:
        """Compute the loss."""
        self._loss = self._model(**self._batch).loss

    def backward(self) -> None:
        """Compute the gradients."""
        self._loss.backward()

    def update(self) -> None:
        """Update the weights."""
        self._optimizer.step()
        self._optimizer.zero_grad()


class _Boosted:
    """A training step by a plugin, in its phases.

    Args:
        job: what is trained.
        buckets: about so many, in which ZeRO reduces the gradients.
    """

    def __init__(self, job: Job, buckets: int) -> None:
        from benchmarks.training.engines import ENGINES

        built = ENGINES["fp8booster-fp8"].load()(job, torch.device("cpu"))
        self._boosted = built.boosted
        self._batch = _batch(job, built.replica)
        if job.plugin == "low_level_zero":
            values = sum(parameter.numel() for parameter in self._boosted.model.parameters())
            self._boosted.optimizer._reduce_bucket_size = values // buckets

    def forward(self) -> None:
        """Compute the loss."""
        self._loss = self._boosted.model(**self._batch).loss

    def backward(self) -> None:
        """Compute and reduce the gradients."""
        self._boosted.booster.backward(self._loss, self._boosted.optimizer)

    def update(self) -> None:
        """Update the masters and publish the weights."""
        self._boosted.update(1.0)


class _Sharded:
    """A training step of `fp8booster.fully_shard`, FSDP2, in its phases.

    Args:
        job: what is trained.
    """

    def __init__(self, job: Job) -> None:
        from benchmarks.training.fsdp2 import ours

        built = ours(job, torch.device("cpu"))
        self._model, self._optimizer = built.model, built.optimizer
        self._batch = _batch(job, built.replica)

    def forward(self) -> None:
        """Compute the loss."""
        self._loss = self._model(**self._batch).loss

    def backward(self) -> None:
        """Compute and reduce the gradients."""
        self._loss.backward()

    def update(self) -> None:
        """Clip the gradients and update the weights."""
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()


def _batch(job: Job, replica: Replica) -> dict[str, torch.Tensor]:
    from benchmarks.training.data import batches
    from fp8booster.training.boosted import causal

    return causal(batches(job, replica, torch.device("cpu"))(0))


PLAIN, FSDP2, SPLIT, SPREAD = "plain", "fsdp2", "tp2", "ep2"

_ENGINES: dict[str, dict[str, Any]] = {
    PLAIN: {},
    FSDP2: {},
    "zero1": {"plugin": "low_level_zero", "zero": 1},
    "zero2": {"plugin": "low_level_zero", "zero": 2},
    "gemini": {"plugin": "gemini"},
    SPLIT: {"plugin": "hybrid", "tp": 2, "zero": 0},
    SPREAD: {"plugin": "moe", "ep": 2},
}
"""What `--engine` takes, and the fields of its job."""

ROWS = 4 * 128 * 2
"""Tokens with two experts each, where these are spread: so many that numbers of rows do not come twice."""


def _new_step(engine: str, job: Job, buckets: int) -> _Plain | _Sharded | _Boosted:
    if engine == PLAIN:
        return _Plain(job)
    return _Sharded(job) if engine == FSDP2 else _Boosted(job, buckets)


def measure(engine: str, model: str, layers: int, buckets: int, graphs: bool, steps: int) -> Record:
    """Time and Python calls of each phase."""
    from fp8booster.nn.graphs import recorder

    job = Job(
        model=model,
        layers=layers,
        sequence=128 if engine == SPREAD else 32,
        micro_batch=4 if engine == SPREAD else 1,
        device="cpu",
        fp8_options=("always=true", f"cuda_graphs={str(graphs).lower()}"),
        **_ENGINES[engine],
    )
    with patch.object(recorder, "recorder_for", lambda device: Replays()):
        step = _new_step(engine, job, buckets)
        with idle_gpu():
            phases = {name: getattr(step, name) for name in PHASES}
            for _ in range(WARM_UP):
                for phase in phases.values():
                    phase()
            ms: dict[str, list[float]] = {name: [] for name in (*PHASES, *BEHIND)}
            for _ in range(steps):
                for name, phase in phases.items():
                    moments.clear()
                    begin = time.perf_counter()
                    phase()
                    ms[name].append(1e3 * (time.perf_counter() - begin))
                    for what, since in _behind_waits():
                        ms[what].append(1e3 * since.seconds)
            calls = _counted(python_calls, phases, attrgetter("calls"))
            queued = _counted(launches, phases, attrgetter("launches")) if engine == SPREAD else {}
    ms["all"] = [sum(of_step) for of_step in zip(*(ms[name] for name in PHASES), strict=True)]
    return {
        "graphs": graphs,
        "ms": {name: Samples.of(values).as_record() for name, values in ms.items() if values},
        "python_calls": calls,
        "launches": queued,
    }


def _counted(
    count: Callable[[Callable[[], object]], int],
    phases: Mapping[str, Callable[[], None]],
    of_moment: Callable[[Moment], int],
) -> dict[str, int]:
    """Count something of a step, by phase and behind its waits."""
    counts: dict[str, int] = {}
    for name, phase in phases.items():
        moments.clear()
        counts[name] = count(phase)
        for what, since in _behind_waits():
            counts[what] = max(of_moment(since), counts.get(what, 0))
    return {**counts, "all": sum(counts[name] for name in phases)}


BEHIND = ("exchange", "first product", "last product")
"""Launches of a layer's forward that come when the host knows how many rows its experts get."""


def _behind_waits() -> Iterator[tuple[str, Moment]]:
    """Yield for each layer what lies between the end of the wait and each of these launches."""
    waits = [number for number, moment in enumerate(moments) if moment.name == WAITED]
    for number, end in pairwise([*waits, len(moments)]):
        waited, *others = moments[number:end]
        exchanges, products = ([each for each in others if each.name == name] for name in (EXCHANGED, MULTIPLIED))
        if not (exchanges and products):  # the wait was for something else
            continue
        for what, moment in zip(BEHIND, (exchanges[0], products[0], products[-1]), strict=True):
            yield what, Moment(what, *map(sub, moment[1:], waited[1:]))


def _column(phase: str, digits: int = 1) -> Column:
    return Column(f"{phase}, ms", lambda r: spread(r["ms"][phase], digits))


def _calls(phase: str) -> Column:
    return Column(f"{phase}, calls", lambda r: str(r["python_calls"][phase]))


def _launches(phase: str) -> Column:
    return Column(f"{phase}, launches", lambda r: str(r["launches"][phase]))


COLUMNS = (
    Column("layers", lambda r: "replayed as CUDA graphs" if r["graphs"] else "run one by one"),
    *(_column(phase) for phase in (*PHASES, "all")),
    *(_calls(phase) for phase in (*PHASES, "all")),
)
COLUMNS_BEHIND = (
    COLUMNS[0],
    *(_column(launch, 3) for launch in BEHIND),
    *map(_calls, BEHIND),
    *map(_launches, (*BEHIND, *PHASES, "all")),
)
NOTE_BEHIND = (
    "From the end of the wait for the numbers of rows to each launch, of all layers; counts are of the layer with "
    "most. Launches are kernels, products and operators of torch, also of whole phases."
)
NOTE = (
    "Median [10th-90th percentile] of the steps. Calls are those of Python functions in a step, the same at every run."
)


@contextmanager
def _joined(engine: str) -> Iterator[None]:
    """Be one rank; for FSDP2 and tensor parallelism one of two that send nothing, for one alone has nothing to send."""
    if engine == SPREAD:
        with idle_ranks(2, ROWS):
            yield
        return
    backends: dict[str, str] = {}
    if engine in (FSDP2, SPLIT):
        from colossalai.device.device_mesh import DeviceMesh
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        backends = DeviceMesh._DIST_BACKEND
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with patch.dict(backends, cpu="fake"):  # Colossal-AI finds the device of tensors by the backend of their ranks
            yield
    finally:
        dist.destroy_process_group()


def main(
    model: Annotated[
        Literal["micro", "micro-moe", "micro-mixtral"],
        typer.Option(help="micro-moe has 128 experts a layer, micro-mixtral 8."),
    ] = "micro",
    engine: Annotated[
        Literal["plain", "fsdp2", "zero1", "zero2", "gemini", "tp2", "ep2"],
        typer.Option(help="What trains it; ep2 spreads micro-mixtral's experts over two ranks."),
    ] = "zero1",
    layers: Annotated[int, typer.Option(min=1, help="Decoder layers; 22 are those of LLaMA 1B.")] = 22,
    buckets: Annotated[int, typer.Option(min=1, help="In which gradients are reduced; 19 are those of LLaMA 1B.")] = 19,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps.")] = 40,
    json: command.JsonFile = None,
    out: command.Folder = None,
    commit: command.Commit = None,
) -> None:
    """Time what Python does for a training step, with and without CUDA graphs."""
    _, gpu = command.measured_device("cpu")
    torch.set_num_threads(1)
    if (engine == SPREAD) != (model == "micro-mixtral"):
        raise typer.BadParameter("--engine ep2 and --model micro-mixtral go together")
    with _joined(engine):
        records = [measure(engine, model, layers, buckets, graphs, steps) for graphs in (False, True)]
    head = environment.head(gpu, commit=commit) | {
        "model": f"{MODELS[model].label}, {layers} layers; {engine}; about {buckets} buckets where ZeRO reduces"
    }
    tables = [Table("step", "Host", COLUMNS, records, NOTE)]
    if engine == SPREAD:
        tables.append(Table("behind waits", "Behind the waits of a forward", COLUMNS_BEHIND, records, NOTE_BEHIND))
    result = Result("host-step", "What Python does for a training step", head, tables)
    command.deliver(result, folder=out, json_file=json)


if __name__ == "__main__":
    command.run_command(main)
