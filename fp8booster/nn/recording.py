"""`record`: what FP8 does to each tensor of a model, sampled while it trains, and a watchdog over it."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from fp8booster.argument_types import require_types
from fp8booster.comm import encoding
from fp8booster.config import FP8Config
from fp8booster.kernels.blockwise_cast import scales_of_groups
from fp8booster.kernels.code_statistics import MomentSample, SumSample
from fp8booster.kernels.device import is_captured
from fp8booster.kernels.group_codes import GroupCodes
from fp8booster.monitor.recorder import PATIENCE, Recorder, warn
from fp8booster.monitor.sinks import KIND, Sink, sinks_of
from fp8booster.monitor.watchdog import Watchdog, remedy_of_nonfinite
from fp8booster.nn.convert import linear_layers
from fp8booster.nn.fused import pointwise
from fp8booster.nn.graphs.capture import captured_layers, look_inside
from fp8booster.nn.held_casts import forget_step, held_casts, plain_name
from fp8booster.nn.linear.layer import FP8Layer
from fp8booster.nn.weights.holder import FP8Module
from fp8booster.optim import adamw, gradient_sums
from fp8booster.optim.one_pass import COUNTS_STEPS
from fp8booster.reading import first_of
from fp8booster.scaling import INPUT, WEIGHT, Scaling
from fp8booster.tensor import QuantizedMatrix
from fp8booster.version import __version__

_NUMBERS = re.compile(r"(?<=\.)\d+(?=\.|$)")


class NonFiniteStep(ValueError):
    """A step's loss or gradients are NaN or infinite; the sentence names the first tensor that is."""


class _Operands:
    """Tells a recorder of the casts of one layer, or of layers that run as one; a pair of observers of `Casts`.

    Args:
        name: of the layer, or of those that run as one.
        weights: names of layers whose weights are stacked, with the rows of each; empty for one weight.
    """

    def __init__(self, recorder: Recorder, name: str, weights: Sequence[tuple[str, int]] = ()) -> None:
        self._recorder, self._name, self._weights = recorder, name, weights

    def note(self, role: str, tensor: torch.Tensor, made: QuantizedMatrix) -> None:
        """Take an operand and what was made of it, as `Casts.observers` are called."""
        if torch.compiler.is_compiling() or is_captured(tensor):
            return
        # recomputation casts again what forward has counted
        if role in (INPUT, WEIGHT) and _is_in_backward():
            return
        if role != WEIGHT:
            self._recorder.note(self._name, role, tensor, made, remember=True)
        elif not self._weights or not made.data.numel():
            self._recorder.note(self._name, role, tensor, made, remember=False)
        elif self._recorder.is_sampling:
            first, scales = 0, made.inverse_scale
            if scales.dim() == 2:
                scales = scales_of_groups(made.data, scales)
            for name, rows in self._weights:
                scale = scales[first : first + rows] if scales.dim() else scales
                part = slice(first, first + rows)
                self._recorder.sample(name, role, tensor.detach()[part], made.data[part], scale)
                first += rows

    def note_shard(self, values: torch.Tensor, data: torch.Tensor, inverse_scale: torch.Tensor) -> None:
        """Take a part of a weight that an engine has cast, as `Casts.weight_observers` are called."""
        if self._recorder.is_sampling and values.numel():
            device = data.device  # of an engine that offloads, which waits for copies anyway
            values, inverse_scale = values.to(device), inverse_scale.to(device)
            self._recorder.sample(self._name, WEIGHT, values.view(1, -1), data.view(1, -1), inverse_scale)


