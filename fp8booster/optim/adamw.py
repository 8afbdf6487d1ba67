"""AdamW whose states take 4 bytes a parameter for a BF16 weight, or 2 for an FP32 one, in place of 12 and 8."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import compress
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fp8booster.argument_types import require_types
from fp8booster.kernels.adamw import AdamRates, require_rates
from fp8booster.kernels.adamw_8bit import Shards8bit, step_rows, update_8bit
from fp8booster.kernels.code_statistics import MomentSample
from fp8booster.optim.gradient_sums import GRADIENT_ACCUMULATIONS, GradientSum, added, value_of
from fp8booster.optim.own_part import number_of_part, own_part, own_parts
from fp8booster.optim.saved_states import loaded, spread, whole
from fp8booster.optim.states_8bit import LOW, State, States, as_tensor
from fp8booster.optim.steps import rates_of, update_by_device
from fp8booster.optim.used_gradient import WHY_NOT_REDUCED, UsedGradient

_OPTIONS_OF_TORCH = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}
"""Entries of a group that torch's AdamW looks for when it goes on with a checkpoint of this one."""

DEFAULT_ACCUMULATION = "16-bit"

_COPIED = ("micro_batches", "updates_in_backward", "_accumulation", "_numbers", "_has_engine", "_skipped")
"""Attributes that a copy keeps, besides those of torch's optimizers."""

Observer = Callable[[int, Callable[[], MomentSample]], Callable[[], None] | None]
"""Called before the update of the model's parameter of this id, or of a part of it, with a function that samples its
moments; what it returns is called after."""

observers: list[Observer] = []
"""Asked before each update."""

_SHARD = 0x27D4EB2F
"""Factor of a shard's number in the seed of stochastic rounding."""


