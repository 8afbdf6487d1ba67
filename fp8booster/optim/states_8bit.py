"""Adam's states with moments in 8 bits, which read as torch's do: so engines and checkpoints need not know of codes."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

from fp8booster.kernels.adamw_8bit import Moments8bit, decode_first, decode_second, encode_second, in_blocks
from fp8booster.kernels.group_codes import encode_roots

_FIRST, _SECOND = ("exp_avg", "exp_avg_amax"), ("exp_avg_sq", "exp_avg_sq_range")
LOW = "master_low"
"""What a BF16 weight's FP32 master has beside it: int16, of its size."""

_SEEN = ("step", "exp_avg", "exp_avg_sq", LOW)

MOMENTS = ("exp_avg", "exp_avg_sq")
"""What every state has beside its step."""


class State(MutableMapping[str, Any]):
    """A parameter's state with the entries of torch's AdamW: `step`, and both moments in FP32.

    Reading a moment decodes it, setting one encodes it, and neither keeps FP32 values. What was decoded is encoded
    without loss, as long as it is cut into blocks at the same places. A deep copy is an ordinary dict of FP32 values:
    engines copy a state and write whole tensors into the copy. So is what is pickled.

    Args:
        given: entries, or codes.
        show_step: makes of the number of steps the value that reading `step` gives.
    """

    codes: dict[str, Any]
    """What is kept: the step as an int; `exp_avg` as int8 and `exp_avg_sq` as uint8 codes [n], `exp_avg_amax` and
    `exp_avg_sq_range` of their blocks (`kernels.adamw_8bit`); `master_low`."""

    def __init__(self, given: Mapping[str, Any], show_step: Callable[[int], Any] = int) -> None:
        self.codes, self.show_step = {}, show_step
        self._shapes: dict[str, torch.Size] = {}
        if all(isinstance(given.get(name), torch.Tensor) and not given[name].is_floating_point() for name in MOMENTS):
            self.codes.update(given)
            self._shapes = {name: given[name].shape for name in MOMENTS}
            self._shapes[LOW] = self._shapes["exp_avg"]
        else:
            self.update(given)

    @classmethod
    def zeros(cls, parameter: torch.Tensor) -> State:
        """Return the state of a parameter that has taken no step."""
        count, device = parameter.numel(), parameter.device
        codes = dict(zip(_FIRST + _SECOND, Moments8bit.zeros(count, device), strict=True))
        if parameter.dtype is torch.bfloat16:
            # zero bits: the master begins as exactly the BF16 weight
            codes[LOW] = torch.zeros(count, dtype=torch.int16, device=device)
        state = cls({"step": 0, **codes})
        state.fit(parameter)
        return state

    @property
    def moments(self) -> Moments8bit:
        """The codes, which a step changes in place."""
        codes = self.codes  # spelled out: a generator would cost the host more, in each step and for each tensor
        return Moments8bit(codes["exp_avg"], codes["exp_avg_amax"], codes["exp_avg_sq"], codes["exp_avg_sq_range"])

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that are kept."""
        return sum(value.nbytes for value in self.codes.values() if isinstance(value, torch.Tensor))

    def fit(self, parameter: torch.Tensor) -> None:
        """Take a parameter's shape. Raises ValueError unless it is the state of such a parameter."""
        if missing := [name for name in _FIRST + _SECOND if name not in self.codes]:
            raise ValueError(f"the state has no {' and '.join(missing)}; load the whole state dict of an AdamW")
        count = parameter.numel()
        for name in MOMENTS:
            if (held := self.codes[name].numel()) != count:
                raise ValueError(f"a state has {held} values and its parameter {count}; load the states of this model")
        self._shapes = dict.fromkeys((*MOMENTS, LOW), parameter.shape)

    def move(self, device: torch.device) -> None:
        """Keep all tensors on this device."""
        for name, value in self.codes.items():
            if isinstance(value, torch.Tensor) and value.device != device:  # in no step but one after a load
                self.codes[name] = value.to(device)

    def __getitem__(self, name: str) -> Any:
        value = self.codes[name]
        if name == "step":
            return self.show_step(value)
        shape = self._shapes[name]
        if name == LOW:
            return value.view(shape)
        if name == _FIRST[0]:
            blocks = decode_first(value, self.codes[_FIRST[1]])
        else:
            blocks = decode_second(value, self.codes[_SECOND[1]])
        return blocks.flatten()[: shape.numel()].view(shape)

    def __setitem__(self, name: str, value: Any) -> None:
        if name == "step":
            # the host makes each step's corrections from it, and would wait for a tensor on a GPU
            self.codes[name] = int(value)
        elif name == LOW:
            # engines may have passed it on in floating point
            self.codes[name] = value.float().clamp(-(2**15), 2**15 - 1).to(torch.int16).flatten()
            self._shapes[name] = value.shape
        elif name in MOMENTS:
            # to the nearest code, without chance: a load must give the same bits each time
            blocks = in_blocks(value.detach().float())
            first = name == _FIRST[0]
            code, ranges = encode_roots(blocks) if first else encode_second(blocks, seed=None)
            self.codes.update(zip(_FIRST if first else _SECOND, (code.flatten()[: value.numel()], ranges), strict=True))
            self._shapes[name] = value.shape
        else:
            raise ValueError(
                f"an AdamW with 8-bit moments has no {name!r}; load a state of an AdamW without amsgrad, or go on with "
                "the optimizer that wrote it"
            )

    def __delitem__(self, name: str) -> None:
        raise TypeError("entries of a state are not deleted; delete the state")

    def __iter__(self) -> Iterator[str]:
        return (name for name in _SEEN if name in self.codes)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __reduce__(self) -> tuple[Any, ...]:
        """In files too it is an ordinary dict of FP32 values; this form can be read without running code."""
        return (OrderedDict, (), None, None, iter(self.items()))

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in self.items()}


class States(defaultdict[torch.Tensor, Any]):
    """The states of an optimizer, by parameter; a mapping that is stored becomes a `State`, and a missing one is empty.

    One of another size than its parameter's stays as it is: Colossal-AI's MoE stores whole ones, and then their parts.

    Args:
        show_step: as in `State`.
    """

    def __init__(self, given: Mapping[torch.Tensor, Any] | None = None, show_step: Callable[[int], Any] = int) -> None:
        super().__init__()
        self.show_step = show_step
        self.update(given or {})

    def __missing__(self, parameter: torch.Tensor) -> State:
        self[parameter] = {}
        return self[parameter]

    def __setitem__(self, parameter: torch.Tensor, state: Mapping[str, Any]) -> None:
        if isinstance(state, State):
            state.show_step = self.show_step
        elif all(name not in state or state[name].numel() == parameter.numel() for name in MOMENTS):
            state = State(state, self.show_step)
        super().__setitem__(parameter, state)

    def update(self, given: Mapping[torch.Tensor, Any]) -> None:  # type: ignore[override]
        """Store each state."""
        for parameter, state in given.items():
            self[parameter] = state


def as_tensor(step: int) -> torch.Tensor:
    """A number of steps as torch keeps it: float32 [] on the host."""
    return torch.tensor(float(step), dtype=torch.float32, device="cpu")
