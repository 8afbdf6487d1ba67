"""Linear layers whose frozen weight is kept in FP8: one byte a value, and no copy besides.

The products are those of `FP8Layer` but for the weight's gradient, of which there is none. dgrad reads the transpose,
which backward makes and drops. Scales of rows lie along the dimension that dgrad sums over, so there the output's
gradient is multiplied by them before its cast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from fp8booster.config import FP8Config
from fp8booster.formats import FORMATS, HIGH_PRECISION, stored_fault
from fp8booster.kernels.alignment import aligned, multiple_for
from fp8booster.kernels.blockwise_cast import scales_shape
from fp8booster.kernels.device import require_fp8
from fp8booster.nn.linear.functional import check_operands, linear_from_quantized
from fp8booster.nn.linear.layer import FP8Layer, FP8Linear, note_read
from fp8booster.nn.linear.shared_input import share_input
from fp8booster.nn.linear.speed_model import TokenCounts
from fp8booster.nn.modules import change_class, remixed
from fp8booster.nn.saves import IN_FP8, guard_saves
from fp8booster.nn.weights.casting import Casts
from fp8booster.nn.weights.freshness import reusable
from fp8booster.nn.weights.source import FrozenWeight
from fp8booster.nn.weights.stacking import as_matrix
from fp8booster.scaling import INPUT, WEIGHT
from fp8booster.tensor import QuantizedMatrix, stored_scale

SCALE = "weight_scale_inv"
"""What the state dict calls the inverse scale, as FP8 checkpoints do."""

INPUT_AMAX = "input_amax"
"""What it calls the amax that inputs are scaled by, where one is given."""

before_decoding: list[Callable[[], object]] = []
"""Called whenever someone looks at a frozen weight's values."""

_KEEP_TYPES = ("fp8_inverse_scale", INPUT_AMAX)
"""Parameters of float32, whatever the model's dtype becomes."""

HELD = ("fp8_data", *_KEEP_TYPES)
"""Parameters that stand for the weight."""


