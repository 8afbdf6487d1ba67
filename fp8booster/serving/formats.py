"""Forms in which checkpoints hold weights in FP8: their tensors, and the `quantization_config` of config.json.

fine-grained        `FineGrainedFP8Config` of transformers, as DeepSeek-V3 (arXiv 2412.19437) and Qwen3-FP8 ship
compressed-tensors  `float-quantized` of the compressed-tensors package, which vLLM and SGLang read
tensorwise          `FineGrainedFP8Config` without blocks

In all of them FP8 values are multiplied by their scale: it is the inverse scale of the cast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fp8booster.config import FP8Config
from fp8booster.formats import E4M3, FORMATS, stored_fault
from fp8booster.kernels.alignment import BLOCK
from fp8booster.scaling import WEIGHT, RealTime
from fp8booster.tensor import stored_scale


@dataclass(frozen=True)
class CheckpointFormat:
    """One form in which a checkpoint holds the weights of linear layers in E4M3."""

    granularity: str
    """As in `FP8Config`."""
    compressed: bool
    """Whether it is one of compressed-tensors."""

    @property
    def scale_name(self) -> str:
        """Return the name of the scale's tensor in a layer that has `weight`."""
        return "weight_scale" if self.compressed else "weight_scale_inv"

    @property
    def shape_of_one(self) -> tuple[int, ...]:
        """Return the shape of the scale's tensor where a weight has one scale."""
        return (1,) if self.compressed else ()

    def settings(self, kept: Sequence[str]) -> dict[str, Any]:
        """Return the `quantization_config` of a checkpoint.

        Args:
            kept: names of the linear layers that stay in 16 bits.
        """
        if not self.compressed:
            return {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [BLOCK, BLOCK] if self.granularity == "blockwise" else None,
                "modules_to_not_convert": list(kept),
            }
        fp8 = {"num_bits": 8, "type": "float", "symmetric": True}
        strategy = {"rowwise": "channel", "tensorwise": "tensor"}[self.granularity]
        group = {
            "targets": ["Linear"],
            "weights": {**fp8, "strategy": strategy, "dynamic": False},
            "input_activations": {**fp8, "strategy": "token", "dynamic": True},
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": list(kept),
        }

    def power_of_two(self, config: FP8Config) -> bool:
        """Tell whether scales are powers of two: as in training where that has these scales, else by default."""
        same = config.granularity == self.granularity
        return (config.scaling if same else RealTime(self.granularity)).power_of_two

    def cast(
        self, weight: torch.Tensor, *, power_of_two: bool, amax: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cast a weight as training casts it, to FP8 values, [N, K], and their inverse scale.

        Args:
            weight: [N, K], BF16, FP16 or FP32.
            power_of_two: round scales down to powers of two.
            amax: float32, for one scale a tensor: that of the weights that share it.

        Returns:
            the values, and float32 scales: [] tensorwise, [N, 1] rowwise, [ceil(N / 128), ceil(K / 128)] blockwise.
        """
        rows, columns = weight.shape
        made = RealTime(self.granularity, power_of_two).cast(WEIGHT, weight, E4M3, amax=amax)
        # products read matrices padded to multiples of 16 or 128, and engines pad by themselves
        return made.data[:rows, :columns].contiguous(), stored_scale(made.inverse_scale, rows, columns)


CHECKPOINT_FORMATS = {
    "fine-grained": CheckpointFormat("blockwise", compressed=False),
    "compressed-tensors": CheckpointFormat("rowwise", compressed=True),
    "compressed-tensors-tensorwise": CheckpointFormat("tensorwise", compressed=True),
    "tensorwise": CheckpointFormat("tensorwise", compressed=False),
}
"""By the values of `fp8booster export --format`."""

IN_16_BITS = "bf16"
"""The format without FP8."""

SCALES = ("_scale_inv", "_scale")
"""Ends of names of scales, behind those of their weights."""

UNUSED_SCALES = ("input_scale", "activation_scale", "k_scale", "v_scale")
"""Ends of names of scales of activations, which training makes itself."""

_READ = "fp8booster reads FP8 of quant_method fp8 and of compressed-tensors' float-quantized"


def block_of(settings: Any, file: str) -> tuple[int, int] | None:
    """Return the rows and columns of a block, by the `quantization_config` in a file; None: there are no blocks.

    Raises:
        ValueError: its weights are not in FP8, or are in FP8 in a form that is not known.
    """
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    if method == "fp8":
        return _block(settings.get("weight_block_size"), file)
    if method != "compressed-tensors":
        raise ValueError(f"{file} says quant_method {method!r}; {_READ}: give a model in one of them, or in 16 bits.")
    groups = settings.get("config_groups")
    weights: list[Any] = [
        group.get("weights") if isinstance(group, dict) else None for group in (groups or {}).values()
    ]
    for each in weights:
        if not isinstance(each, dict) or (each.get("num_bits"), each.get("type")) != (8, "float"):
            raise ValueError(f"{file} has weights that are not in FP8 ({each}); {_READ}: give such a model.")
    # groups may list layers apart and still have blocks of one size
    blocks = {_block(each.get("block_structure"), file) for each in weights}
    if len(blocks) != 1:
        raise ValueError(f"{file} has {len(blocks)} sizes of blocks; give a model with one.")
    return blocks.pop()


def granularity_of(weight: tuple[int, ...], scale: tuple[int, ...], block: tuple[int, int] | None) -> str | None:
    """Return the granularity of a weight, (N, K), by the shape of its scale and the blocks; None: of none."""
    rows, columns = weight
    if scale in ((), (1,)):
        return "tensorwise"
    # with blocks, [N, 1] are scales of blocks of one row
    if scale in ((rows,), (rows, 1)) and block is None:
        return "rowwise"
    if block == (BLOCK, BLOCK) and scale == (-(-rows // BLOCK), -(-columns // BLOCK)):
        return "blockwise"
    return None


def _block(value: Any, file: str) -> tuple[int, int] | None:
    if value is None:
        return None
    if not (isinstance(value, list) and len(value) == 2 and all(type(size) is int and size > 0 for size in value)):
        raise ValueError(f"{file} has blocks of {value!r}; they must be two whole numbers above 0, as [128, 128].")
    return value[0], value[1]


def require_finite(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor. Raises ValueError, with its name, unless it is finite."""
    if not bool(tensor.isfinite().all()):
        raise ValueError(f"{name} holds values that are not finite; give an earlier checkpoint.")
    return tensor


def require_stored(data: torch.Tensor, scale: torch.Tensor, name: str) -> None:
    """Raise ValueError unless a weight is in FP8 and finite, and its scales are finite numbers above 0."""
    if data.dtype not in FORMATS or not scale.is_floating_point():
        raise ValueError(f"{name} is {data.dtype} with scales of {scale.dtype}; copy the model again, or give another.")
    # a NaN or a scale of zero would show as bad text much later
    if fault := stored_fault(data, scale):
        raise ValueError(f"{name} is damaged: {fault}; copy the model again, or give another.")


def decode(data: torch.Tensor, scale: torch.Tensor, block: tuple[int, int] | None, name: str) -> torch.Tensor:
    """Return the values of a weight, in FP32.

    Args:
        data: [..., N, K] FP8.
        scale: one value; [..., N, 1] or [N]; or, of blocks, [..., ceil(N / block[0]), ceil(K / block[1])].
        block: from `block_of`.
        name: of the weight, for errors.

    Raises:
        ValueError: the scale has another shape or type, `data` is not in FP8, or one of both is not finite.
    """
    require_stored(data, scale, name)
    # torch multiplies no FP8 values, and a product in 16 bits would round once more
    values, scale = data.float(), scale.float()
    *_, rows, columns = data.shape
    if scale.numel() == 1:
        return values * scale.reshape(())
    # a vector of a square weight would multiply its columns
    if scale.shape == (rows,):
        scale = scale[:, None]
    if block is not None and scale.shape == (*data.shape[:-2], -(-rows // block[0]), -(-columns // block[1])):
        scale = scale.repeat_interleave(block[0], -2)[..., :rows, :]
        scale = scale.repeat_interleave(block[1], -1)[..., :columns]
    elif scale.shape != (*data.shape[:-1], 1):
        raise ValueError(
            f"{name} is {list(data.shape)} and its scales are {list(scale.shape)}, which do not fit the blocks that "
            f"config.json has ({block}); copy the model again, or give another."
        )
    return values * scale
