"""The contract of scaling strategies: how an operand of an FP8 product gets its scale, and what is kept for that.

A strategy is one object for all layers of a configuration. What it keeps for one layer, such as amaxes of earlier
steps, is a `State` that the layer holds. To bring a strategy of your own, subclass `Scaling`, override `cast`, and pass
an instance: `FP8Config(scaling=MyScaling())`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from fp8booster.tensor import QuantizedMatrix

WEIGHT = "weight"
INPUT = "input"
OUTPUT_GRADIENT = "output gradient"
"""Roles of operands in a layer's products."""

GRANULARITIES = ("tensorwise", "rowwise", "blockwise")
"""Scales that products can read: one for a tensor; one for each token and each output feature; or one for each 128
values of a token and for each block of 128 x 128 values of a weight, on Hopper GPUs."""


class State:
    """The state that a strategy keeps for the operands of one layer, or of several that are multiplied as one."""

    by_channel: ClassVar[bool] = False
    """Input and weight have a factor for each channel of the input, found when the weight is cast: the weight of a call
    is cast first, inputs are not shared with other layers, and no engine casts the weight."""

    @property
    def saved(self) -> dict[str, torch.Tensor]:
        """The tensors that a checkpoint needs, by name, without what a step noted that no optimizer has ended."""
        return {}

    def load(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Go on from `saved` of another run, before anything was cast; what does not fit is left out."""

    def forget_step(self) -> None:
        """Forget what was noted since the last optimizer step, which is skipped."""


class Scaling:
    """One strategy. Equal objects give equal scales; instances are frozen and hashable, as frozen dataclasses are."""

    name: str
    """For the report and error messages."""

    granularity: str = "tensorwise"
    """One of `GRANULARITIES`."""

    power_of_two: bool = False
    """Scales are rounded down to powers of two: exact to apply and to undo, at a cost of up to one bit of range."""

    def cast(
        self,
        role: str,
        matrix: torch.Tensor,
        dtype: torch.dtype,
        *,
        plain: bool = True,
        transposed: bool = False,
        amax: torch.Tensor | None = None,
        state: State | None = None,
    ) -> QuantizedMatrix:
        """Cast an operand. It must not wait for the device.

        Args:
            role: `WEIGHT`, `INPUT` or `OUTPUT_GRADIENT`.
            matrix: [R, C], BF16, FP16 or FP32, without a gradient.
            dtype: FP8 format.
            plain, transposed: the layouts to make.
            amax: float32 [] or [n], of which the largest is the matrix's amax where its producer knows it; of all ranks
                where they gather what is cast, and then all must come to the same scale. None: find it.
            state: the layer's; None where it keeps none.
        """
        raise NotImplementedError

    def cast_stack(
        self, role: str, matrices: Sequence[torch.Tensor], dtype: torch.dtype, **layouts: bool
    ) -> QuantizedMatrix | None:
        """Cast matrices below each other from where each lies, as `cast` would cast them in one piece.

        Args:
            role, dtype, layouts: as in `cast`; no amax is known, and no state is kept.
            matrices: [R_i, C].

        Returns:
            None where the strategy casts what lies in one piece alone.
        """
        return None

    def new_state(self) -> State | None:
        """Return what a layer keeps in training; None: nothing."""
        return None

    @property
    def without_state(self) -> Scaling:
        """The strategy of layers that keep no state: in evaluation, and for products of no layer."""
        return self

    @property
    def for_engines(self) -> Scaling | None:
        """The `RealTime` strategy by which an engine may cast its shard of a weight, under the amax of the whole.

        None: weights are communicated in high precision, and layers cast them with `cast`.
        """
        return None

    @property
    def is_captured(self) -> bool:
        """Tell whether casts may go into a CUDA graph, which replays them without asking what a layer keeps."""
        return self.new_state() is None

    @property
    def for_inference(self) -> Scaling | None:
        """The strategy where weights no longer change, and there are no training steps; None: it needs these."""
        return self

    def fixed_amax(self, role: str, dtype: torch.dtype) -> float | None:
        """Return the amax that all tensors of a role are scaled by; None: it depends on the tensor."""
        return None

    def check(self, config: Any) -> None:
        """Raise ValueError for an `FP8Config` that the strategy does not go with."""


def check_strategy(scaling: Scaling) -> None:
    """Raise TypeError or ValueError, which say what to write, for an object that does not keep to the contract."""
    kind, what = type(scaling), f"FP8Config.scaling is {scaling!r}, and {type(scaling).__name__}"
    # a frozen dataclass with a list among its fields has a `__hash__` that fails: only a call tells
    try:
        hash(scaling)
    except TypeError:
        raise TypeError(f"{what} cannot be hashed; make it a dataclass with frozen=True, or give it __hash__") from None
    if kind.cast is Scaling.cast:
        raise TypeError(f"{what} does not override cast; write how it casts an operand")
    name = getattr(scaling, "name", None)
    if not isinstance(name, str) or not name:
        raise TypeError(f"{what} has the name {name!r}; give it one, for the report")
    if scaling.granularity not in GRANULARITIES:
        raise ValueError(f"{what} has the granularity {scaling.granularity!r}; use {' or '.join(GRANULARITIES)}")
    # conversion would ask for the state layer by layer, and fail with some of them converted
    state = scaling.new_state()
    if state is not None and not isinstance(state, State):
        raise TypeError(
            f"{what}.new_state returns a {type(state).__name__}; return an fp8booster.scaling.State, or None"
        )
    if state is not None and kind.without_state is Scaling.without_state:
        raise TypeError(f"{what} keeps a state and does not override without_state, the strategy of evaluation")