class Recording:
    """A recording that `record` began; a context that ends it. `close` does, too."""

    def __init__(self, model: nn.Module, recorder: Recorder, rules: Watchdog, warn: Callable[[str], object]) -> None:
        self._model, self._recorder, self._rules, self._warn = model, recorder, rules, warn
        operands = [(held.get(), _Operands(recorder, held.name, held.weights)) for held in held_casts(model)]
        # a weight goes by its layer's name, as the lines of its casts do
        self._names = {id(each): plain_name(name).removesuffix(".weight") for name, each in model.named_parameters()}
        self._observed: list[tuple[list[Any], Any]] = [
            *((casts.observers, each.note) for casts, each in operands if casts is not None),
            *((casts.weight_observers, each.note_shard) for casts, each in operands if casts is not None),
            (encoding.observers, recorder.note_message),
            (pointwise.observers, self._note_saved),
            (adamw.observers, partial(self._note_codes, recorder.note_moments)),
            (gradient_sums.observers, partial(self._note_codes, recorder.note_sum)),
        ]
        for observers, observer in self._observed:
            observers.append(observer)
        self._release = look_inside(model, lambda: recorder.is_sampling)

        def end_step(*_: object) -> None:
            self.end_step()

        setattr(end_step, COUNTS_STEPS, True)
        self._hook = register_optimizer_step_post_hook(end_step)
        self._searches = itertools.count()
        self._closed = self._warned_of_nothing = False

    @property
    def step(self) -> int:
        """The step that is being taken, from 1."""
        return self._recorder.step

    def end_step(self) -> None:
        """A step was taken. Every optimizer step in the process calls it."""
        self._recorder.end_step()

    def allows_step(self, value: float | torch.Tensor, agreed: bool = False) -> bool:
        """Tell whether the optimizer shall step, given the norm of the gradients, or the loss. Every rank calls it.

        It is the number that the host waits for. Clipping gives the norm anyway.

        Args:
            value: one number.
            agreed: all ranks give the same; otherwise one reduction tells whether all are finite.

        Returns:
            True where all are finite, and where `Watchdog.on_nonfinite` is "warn"; False where it is "skip": set the
            gradients to zero and go on.

        Raises:
            NonFiniteStep: it is "raise"; on all ranks.
        """
        if isinstance(value, DTensor):  # the norm under FSDP2, of which each rank has a part
            value = value.full_tensor()
        self._warn_of_nothing(value)
        if self._all_finite(value, agreed):
            return True
        sentence = self.blame()
        if self._rules.on_nonfinite == "raise":
            raise NonFiniteStep(sentence)
        skips = self._rules.on_nonfinite == "skip"
        if self._recorder.rank == 0:
            self._warn(f"{sentence} The step is {'skipped' if skips else 'taken all the same'}.")
        if skips:
            # amaxes of a step that is not finite would spoil delayed scales
            forget_step(self._model)
            self.end_step()
        return not skips

    def blame(self) -> str:
        """A sentence that names the first tensor of this step that is not finite; every rank calls it.

        First weights and other parameters, then inputs in forward order, then gradients in backward order.
        """
        found = self._first_of_ranks()
        step = self._recorder.step
        if found is None:
            replayed = captured_layers(self._model)[None]
            unseen = (
                f", or in the {replayed} layers replayed as CUDA graphs, which only samples see" if replayed else ""
            )
            return (
                f"Step {step} is not finite, and no parameter and no FP8 tensor is NaN or infinite: it arose outside "
                f"FP8 layers, as in the loss or in what follows the last one{unseen}."
            )
        where, remedy = f"{found.role} of {found.layer} on rank {found.rank}", remedy_of_nonfinite(found.role)
        return f"Step {step} is not finite, and {where} is the first tensor that is not: {remedy}."

    def flush(self) -> None:
        """Write the sample that is on its way. Every rank calls it, before it saves a checkpoint.

        A sample is written when the next step ends. A run that is killed before that, and resumes from a checkpoint of
        the sampled step, would not take it again.
        """
        self._recorder.flush()

    def close(self) -> None:
        """Write what is on its way, and leave the model as it was. The step that is not over is not recorded."""
        self._end(PATIENCE)

    def _end(self, patience: float) -> None:
        if self._closed:
            return
        self._closed = True
        self._hook.remove()
        for observers, observer in self._observed:
            observers.remove(observer)
        self._release()
        self._recorder.close(patience)

    def __enter__(self) -> Recording:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # after an error others may never come
        self._end(PATIENCE if kind is None else 5.0)

    def _note_saved(self, values: torch.Tensor, codes: GroupCodes) -> None:
        if not (torch.compiler.is_compiling() or _is_in_backward()):
            self._recorder.note_saved(values, codes)

    def _note_codes(
        self, note: Callable[[str, Any], None], parameter: int, sample: Callable[[], MomentSample | SumSample]
    ) -> Callable[[], None] | None:
        name = self._names.get(parameter)
        if name is None or not self._recorder.is_sampling:
            return None
        before = sample()
        return lambda: note(name, before)

    def _warn_of_nothing(self, value: float | torch.Tensor) -> None:
        """Warn, once, of a norm of no gradients, which is 0 and hides every NaN."""
        if self._recorder.rank or self._warned_of_nothing:
            return
        # first, for it asks nothing of the device
        if any(each.grad is not None for each in self._model.parameters() if each.requires_grad) or value != 0:
            return
        self._warned_of_nothing = True
        self._warn(
            "allows_step was given 0, and no parameter of the model has a gradient in .grad: LowLevelZero and Gemini "
            "keep gradients elsewhere, where torch.nn.utils.clip_grad_norm_ neither clips them nor sees a NaN. Give "
            "allows_step the loss, or give the plugin max_norm= and set optimizer.before_update = lambda: "
            'recording.allows_step(optimizer.get_grad_norm()), with Watchdog(on_nonfinite="raise").'
        )

    def _all_finite(self, value: float | torch.Tensor, agreed: bool) -> bool:
        if agreed or self._recorder.ranks == 1:
            return math.isfinite(value.item() if isinstance(value, torch.Tensor) else value)
        device = value.device if isinstance(value, torch.Tensor) else None
        if device is None:
            device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
        # in FP64, where no finite number of the caller's becomes infinite
        finite = torch.as_tensor(value, dtype=torch.float64, device=device).detach().isfinite().all().float()
        dist.all_reduce(finite, dist.ReduceOp.MIN)
        return bool(finite)

    def _first_of_ranks(self) -> _Finding | None:
        own = self._first()
        box, key = self._recorder.box, f"not finite {next(self._searches)}"
        if box is None:
            return own
        if box.rank:
            box.leave(key, own)
            # the first rank may have waited that long for another
            return cast("_Finding | None", box.read_answer(key, 2 * PATIENCE))
        # once all have told: rank 0 must not decide without the rank that broke first
        others, absent = box.collect(key, PATIENCE)
        if absent:
            late = first_of(list(map(str, absent)))
            self._warn(f"What rank {late} saw in step {self._recorder.step} is not known, for it did not come.")
        # rank 0 decides, so that all ranks name the same tensor
        first = min((each for each in (own, *others.values()) if each is not None), default=None)
        box.answer(key, first)
        return first

    def _first(self) -> _Finding | None:
        """The first tensor of this rank that is not finite. The host waits for the device."""
        rank = self._recorder.rank
        for layer, role in _broken_parameters(self._model):
            return _Finding(0, False, (), 0, rank, layer, role)
        seen = self._recorder.seen
        if not seen:
            return None
        devices = {each.inverse_scale.device for each in seen}
        broken: dict[int, bool] = {}
        for device in devices:
            places = [place for place, each in enumerate(seen) if each.inverse_scale.device == device]
            # one copy for a device, for each makes the host wait
            flags = torch.stack([seen[place].inverse_scale.isnan().any() for place in places])
            broken |= dict(zip(places, flags.tolist(), strict=True))
        for phase, sign in ((1, 1), (2, -1)):
            of_phase = [place for place, each in enumerate(seen) if (each.role == INPUT) is (phase == 1)]
            for number, place in enumerate(of_phase):
                if broken[place]:
                    each = seen[place]
                    numbers = tuple(sign * int(number) for number in _NUMBERS.findall(each.layer))
                    return _Finding(phase, number == 0, numbers, place, rank, each.layer, each.role)
        return None