class FrozenLayer(FP8Layer):
    """An FP8 layer whose weight is kept in FP8 alone, and not trained.

    Its parameters are `fp8_data` and `fp8_inverse_scale`, which need no gradient and keep their types, whatever the
    model's dtype becomes. The state dict has `weight`, FP8 of [output, input features], and `weight_scale_inv`,
    float32: [] tensorwise, [output features, 1] rowwise, or one for each block of 128 x 128 values; and of a calibrated
    layer `input_amax`. A state dict with a 16-bit `weight` loads too: it is cast.
    """

    why_not_saved: ClassVar[str] = IN_FP8

    fp8_data: nn.Parameter
    """The bytes of the FP8 matrix that products read, uint8: [N16, K16], or multiples of 128 with blockwise scales."""

    fp8_inverse_scale: nn.Parameter
    """As in `QuantizedMatrix`."""

    weight_dtype: torch.dtype
    """That of the values that `weight` decodes."""

    fp8_shape: tuple[int, int]
    """(output, input features)."""

    input_amax: nn.Parameter | None
    """What inputs are scaled by, float32 []; what is larger saturates. None: each by its own amax."""

    @classmethod
    def convert_in_place(cls, module: nn.Module, config: FP8Config) -> None:
        """Cast a layer's weight and turn the layer into this class in place; the 16-bit weight is freed."""
        if isinstance(module, FP8Layer):
            module.restore_weights()  # an engine may have left no other copy
            module.revert()
        weight = module._parameters.pop("weight")
        frozen = change_class(module, remixed(type(module), cls))
        frozen._start_frozen(config, weight.dtype)  # type: ignore[union-attr]
        frozen.hold_cast_of(as_matrix([weight], cls.weight_is_transposed))  # type: ignore[list-item]

    def revert(self) -> None:
        """Turn the layer into what it was, in place, its weight of the values that it has."""
        weight = nn.Parameter(self.weight, requires_grad=False)
        for name in (*HELD, "fp8_casts", "in_fp8", "weight_dtype", "fp8_shape"):
            delattr(self, name)
        change_class(self, remixed(type(self), self.original))
        self.register_parameter("weight", weight)

    def hold(self, quantized: QuantizedMatrix, shape: tuple[int, int]) -> None:
        """Keep an FP8 matrix as the weight, in the memory of the one before where there is one.

        Args:
            quantized: its plain layout, with scales of the layer's granularity.
            shape: (output, input features).
        """
        self.fp8_shape = shape
        self._keep(fp8_data=quantized.data.view(torch.uint8), fp8_inverse_scale=quantized.inverse_scale)

    def scale_inputs_by(self, amax: torch.Tensor) -> None:
        """Scale inputs by an amax, float32 [], from now on.

        Raises:
            ValueError: the scales are finer than one a tensor.
        """
        if self.fp8_config.finer_scales:
            raise ValueError(f'inputs with {self.fp8_config.finer_scales} have no one amax; use scaling="tensorwise"')
        self._keep(input_amax=amax)

    def _keep(self, **made: torch.Tensor) -> None:
        for name, tensor in made.items():
            before = self._parameters.get(name)
            if before is None or before.is_meta:
                setattr(self, name, nn.Parameter(tensor, requires_grad=False))
            else:
                before.copy_(tensor)

    @property
    def quantized(self) -> QuantizedMatrix:
        """The weight."""
        data = self.fp8_data.view(self.fp8_config.weight_format)
        return QuantizedMatrix(data, data.new_empty(0), self.fp8_inverse_scale, None)

    @property
    def weight(self) -> torch.Tensor:
        """The weight's values, decoded at each look: of `weight_dtype`, and no parameter. It lies as `original`'s."""
        for call in before_decoding:
            call()
        note_read(self)
        rows, columns = self.fp8_shape
        values = self.quantized.dequantize(rows, columns).to(self.weight_dtype)
        values = values.t() if self.weight_is_transposed else values
        values._fp8_data = self.fp8_data  # type: ignore[attr-defined]
        return values

    @weight.setter
    def weight(self, values: torch.Tensor) -> None:
        # peft sets what it looked up, when it takes adapters away
        if getattr(values, "_fp8_data", None) is not self.fp8_data:
            self.hold_cast_of(as_matrix([values.detach()], self.weight_is_transposed))

    @property
    def fp8_weight(self) -> FrozenWeight:  # type: ignore[override]
        """Return what gives the matrix."""
        return FrozenWeight(self.quantized)

    @property
    def product_features(self) -> tuple[int, int]:
        """As `FP8Layer.product_features`."""
        return self.fp8_shape[::-1]

    def fp8_product(self, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """As `FP8Layer.fp8_product`, for an input of any dtype, empty or not."""
        if not self.training:
            self.note_evaluation()
        stand_in = input.new_empty(()).expand(self.fp8_shape)  # it has no values where products ask for shapes alone
        check_operands(input, stand_in, bias)
        if input.numel() == 0:  # as of an expert without tokens, whatever dtype the others have
            return F.linear(input, stand_in, None if bias is None else bias.to(input.dtype))
        x = self.cast_input(input)
        return linear_from_quantized(input, stand_in, bias, x, self.quantized, self.fp8_casts)

    def cast_input(self, input: torch.Tensor) -> QuantizedMatrix:
        """Return what fprop reads of an input that is not empty; layers of one input share it."""
        config, rows = self.fp8_config, input.numel() // input.shape[-1]
        again = reusable(input, self.fp8_data)
        if not (again and rows in self.in_fp8):
            require_fp8(input.device, config.emulate, config.granularity)
        if again:
            self.in_fp8[rows] = True
        if self.input_amax is not None:
            return self.fp8_casts.quantize(INPUT, input, amax=self.input_amax)
        if again:
            return share_input(input, self.fp8_casts, reader=self, transposed=False)
        return self.fp8_casts.quantize(INPUT, input)

    @property
    def _has_fixed_scales(self) -> bool:
        """Tell whether the configuration gives the scales, whatever the tensors are."""
        return self.fp8_config.scaling.fixed_amax(INPUT, self.fp8_config.input_format) is not None

    def fp8_notes(self) -> str:
        """As `FP8Layer.fp8_notes`."""
        notes = ["weight kept in FP8 alone"]
        if self.input_amax is not None and not self._has_fixed_scales:
            notes.append("calibrated scales of inputs")
        if self._has_fixed_scales:
            notes.append(f"{self.fp8_config.scaling.name} scales")
        return "; ".join(filter(None, (*notes, super().fp8_notes())))

    def _start_frozen(self, config: FP8Config, dtype: torch.dtype) -> None:
        self.weight_dtype = dtype
        self.fp8_casts, self.in_fp8 = Casts(config), TokenCounts()
        self._forget_uses()
        self.register_parameter("input_amax", None)
        guard_saves()

    @torch.no_grad()
    def hold_cast_of(self, matrix: torch.Tensor, amax: torch.Tensor | None = None) -> None:
        """Keep the cast of a weight.

        Args:
            matrix: [output, input features].
            amax: float32 [], what one scale of the tensor comes from; None: the matrix's own. Constant scales and finer
                ones take none.
        """
        shape = matrix.shape[0], matrix.shape[1]
        config = self.fp8_config
        if config.finer_scales:
            amax = None
        if self._has_fixed_scales:
            amax, of_inputs = (
                torch.tensor(
                    config.scaling.fixed_amax(role, config.format_of[role]), dtype=torch.float32, device=matrix.device
                )
                for role in (WEIGHT, INPUT)
            )
            self.scale_inputs_by(of_inputs)
        if matrix.is_meta:
            self.hold(_nothing(shape, config, matrix.device), shape)
        else:
            self.hold(self.fp8_casts.quantize(WEIGHT, matrix, amax=amax), shape)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> FrozenLayer:
        kept = {id(self._parameters[name]) for name in _KEEP_TYPES}
        self.weight_dtype = fn(torch.empty(0, dtype=self.weight_dtype, device=self.fp8_data.device)).dtype

        def keeping_types(tensor: torch.Tensor) -> torch.Tensor:
            # as integers, which a change of dtype leaves alone and a move to another device does not
            return fn(tensor.view(torch.int32)).view(torch.float32) if id(tensor) in kept else fn(tensor)

        super()._apply(keeping_types, recurse)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        held: dict[str, Any] = {}
        super()._save_to_state_dict(held, prefix, keep_vars)
        del held[prefix + "fp8_data"], held[prefix + "fp8_inverse_scale"]
        rows, columns = self.fp8_shape
        quantized = self.quantized
        # whole: safetensors writes no part of a matrix
        destination[prefix + "weight"] = quantized.data[:rows, :columns].detach().contiguous()
        destination[prefix + SCALE] = stored_scale(quantized.inverse_scale, rows, columns).detach()
        destination.update(held)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        names = {prefix + "weight", prefix + SCALE}
        rest = {name: value for name, value in state_dict.items() if name not in names}
        # what is there now stands for what is missing: the keys below are none of a state dict
        there = {prefix + "fp8_data": self.fp8_data, prefix + "fp8_inverse_scale": self.fp8_inverse_scale}
        if self._has_fixed_scales and self.input_amax is not None:
            rest.setdefault(prefix + INPUT_AMAX, self.input_amax)  # which the configuration gives
        amax = state_dict.get(prefix + "input_amax")
        if amax is not None and self.input_amax is None:
            try:
                self.scale_inputs_by(torch.zeros_like(amax, device=self.fp8_data.device))
            except ValueError as error:
                error_msgs.append(f"{prefix}input_amax: {error}")
        weight, scale = (state_dict.get(prefix + name) for name in ("weight", SCALE))
        if weight is None:
            missing_keys.append(prefix + "weight")
        elif weight.dtype in FORMATS and scale is None:
            missing_keys.append(prefix + SCALE)
        elif (problem := self._load(weight, scale)) is not None:
            error_msgs.append(f"{prefix}weight: {problem}")
        else:
            there = {prefix + "fp8_data": self.fp8_data, prefix + "fp8_inverse_scale": self.fp8_inverse_scale}
        super()._load_from_state_dict(
            {**rest, **there}, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    @torch.no_grad()
    def _load(self, weight: torch.Tensor, scale: torch.Tensor | None) -> str | None:
        """Take the values of a state dict; returns why they do not fit."""
        rows, columns = self.fp8_shape
        device = weight.device if self.fp8_data.is_meta else self.fp8_data.device
        if weight.dtype in HIGH_PRECISION and scale is None:
            matrix = weight.t() if self.weight_is_transposed else weight
            if matrix.shape != self.fp8_shape:
                return f"it is {list(matrix.shape)}, and {[rows, columns]} here; load the state of the same model"
            self.hold_cast_of(matrix.to(device))
            return None
        held = _nothing(self.fp8_shape, self.fp8_config, device)
        expected = stored_scale(held.inverse_scale, rows, columns)
        if (weight.shape, weight.dtype) != (self.fp8_shape, self.fp8_config.weight_format):
            return (
                f"it is {weight.dtype} {list(weight.shape)}, and {self.fp8_config.weight_format} {[rows, columns]} "
                "here; load the state of a model that was quantized alike, or one in 16 bits"
            )
        if scale is None or scale.squeeze().shape != expected.squeeze().shape:
            has = None if scale is None else list(scale.shape)
            return f"its scales are {has}, and {list(expected.shape)} here; quantize with the same granularity"
        if (fault := stored_fault(weight, scale)) is not None:
            return f"{fault}; load a state that was saved whole"
        scale = scale.reshape(expected.shape)
        held.data.view(torch.uint8)[:rows, :columns] = weight.view(torch.uint8)
        if held.inverse_scale.dim() == 0:
            held.inverse_scale.copy_(scale)
        elif held.inverse_scale.dim() == 1:
            held.inverse_scale[:rows] = scale.flatten()
        else:
            held.inverse_scale[: scale.shape[0], : scale.shape[1]] = scale
        self.hold(held, self.fp8_shape)
        return None


class FrozenFP8Linear(FrozenLayer, FP8Linear):
    """A linear layer whose weight is kept in FP8 alone; see `FrozenLayer`.

    Args:
        in_features, out_features, bias, device: as in `nn.Linear`; weight and bias are zero until they are loaded.
        dtype: of the bias, and of what `weight` decodes.
        config: formats and scales; None is `FP8Config()`.
    """

    original = nn.Linear

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        config: FP8Config | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features
        zeros = torch.zeros(out_features, device=device, dtype=dtype)
        self.register_parameter("bias", nn.Parameter(zeros) if bias else None)
        self._start_frozen(FP8Config() if config is None else config, zeros.dtype)
        shape = (out_features, in_features)
        self.hold(_nothing(shape, self.fp8_config, zeros.device), shape)


def _nothing(shape: tuple[int, int], config: FP8Config, device: torch.device) -> QuantizedMatrix:
    """A weight of zeros, [output, input features], each scale one."""
    multiple = multiple_for(config.granularity)
    rows, columns = (aligned(size, multiple) for size in shape)
    of_scales = {"tensorwise": (), "rowwise": (rows,), "blockwise": scales_shape(rows, columns, square=True)}
    data = torch.zeros(rows, columns, dtype=torch.uint8, device=device).view(config.weight_format)
    scales = torch.ones(of_scales[config.granularity], dtype=torch.float32, device=device)
    if scales.dim() == 2:
        scales[:, columns // multiple :] = 0  # as `blockwise_cast` leaves them
    return QuantizedMatrix(data, data.new_empty(0), scales, None)