class AdamW(Optimizer):
    """`torch.optim.AdamW` with both moments in 8 bits, and exact FP32 master weights for BF16 parameters.

    A BF16 parameter is the upper half of its FP32 master, rounded half away from zero; the state holds the 16 bits that
    are missing. So updates too small for BF16 are not lost. Moments have a range for each 256 values
    (`kernels.adamw_8bit`). On a GPU a step is one launch for all parameters of a dtype.

    bytes a parameter         weight   master      moments      all
    torch.optim.AdamW, BF16   2        4 (FP32)    8            14
    this one, BF16            2        2           2.05         6.05
    this one, FP32            4        (weight)    2.05         6.05

    Where a gradient is not finite, its block of 256 values is left as it was, and `skipped_blocks` counts it.

    The plugins' engines shard the states, and save and load them as those of `torch.optim.AdamW`, in FP32. Of a
    DTensor, as FSDP2 makes parameters, each rank updates its part; state dicts have DTensors in FP32, which torch's
    distributed checkpoints lay out anew for another number of ranks.

    Args:
        params: parameters or parameter groups: contiguous, BF16 or FP32. DTensors are sharded or replicated.
        lr, betas, eps, weight_decay: as in `torch.optim.AdamW`.
        update_in_backward: update each parameter as soon as backward has its gradient, and free that: no two gradients
            are there at once. Gradients cannot be clipped by their norm then: until `step()`, `.grad` holds a
            `UsedGradient`, on which every operator raises ValueError. `step()` updates only what waits for further
            micro-batches. Under LowLevelZeroPlugin ranks update their shards bucket by bucket.
        micro_batches: with `update_in_backward`, the backwards whose gradients add up to an update: divide each loss by
            it. A gradient is freed as soon as it was added; the last is added in FP32, and updates. `step()` after the
            last one updates what got fewer gradients, as the parameters of a layer that was skipped, and ends an
            accumulation early; `zero_grad()`, also the model's, forgets it.
        gradient_accumulation: how gradients wait for further ones: "16-bit", in BF16; "8-bit", by groups of 128 values
            (`kernels.group_codes`); or "32-bit".

    Raises:
        ValueError: a rate, beta, eps or decay outside its range, a parameter that is not contiguous, less than one
            micro-batch, more than one without `update_in_backward`, or `gradient_accumulation` without more than one.
        TypeError: an argument of another type, a parameter of another dtype, or with `update_in_backward` a DTensor or
            the flat parameter of FullyShardedDataParallel.
    """

    num_fp32_shards_per_param = 3
    """Weight, gradient, and both moments in less than a third; Gemini decides by it whether masters fit on the GPU."""

    amaxes: Mapping[torch.nn.Parameter, torch.Tensor] = MappingProxyType({})
    """The largest magnitude of each parameter that the last step updated: float32 []."""

    state: States

    updates_in_backward: bool

    micro_batches: int
    """It may be set between two accumulations."""

    parameters: Mapping[torch.Tensor, torch.Tensor] = MappingProxyType({})
    """Under an engine, the model's parameter of each tensor that is updated in its place."""

    gradient_sums: dict[torch.nn.Parameter, tuple[int, GradientSum]]
    """The number and the sum of gradients of each parameter that waits for further micro-batches."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        update_in_backward: bool = False,
        micro_batches: int = 1,
        gradient_accumulation: str = DEFAULT_ACCUMULATION,
    ) -> None:
        require_types(AdamW.__init__, locals())
        require_rates(float(lr), betas, eps, weight_decay)
        _require_accumulation(update_in_backward, micro_batches, gradient_accumulation)
        self.micro_batches, self._accumulation, self.gradient_sums = micro_batches, gradient_accumulation, {}
        self._numbers: dict[torch.Tensor, int] = {}
        self._has_engine = False
        self._skipped: dict[torch.device, torch.Tensor] = {}
        self.updates_in_backward = update_in_backward
        self._hooks: list[RemovableHandle] = []
        self._taken: set[torch.nn.Parameter] = set()
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})
        # after torch's constructor, which puts an ordinary dict there
        self.state = States()

    def __getstate__(self) -> dict[str, Any]:
        """Return the parts of a copy or a pickle. Raises ValueError: gradients wait for further micro-batches."""
        self._require_no_sums("copied")
        return super().__getstate__() | {name: vars(self)[name] for name in _COPIED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As torch's, which puts an ordinary dict in the place of the states."""
        before = vars(self).get("state")
        super().__setstate__(state)
        self.state = States(self.state, before.show_step if isinstance(before, States) else int)
        if before is None:  # this is a copy
            self.gradient_sums, self._hooks, self._taken = {}, [], set()
            if not self._has_engine:
                for number in range(len(self.param_groups)):
                    self._hook(number)

    def train_for_engine(
        self,
        places: Mapping[torch.Tensor, tuple[int, int]],
        parameters: Mapping[torch.Tensor, torch.Tensor] = MappingProxyType({}),
        *,
        integer_steps: bool = False,
    ) -> None:
        """Train the tensors that an engine has put in the place of the parameters, and show it states in FP32.

        An engine that updates in backward calls `update_shards` with gradients that it has reduced.

        Args:
            places: for each tensor of `param_groups`, the number of its parameter, and of its part of that. They seed
                stochastic rounding, which differs between parts, and must not between the ranks' copies of one.
            parameters: the model's parameter of each tensor that is a part of one, for records of moments.
            integer_steps: show `step` as an int, not as a tensor.
        """
        # backward would else update by one rank's gradient, and ranks' weights would diverge
        for hook in self._hooks:  # before ranks have reduced a gradient
            hook.remove()
        # parts of one parameter would else draw the same random bits
        self._numbers = {each: number + _SHARD * part for each, (number, part) in places.items()}
        self._has_engine, self.parameters = True, parameters
        self.state = States(self.state, int if integer_steps else as_tensor)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in `torch.optim.Optimizer`; errors as in the class."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._require_updatable(group["params"])
        except (TypeError, ValueError):
            self.param_groups.pop()  # so that it may be corrected and added again
            raise
        for name, value in _OPTIONS_OF_TORCH.items():
            group.setdefault(name, value)
        for parameter in group["params"]:
            self._number(parameter)
        self._hook(len(self.param_groups) - 1)

    def _number(self, parameter: torch.Tensor) -> None:
        # by place and not by id, so that a resumed run seeds its rounding alike; and by the part, which ranks round
        # each by chance of its own
        self._numbers[parameter] = len(self._numbers) + _SHARD * number_of_part(parameter)

    def _require_updatable(self, parameters: Sequence[torch.Tensor]) -> None:
        """Raise TypeError or ValueError, as the class says, for a parameter that this optimizer cannot update."""
        for parameter in parameters:
            if isinstance(parameter, DTensor):
                if self.updates_in_backward:
                    raise TypeError(
                        "a parameter is a DTensor, as FSDP2 makes it, whose gradient ranks reduce when backward has "
                        "taken that of this rank; leave update_in_backward out"
                    )
                if any(each.is_partial() for each in parameter.placements):
                    raise ValueError("a parameter is a DTensor of partial sums; give sharded or replicated ones")
            if parameter.dtype not in (torch.bfloat16, torch.float32):
                raise TypeError(f"a parameter is {parameter.dtype}; give BF16 or FP32 ones")
            if not own_part(parameter).is_contiguous():
                raise ValueError("a parameter is not contiguous; give contiguous parameters")
            if self.updates_in_backward and getattr(parameter, "_is_flat_param", False):
                raise TypeError(
                    "a parameter is FullyShardedDataParallel's flat one, whose gradient ranks reduce when backward has "
                    "taken that of this rank; leave update_in_backward out, or take LowLevelZeroPlugin"
                )

    def _hook(self, group_number: int) -> None:
        """Let backward update the parameters of a group, where it does."""
        if not self.updates_in_backward:
            return
        for parameter in self.param_groups[group_number]["params"]:
            is_trained = parameter.requires_grad
            parameter.requires_grad_(True)  # a hook is not taken otherwise; a frozen one may be trained later
            self._hooks.append(parameter.register_post_accumulate_grad_hook(partial(self._take, group_number)))
            parameter.requires_grad_(is_trained)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, div_scale: float | torch.Tensor = -1) -> Any:
        """Update every parameter that has a gradient, or one that waits for further micro-batches.

        Args:
            closure: computes the loss anew, and is what this returns.
            div_scale: gradients are divided by it, a number or float32 []; the number -1 divides by nothing.

        Raises:
            RuntimeError: a parameter that backward has updated has a gradient all the same.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for parameter in self._taken:
            self._forget_if_zero(parameter)
            if isinstance(parameter.grad, UsedGradient):
                parameter.grad = None
        # DDP writes its buckets' mean to `.grad` after hooks took what this rank had
        if any(parameter.grad is not None for parameter in self._taken):
            raise RuntimeError(WHY_NOT_REDUCED)
        self._taken.clear()
        amaxes: dict[torch.nn.Parameter, torch.Tensor] = {}
        self.amaxes = amaxes
        for group in self.param_groups:
            waiting = filter(self.gradient_sums.__contains__, group["params"]) if self.gradient_sums else ()
            for parameter in waiting:  # one sum in FP32 at a time
                total = self.gradient_sums.pop(parameter)[1]
                amaxes.update(self._update(group, [parameter], [value_of(total, parameter.grad)], div_scale))
                parameter.grad = None
            given = [each for each in group["params"] if each.grad is not None]
            amaxes.update(self._update(group, given, [each.grad for each in given], div_scale))
            # as backward does: no gradient outlives its update
            if self.updates_in_backward:
                for parameter in given:
                    parameter.grad = None
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in `torch.optim.Optimizer`; forgets the gradients that wait for further micro-batches too."""
        for parameter in self._taken:
            parameter.grad = None
        super().zero_grad(set_to_none)
        self.gradient_sums.clear()

    def _forget_if_zero(self, parameter: torch.nn.Parameter) -> None:
        """Forget what waits for further micro-batches if somebody has set the gradient to zero or None since."""
        if self.gradient_sums and (not isinstance(parameter.grad, UsedGradient) or parameter.grad.is_zero):
            self.gradient_sums.pop(parameter, None)

    @property
    def skipped_blocks(self) -> int:
        """Blocks of 256 values that were left as they were, over all steps; reading it waits for the device."""
        return sum(int(count) for count in self._skipped.values())

    def _take(self, group_number: int, parameter: torch.nn.Parameter) -> None:
        """Update a parameter of which backward has made the gradient, or add that to those before it."""
        # taken at once, so that no two gradients are there together
        self._forget_if_zero(parameter)
        gradient = parameter.grad
        if isinstance(gradient, UsedGradient):
            gradient = gradient.added
        parameter.grad = UsedGradient(parameter)
        if gradient is None:  # autograd calls this when it has set it
            raise RuntimeError(
                "an AdamW that was made before with update_in_backward=True took a parameter's gradient in backward; "
                "train a parameter by one of them only"
            )
        _require_dense((gradient,))
        self._taken.add(parameter)
        count, total = self.gradient_sums.pop(parameter, (0, None))
        if count + 1 < self.micro_batches:
            held = added(total, gradient, self._accumulation, id(self.parameters.get(parameter, parameter)))
            if held is gradient:
                # Others may write to its memory: autograd gives parameters whose views are added views of one gradient,
                # and a CUDA graph's next replay writes to its own.
                held = gradient.clone()
            self.gradient_sums[parameter] = count + 1, held
            return
        # the group is another object when a state dict was loaded
        # the last gradient is added in FP32, not rounded to the sum's 16 or 8 bits first
        summed = gradient if total is None else value_of(total, gradient)
        self._update(self.param_groups[group_number], [parameter], [summed])

    def _update(
        self,
        group: dict[str, Any],
        parameters: Sequence[torch.nn.Parameter],
        gradients: Sequence[torch.Tensor],
        divisor: float | torch.Tensor | None = None,
    ) -> Iterable[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Take a step with some parameters of a group, and return each that is not empty with its amax."""
        # an empty tensor has no amax, and a rank may hold no part of a parameter
        parts = own_parts(parameters)
        counts = list(map(torch.Tensor.numel, parts))
        if parts is not parameters:
            for parameter, part in zip(parameters, parts, strict=True):
                if not part.numel():  # checkpoints ask each rank for the state
                    self._state_of(parameter, part).codes["step"] += 1
        gradients = list(compress(gradients, counts))
        parameters = list(compress(parameters, counts))
        amaxes = update_by_device(self.update_shards, group, parameters, gradients, divisor)
        return zip(parameters, amaxes, strict=True)

    @torch.no_grad()
    def update_shards(
        self,
        group: dict[str, Any],
        parameters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        divisor: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Take a step with parameters of one device.

        Args:
            group: of the parameters.
            parameters: none of them empty.
            gradients: of each, on this device: BF16, FP16 or FP32.
            divisor: gradients are divided by it first: float32 [] on this device. None: they are not.

        Returns:
            float32 [parameters]: the largest magnitude among the new values of each, of a DTensor among this rank's.

        Raises:
            TypeError: a parameter that this optimizer was not given, or a sparse gradient.
            ValueError: a state of another size than its parameter's; a group with amsgrad or maximize.
        """
        if group.get("amsgrad", False) or group.get("maximize", False):
            raise ValueError("this AdamW has neither amsgrad nor maximize; load a checkpoint without, or use torch's")
        _require_dense(gradients)
        try:
            numbers = [self._numbers[each] for each in parameters]
        except KeyError:
            self._number_replaced()
            numbers = [self._numbers[each] for each in parameters]
        # the numbers of the step are made on the host, so a tensor's has to come there
        rates = rates_of(group, decoupled=True)._replace(lr=float(group["lr"]))
        device = parameters[0].device
        parts = own_parts(parameters)
        states = list(map(self._state_of, parameters, parts))
        # first: the corrections of the moments count this step
        for state in states:
            state.codes["step"] += 1
        # counted on the device: the host would wait for it at each step, and mostly for a zero
        if device not in self._skipped:
            self._skipped[device] = torch.zeros((), dtype=torch.int32, device=device)
        # read from the codes: `state["exp_avg"]` would decode the moment to FP32
        shards = Shards8bit(
            parts,
            [state.codes.get(LOW) for state in states],
            list(map(torch.Tensor.contiguous, own_parts(gradients))),
            [state.moments for state in states],
            [state.codes["step"] for state in states],
            numbers,
        )
        return self._update_observed(parameters, shards, rates, divisor)

    def _number_replaced(self) -> None:
        """Number parameters anew where DTensors stand in the place of those that were given, as in Accelerate.

        Raises:
            TypeError: other tensors do.
        """
        held = self._all_parameters()
        replaced = [each for each in held if each not in self._numbers]
        if not replaced or not all(isinstance(each, DTensor) for each in replaced):
            raise TypeError(
                "an engine has put tensors in the place of this optimizer's parameters; boost it with a plugin of "
                "fp8booster.plugins, or take torch.optim.AdamW"
            )
        self._require_updatable(held)
        self._numbers.clear()
        for each in held:
            self._number(each)

    def _update_observed(
        self, parameters: Sequence[torch.Tensor], shards: Shards8bit, rates: AdamRates, divisor: torch.Tensor | None
    ) -> torch.Tensor:
        """Update tensors of one device, in one call but for those whose moments an observer samples."""
        skipped, begin, count = self._skipped[shards.values[0].device], 0, len(shards.values)
        amaxes = []
        for place, parameter in enumerate(parameters if observers else ()):
            number = id(self.parameters.get(parameter, parameter))
            sample = partial(_sample_of, shards, place, rates, divisor)
            then = [observe(number, sample) for observe in observers]
            if any(then):
                # a sample holds FP32 moments until its tensor is updated: no two of them at once
                amaxes.append(update_8bit(shards.part(begin, place + 1), rates, skipped, divisor))
                for each in filter(None, then):
                    each()
                begin = place + 1
        if begin < count:
            amaxes.append(update_8bit(shards.part(begin, count) if begin else shards, rates, skipped, divisor))
        return torch.cat(amaxes) if len(amaxes) > 1 else amaxes[0]

    def _state_of(self, parameter: torch.Tensor, part: torch.Tensor) -> State:
        """Return the state of a parameter, of which this rank has the part."""
        state = self.state[parameter]
        if not isinstance(state, State):
            state = State(state)
        if not state.codes:
            state = self.state[parameter] = State.zeros(part)
        state.fit(part)
        state.move(part.device)
        if part.dtype is not torch.bfloat16:
            state.codes.pop(LOW, None)  # of a BF16 weight before; this one is its own master
        elif LOW not in state.codes:
            state.codes[LOW] = torch.zeros(part.numel(), dtype=torch.int16, device=part.device)
        return state

    def state_dict(self) -> dict[str, Any]:
        """As torch's. The states hold codes; under a plugin, and of DTensors, they read as FP32 values.

        The states of BF16 DTensors have `master_low` besides torch's entries. A checkpoint without it may be loaded:
        masters then begin as the weights.

        Raises:
            ValueError: gradients wait for further micro-batches.
        """
        result = self._saved()
        if not self._has_engine:
            parameters = self._all_parameters()
            result["state"] = {
                # others would lay codes out anew without the ranges of their blocks
                number: spread(parameters[number], state)
                if isinstance(parameters[number], DTensor)
                else dict(state.codes)
                for number, state in result["state"].items()
            }
        return result

    def _saved(self) -> dict[str, Any]:
        """Return torch's state dict, with the states in the order of the parameters."""
        self._require_no_sums("saved")
        result = super().state_dict()
        # a rank makes the states of its empty parts first, and ranks that gather states go by their order
        result["state"] = dict(sorted(result["state"].items()))
        return result

    def _all_parameters(self) -> list[torch.Tensor]:
        return [each for group in self.param_groups for each in group["params"]]

    def full_state_dict(self) -> dict[str, Any]:
        """Return the state dict that `torch.optim.AdamW` would have, in FP32, with a `master` for each parameter.

        Raises:
            ValueError: as `state_dict`.
        """
        full, parameters = self._saved(), self._all_parameters()
        full["state"] = {number: whole(parameters[number], state) for number, state in full["state"].items()}
        return full

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` or `full_state_dict` gave, or `torch.optim.AdamW`'s, which has no masters.

        Load the model's weights first: a `master` replaces the bits that BF16 weights lack, and the weights.

        Raises:
            ValueError: a state of another size than its parameter's, or one of another optimizer; gradients wait for
                further micro-batches.
        """
        self._require_no_sums("loaded")
        # torch would cast the codes to the dtype of the parameter
        super().load_state_dict({**state_dict, "state": {}})
        saved = [each for group in state_dict["param_groups"] for each in group["params"]]
        # by number, or by name in torch's distributed checkpoints
        parameters = dict(zip(saved, self._all_parameters(), strict=True))
        for name, state in state_dict["state"].items():
            self.state[parameters[name]] = loaded(parameters[name], state)

    def _require_no_sums(self, done: str) -> None:
        """Raise ValueError in the midst of an accumulation, before states are so done with."""
        if self.gradient_sums:
            raise ValueError(
                f"states cannot be {done} in the midst of an accumulation, for a state dict has no gradients: "
                f"{len(self.gradient_sums)} parameters wait for further micro-batches; call step() or zero_grad() first"
            )


def _sample_of(shards: Shards8bit, place: int, rates: AdamRates, divisor: torch.Tensor | None) -> MomentSample:
    tensors = shards.values[place], shards.lows[place], shards.gradients[place], shards.moments[place]
    return MomentSample(*tensors, step_rows(shards.part(place, place + 1), rates, divisor)[0], rates)


def _require_dense(gradients: Iterable[torch.Tensor]) -> None:
    """Raise TypeError for a sparse gradient."""
    if {gradient.layout for gradient in gradients} - {torch.strided}:
        raise TypeError(
            "a gradient is sparse, as nn.Embedding(sparse=True) makes it; make it with sparse=False, or take "
            "torch.optim.SparseAdam for its parameter"
        )


def _require_accumulation(update_in_backward: bool, micro_batches: int, kind: str) -> None:
    """Raise ValueError for gradients that cannot be accumulated so."""
    if kind not in GRADIENT_ACCUMULATIONS:
        raise ValueError(f"gradient_accumulation is {kind!r}; use {' or '.join(map(repr, GRADIENT_ACCUMULATIONS))}")
    if micro_batches < 1:
        raise ValueError(f"micro_batches is {micro_batches}; give at least 1")
    if micro_batches > 1 and not update_in_backward:
        raise ValueError(
            f"micro_batches={micro_batches} goes with update_in_backward=True; without it backward adds gradients up, "
            "and step() updates: call it after so many backwards"
        )
    if micro_batches == 1 and kind != DEFAULT_ACCUMULATION:
        raise ValueError(
            f"gradient_accumulation={kind!r} is about gradients that wait for further micro-batches, and micro_batches "
            "is 1; give update_in_backward=True and the number of micro_batches, or leave it out"
        )