class _Finding(NamedTuple):
    """A tensor that is not finite; the least of several came first."""

    phase: int
    """0 parameters, 1 forward, 2 backward."""
    was_given: bool
    """It is the first tensor of its rank and phase, which another pipeline stage may have sent."""
    numbers: tuple[int, ...]
    """In the layer's name, which tell its place in the whole model; negative in backward."""
    place: int
    rank: int
    layer: str
    role: str


def record(
    model: nn.Module,
    *,
    every: int = 50,
    sink: str | Path | Sink | Sequence[Sink] | None = None,
    watchdog: Watchdog | None = None,
    done: int = 0,
    on_warning: Callable[[str], object] = warn,
) -> Recording:
    """Record what FP8 does to each tensor of a model, and watch over it.

    Inputs, weights and output gradients of FP8 layers, in training, in eager code: amax, scale, the shares of values
    that became zero or were clipped, signal to noise, values that are not finite, outliers. Each optimizer step in
    this process counts. Sampled are the first and each one that `every` divides; nothing in a step waits for the
    device. Every rank calls it, at the same time and alike; rank 0 writes one line a tensor for all ranks.

    Args:
        model: converted and, where it is, boosted.
        every: steps from a sample to the next.
        sink: a path for JSON lines (`monitor.sinks.JsonLines`), or one or several sinks; None: warnings alone.
        watchdog: thresholds, and what happens to steps that are not finite; None is `Watchdog()`.
        done: steps taken before, as by a run that is resumed; lines of later ones are dropped.
        on_warning: takes the watchdog's sentences, on rank 0.

    Raises:
        ValueError: `every` is less than 1, `done` less than 0, or the model has no FP8 layers.
        TypeError: `sink` is none, or another argument has the wrong type.
    """
    require_types(record, {"every": every, "done": done})
    if every < 1:
        raise ValueError(f"every is {every}; give the number of steps from a sample to the next, at least 1")
    if done < 0:
        raise ValueError(f"done is {done}; give the number of steps that the run has taken, 0 for a new one")
    every, done = int(every), int(done)  # NumPy's numbers are none of JSON's
    unwrap = getattr(model, "unwrap", None)
    inner = model if unwrap is None else unwrap()
    if not isinstance(inner, nn.Module):  # Colossal-AI's view of a model with adapters
        inner = inner.base_model
    configs = [module.fp8_config for module in inner.modules() if isinstance(module, FP8Module)]
    if not configs and not (dist.is_initialized() and dist.get_world_size() > 1):  # another stage may have some
        raise ValueError(
            "no layer of the model computes in FP8, so there is nothing to record; call convert_to_fp8 first"
        )
    every_layer = [module for _, module in linear_layers(inner)]
    in_fp8 = sum(isinstance(module, FP8Layer) for module in every_layer)
    rules = Watchdog() if watchdog is None else watchdog
    header = {
        "fp8booster": __version__,
        "kind": KIND,
        "every": every,
        "config": _plain(configs[0]) if configs else {},
        "layers": {"fp8": in_fp8, "16-bit": len(every_layer) - in_fp8},
        "watchdog": rules.thresholds,
    }
    recorder = Recorder(every, sinks_of(sink), header, done, rules, on_warning)
    return Recording(inner, recorder, rules, on_warning)


