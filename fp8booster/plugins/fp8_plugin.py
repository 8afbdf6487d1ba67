"""What the plugins have in common: their arguments, and boosting a model whose linear layers compute in FP8."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from colossalai.accelerator import get_accelerator
from colossalai.booster.plugin.plugin_base import Plugin
from colossalai.checkpoint_io import CheckpointIO
from colossalai.interface import ModelWrapper, OptimizerWrapper
from colossalai.logging import get_dist_logger
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from fp8booster.argument_types import wrong_type
from fp8booster.colossal.temporarily import temporarily
from fp8booster.colossal.zero.lone_save import saved_by_every_rank
from fp8booster.config import FP8Config, config_or_default
from fp8booster.kernels.device import require_fp8
from fp8booster.nn import convert_to_fp8, report
from fp8booster.nn.fused import fuse, fused_summary
from fp8booster.nn.graphs import capture_layers
from fp8booster.optim import AdamW
from fp8booster.plugins.parameters import require_parameters

_PRECISIONS = ("bf16", "fp16")

_WIDER_TYPES: Mapping[str, Any] = {
    **dict.fromkeys(("reduce_bucket_size_in_m", "zero_bucket_size_in_m"), float),
    **dict.fromkeys(("bucket_cap_mb", "ddp_bucket_cap_mb", "search_range_m"), float | None),
}
"""Types of arguments that Colossal-AI takes, where its annotations say int: a size of 2^20 may be a fraction of it."""

WITHOUT_FP8 = "Colossal-AI adds gradients up without fp8_communication; turn it on, or leave the option out"
"""Why `gradient_accumulation` has no effect with ZeRO."""


class FP8Plugin(Plugin):
    """A mixin before one of Colossal-AI's plugins, which takes every argument of it with its default.

    Without `use_fp8` it is that plugin.

    Args:
        use_fp8: run fprop, dgrad and wgrad of the linear layers that `fp8_config` names in FP8, with precision "bf16"
            or "fp16" where the plugin has one.
        fp8_communication: send in FP8 what the plugin says; None does so with `use_fp8`, unless
            `fp8_config.communication` is off. Without `use_fp8` it is Colossal-AI's own.
        fp8_config: which layers, which formats; None is `FP8Config()`.

    Raises:
        ValueError: `use_fp8` with precision "fp32", or, when boosting, on a GPU without FP8 products or with a model
            that has no layer for it.
        TypeError: an argument that Colossal-AI's plugin does not have, or of another type, or, when boosting, an
            optimizer that the engine cannot run.
    """

    native: ClassVar[type[Plugin]]
    """Colossal-AI's plugin, whose arguments and defaults this one has."""

    fp8_defaults: ClassVar[Mapping[str, Any]] = {}
    """Arguments that have another default where FP8 is communicated."""

    integer_steps: ClassVar[bool] = False
    """Colossal-AI's optimizer takes a state's `step` as an int alone."""

    no_effect: list[str]
    """Sentences about what `fp8_config` asks for and this plugin does not do, which are logged too."""

    sends_fp8: bool
    """Gradients, and what else ranks exchange, are communicated in FP8, by `fp8booster.comm`."""

    def __init__(self, *args: Any, fp8_config: FP8Config | None = None, **kwargs: Any) -> None:
        arguments = _bind(self.native, args, kwargs)
        self.require_support(arguments)
        self._require_types(arguments)
        use_fp8 = arguments.pop("use_fp8", False)
        communication = arguments.pop("fp8_communication", None)
        self.fp8_config = config_or_default(fp8_config, "fp8_config")
        precision = arguments.get("precision", "fp16")
        if use_fp8 and precision not in _PRECISIONS:
            raise ValueError(
                f"use_fp8 goes with precision {' or '.join(map(repr, _PRECISIONS))}, not {precision!r}: what is not in "
                "FP8 needs a 16-bit type"
            )
        if communication is None:
            communication = use_fp8 and self.fp8_config.communication
        self.sends_fp8 = bool(use_fp8 and communication)
        if self.sends_fp8:
            arguments = {**self.fp8_defaults, **arguments}
        # with use_fp8 off all is Colossal-AI's; with it on, its own FP8 stays off, since ours takes its place
        super().__init__(**arguments, fp8_communication=communication and not use_fp8)
        self.use_fp8 = use_fp8
        self.logger = get_dist_logger()
        self.no_effect = [] if fp8_config is None else self._find_no_effect(arguments)
        for sentence in self.no_effect:
            self.logger.warning(sentence, ranks=[0])

    def _require_types(self, arguments: Mapping[str, Any]) -> None:
        """Raise TypeError for an argument of the wrong type; without FP8, Colossal-AI's are left to it."""
        parameters = inspect.signature(self.native).parameters
        own = {"use_fp8": bool, "fp8_communication": bool | None}
        theirs = {}
        if arguments.get("use_fp8"):
            theirs = {name: _WIDER_TYPES.get(name, each.annotation) for name, each in parameters.items()}
        for name, hint in {**theirs, **own}.items():
            default = parameters[name].default if name in parameters else inspect.Parameter.empty
            if name in arguments and (wanted := wrong_type(arguments[name], hint, default)) is not None:
                raise TypeError(f"{self.native.__name__}'s {name} is {arguments[name]!r}; it must be {wanted}")

    def require_support(self, arguments: Mapping[str, Any]) -> None:
        """Raise ImportError where what is installed does not serve these arguments of the constructor."""

    def why_weights_in_16_bits(self, arguments: Mapping[str, Any]) -> str | None:
        """Why `FP8Config.weights_in_16_bits=False` has no effect, and what to do; None where it has.

        Args:
            arguments: of the constructor, as far as they were given.
        """
        raise NotImplementedError

    def why_scaled_by_block(self) -> str | None:
        """Whose gradients are scaled by block, whatever `gradient_scaling` is; None: they are scaled as it says."""
        return None

    def why_accumulates_by_itself(self) -> str | None:
        """Why `gradient_accumulation` has no effect, and what to do; None where it has."""
        return "this plugin's gradients add up as they are; use LowLevelZeroPlugin, or leave the option out"

    def why_no_update_in_backward(self) -> str | None:
        """Why an optimizer cannot update in backward, and what to do; None where it can."""
        return "this plugin updates when all gradients are reduced; use LowLevelZeroPlugin"

    def why_no_cuda_graphs(self) -> str | None:
        """Why `cuda_graphs` has no effect, and what to do; None where it has."""
        return None

    def trains_in_buffers(self) -> bool:
        """Whether trainable parameters lie one after the other in buffers, of which each rank has a part."""
        return False

    def reduces_sparse_gradients(self) -> bool:
        """Whether gradients may be sparse."""
        return False

    def _find_no_effect(self, arguments: Mapping[str, Any]) -> list[str]:
        """Return sentences about a configuration that nothing reads, and about options in it that do nothing."""
        scaling = self.fp8_config.gradient_scaling
        option = f'fp8_config.gradient_scaling="{scaling}" has no effect'
        warnings = []
        if not self.use_fp8:
            warnings = ["fp8_config has no effect: use_fp8 is off; give use_fp8=True, or leave fp8_config out"]
        else:
            reason = self.why_weights_in_16_bits(arguments)
            if reason is not None and self.fp8_config.weights_in_16_bits is False:
                warnings.append(f"fp8_config.weights_in_16_bits=False has no effect: {reason}")
            if scaling != "block" and not self.sends_fp8:
                warnings.append(
                    f"{option}: gradients are sent uncompressed without fp8_communication; turn it on, or leave the "
                    "option out"
                )
            elif scaling != "block" and (reason := self.why_scaled_by_block()) is not None:
                warnings.append(f"{option}: {reason} gradients are scaled by block")
            if self.fp8_config.cuda_graphs and (reason := self.why_no_cuda_graphs()) is not None:
                warnings.append(f"fp8_config.cuda_graphs=True has no effect: {reason}")
            accumulation = self.fp8_config.gradient_accumulation
            if accumulation != "32-bit" and (reason := self.why_accumulates_by_itself()) is not None:
                warnings.append(f'fp8_config.gradient_accumulation="{accumulation}" has no effect: {reason}')
        return warnings

    def __del__(self) -> None:
        """Destroy the process groups, where Colossal-AI's plugin does; one whose arguments were refused has none."""
        destroy = getattr(super(), "__del__", None)
        if destroy is not None and "pg_mesh" in vars(self):
            destroy()

    def configure(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable | None = None,
        dataloader: DataLoader | None = None,
        lr_scheduler: LRScheduler | None = None,
    ) -> tuple[nn.Module, OptimizerWrapper, Callable, DataLoader, LRScheduler]:
        """Wrap model and optimizer as Colossal-AI does, and turn the model's linear layers into FP8 layers in place."""
        of_user = optimizer
        if isinstance(of_user, AdamW) and of_user.updates_in_backward:
            self._require_update_in_backward(of_user)
        if self.use_fp8:
            boosted = self._configure_fp8(model, optimizer, criterion, dataloader, lr_scheduler)
        else:
            boosted = super().configure(model, optimizer, criterion, dataloader, lr_scheduler)
        if isinstance(of_user, AdamW):
            places, parameters = self.places(*boosted[:2]), self.parameters(*boosted[:2])
            of_user.train_for_engine(places, parameters, integer_steps=self.integer_steps)
        return boosted

    def _require_update_in_backward(self, optimizer: AdamW) -> None:
        reason = self.why_no_update_in_backward()
        if reason is None and optimizer.micro_batches > 1:
            reason = "ZeRO updates at every backward; make the optimizer with micro_batches=1"
        if reason is not None:
            raise ValueError(f"the optimizer was made with update_in_backward=True, and {reason}, or leave that out")

    def _configure_fp8(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        criterion: Callable | None,
        dataloader: DataLoader | None,
        lr_scheduler: LRScheduler | None,
    ) -> tuple[nn.Module, OptimizerWrapper, Callable, DataLoader, LRScheduler]:
        require_fp8(get_accelerator().get_current_device(), self.fp8_config.emulate, self.fp8_config.granularity)
        if optimizer is not None and not isinstance(model, ModelWrapper):
            require_parameters(model, in_buffers=self.trains_in_buffers(), sparse=self.reduces_sparse_gradients())
        moments = "; moments are kept in 8 bits" if isinstance(optimizer, AdamW) else ""
        model, optimizer = self.convert(model, optimizer)
        with temporarily(self, use_fp8=False):  # Colossal-AI would hook F.linear with its own FP8 product
            boosted = super().configure(model, optimizer, criterion, dataloader, lr_scheduler)
        sent = self.extend(*boosted[:2])
        if self.fp8_config.cuda_graphs is not False and self.why_no_cuda_graphs() is None:
            capture_layers(boosted[0], only_where_host_limits=self.fp8_config.cuda_graphs is None)
        fused = f"; {fused_summary(boosted[0])}" if self.fp8_config.fused else ""
        self.logger.info(f"{report(boosted[0]).summary()}{fused}; {sent}{moments}", ranks=[0])
        return boosted

    def convert(self, model: nn.Module, optimizer: Optimizer | None) -> tuple[nn.Module, Optimizer | None]:
        """What Colossal-AI is to wrap in place of a model and its optimizer: with FP8 layers, and fused."""
        convert_to_fp8(model, self.fp8_config)
        if self.fp8_config.fused:
            fuse(model)
        return model, optimizer

    def places(self, model: ModelWrapper, optimizer: OptimizerWrapper) -> dict[torch.Tensor, tuple[int, int]]:
        """Of each tensor that the optimizer inside updates on this rank: the number of its parameter, and of the part
        of it that the tensor is. What several ranks hold has the same on each.
        """
        tensors = [each for group in optimizer.optim.param_groups for each in group["params"]]
        return {each: (number, self.part_of(model, optimizer, each)) for number, each in enumerate(tensors)}

    def part_of(self, model: ModelWrapper, optimizer: OptimizerWrapper, tensor: torch.Tensor) -> int:
        """Which part of its parameter a tensor is; 0 for a whole one."""
        return 0

    def parameters(self, model: ModelWrapper, optimizer: OptimizerWrapper) -> dict[torch.Tensor, torch.Tensor]:
        """The model's parameter of each tensor that the optimizer inside updates in its place."""
        of: dict[int, torch.Tensor] = getattr(optimizer, "get_master_to_working_map", dict)() or {}
        tensors = (each for group in optimizer.optim.param_groups for each in group["params"])
        return {each: of[id(each)] for each in tensors if id(each) in of}

    def extend(self, model: ModelWrapper, optimizer: OptimizerWrapper | None) -> str:
        """Let what Colossal-AI has wrapped communicate in FP8; returns what is sent in which precision."""
        raise NotImplementedError

    def get_checkpoint_io(self) -> CheckpointIO:
        """Colossal-AI's, which notices a model that rank 0 saves alone where all ranks must."""
        return saved_by_every_rank(super().get_checkpoint_io())


def _bind(native: type[Plugin], positional: tuple, named: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call to a plugin's constructor, by name, as far as they were given.

    Raises:
        TypeError: an argument that the plugin does not have; the message names close matches.
    """
    signature = inspect.signature(native)
    parameters = list(signature.parameters.values())
    if "use_fp8" not in signature.parameters:
        parameters.append(inspect.Parameter("use_fp8", inspect.Parameter.KEYWORD_ONLY, default=False))
    theirs = list(signature.parameters)
    ours = [name for name in ("use_fp8", "fp8_config") if name not in theirs]
    for name in named:
        if name not in theirs + ours:
            close = difflib.get_close_matches(name, theirs + ours, n=3)
            all_of_them = f"it takes {', '.join(theirs)} and {' and '.join(ours)}"
            hint = f"did you mean {' or '.join(close)}?" if close else all_of_them
            raise TypeError(f"{native.__name__} has no argument {name!r}; {hint}")
    return dict(signature.replace(parameters=parameters).bind(*positional, **named).arguments)


def why_zero_gathers_16_bits(plugin: FP8Plugin, needs: Mapping[str, bool]) -> str | None:
    """Why ZeRO gathers every weight in 16 bits, and what to do; None where it gathers those of FP8 layers in FP8.

    Args:
        plugin: that has ZeRO.
        needs: by what the plugin would have to be given, whether it was.
    """
    if not plugin.sends_fp8:
        return "weights are gathered in 16 bits without fp8_communication; turn it on, or leave the option out"
    if plugin.fp8_config.finer_scales is not None:
        granularity = plugin.fp8_config.granularity
        return (
            f'weights are gathered in 16 bits with granularity="{granularity}"; use "tensorwise", or leave the option '
            "out"
        )
    lacking = next((argument for argument, given in needs.items() if not given), None)
    if lacking is None:
        return None
    return f"no weight is gathered in FP8 but with {lacking}; give that, or leave the option out"