def _is_in_backward() -> bool:
    """Tell whether forward runs again for its backward, and has cast before what it casts now."""
    return torch._C._current_graph_task_id() != -1


def _plain(config: FP8Config) -> dict[str, Any]:
    """Return a configuration as JSON holds it; the scaling strategy is its name."""

    def plain(value: Any) -> Any:
        if isinstance(value, Scaling):
            return value.name
        if dataclasses.is_dataclass(value):
            return {each.name: plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
        if isinstance(value, bool | int | float | str | None):
            return value
        return getattr(value, "__name__", str(value).removeprefix("torch."))

    resolved = dataclasses.replace(config.formats, gradient=config.gradient_format)
    return plain(dataclasses.replace(config, formats=resolved))


@torch.no_grad()
def _broken_parameters(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Layers and roles of parameters that are not finite. The host waits for the device."""
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.is_meta or parameter.numel() == 0:
                continue
            broken = False
            if _has_values(parameter):
                local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                broken = local.is_floating_point() and not bool(local.isfinite().all())
            elif name == "weight" and isinstance(module, FP8Layer):
                scale = module.fp8_weight.inverse_scale
                broken = scale is not None and bool(scale.isnan().any())
            if broken:
                yield plain_name(path), name


def _has_values(parameter: torch.Tensor) -> bool:
    """Tell whether a parameter's memory holds its values.

    Engines show one NaN through its shape where there is an FP8 copy alone, and Gemini, whose parameters are of a class
    of their own, has gradients there after a backward.
    """
    own = type(parameter) is nn.Parameter or hasattr(parameter, "to_local")
    return own and (parameter.numel() == 1 or any(parameter.stride()))
