"""The base of the plugins: their arguments, and boosting a model whose linear layers compute in FP8."""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
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
from fp8booster.comm import Encoding
from fp8booster.comm.threshold import use_links
from fp8booster.config import FP8Config, config_or_default
from fp8booster.engine import Engine
from fp8booster.kernels.device import require_fp8
from fp8booster.nn import convert_to_fp8, report
from fp8booster.nn.fused import fuse_blocks, fused_summary, leave_unfused, use_fused_loss
from fp8booster.nn.graphs import capture_as_configured
from fp8booster.optim import AdamW
from fp8booster.reading import first_of
from fp8booster.scaling.steps import note_step

_PRECISIONS = ("bf16", "fp16")

_WIDER_TYPES: Mapping[str, Any] = {
    **dict.fromkeys(("reduce_bucket_size_in_m", "zero_bucket_size_in_m"), float),
    **dict.fromkeys(("bucket_cap_mb", "ddp_bucket_cap_mb", "search_range_m"), float | None),
}
"""Types of arguments that Colossal-AI takes, where its annotations say int: a size of 2^20 may be a fraction of it."""


class FP8Plugin(Plugin):
    """A mixin before one of Colossal-AI's plugins, which takes every argument of it with its default.

    Without `use_fp8` it is that plugin.

    Args:
        use_fp8: run fprop, dgrad and wgrad of the linear layers that `fp8_config` names in FP8, with precision "bf16"
            or "fp16" where the plugin has one.
        fp8_communication: send in FP8 what the plugin says; None does so with `use_fp8`, unless
            `fp8_config.messages` is None. Without `use_fp8` it is Colossal-AI's own.
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
        # before Colossal-AI's constructor makes process groups, which an argument refused later would leave behind
        arguments = _checked_arguments(self.native, args, kwargs)
        self.require_support(arguments)
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
            communication = use_fp8 and self.fp8_config.messages is not None
        self.sends_fp8 = bool(use_fp8 and communication)
        if self.sends_fp8:
            # what the user gave wins, also where it is Colossal-AI's own default
            arguments = {**self.fp8_defaults, **arguments}
        # with use_fp8 off all is Colossal-AI's; with it on, its own FP8 stays off, since ours takes its place
        try:
            super().__init__(**arguments, fp8_communication=communication and not use_fp8)
        except AssertionError as error:
            if not dist.is_initialized():
                raise RuntimeError(str(error)) from error  # it names the call that must come first
            raise ValueError(
                f"{type(self).__name__} does not take these arguments on {dist.get_world_size()} ranks, says "
                f"Colossal-AI: {error or 'it gives no reason'}; give others, or start as many ranks as they need"
            ) from error
        self.use_fp8 = use_fp8
        self.logger = get_dist_logger()
        self.engine = self.find_engine(arguments)
        self.no_effect = [] if fp8_config is None else self._find_no_effect()
        for sentence in self.no_effect:
            self.logger.warning(sentence, ranks=[0])
        if use_fp8:
            self.fp8_config = self.engine.used(self.fp8_config)

    def require_support(self, arguments: Mapping[str, Any]) -> None:
        """Raise ImportError where what is installed does not serve these arguments of the constructor."""

    def find_engine(self, arguments: Mapping[str, Any]) -> Engine:
        """Return the limits of the engine that Colossal-AI's constructor has prepared.

        Args:
            arguments: of the constructor, as far as they were given.
        """
        raise NotImplementedError

    def _find_no_effect(self) -> list[str]:
        if not self.use_fp8:
            return ["fp8_config has no effect: use_fp8 is off; give use_fp8=True, or leave fp8_config out"]
        messages = None
        if self.fp8_config.messages is None and self.sends_fp8:
            messages = "fp8_communication is on, and all is sent in FP8; leave one of the two out"
        elif self.fp8_config.messages is not None and not self.sends_fp8:
            messages = "gradients are sent uncompressed without fp8_communication; turn it on, or leave the option out"
        return replace(self.engine, messages=messages).no_effect(self.fp8_config, "fp8_config")

    @property
    def encoding(self) -> Encoding:
        """Return the encoding of gradients, activations and tokens that are sent in FP8."""
        return self.fp8_config.messages or Encoding()

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        """Destroy the process groups, where Colossal-AI's plugin does; one whose arguments were refused has none."""
        # a program that ends takes them with it, and what would destroy them may be gone already
        if ends() or not dist.is_initialized():
            return
        destroy = getattr(super(), "__del__", None)
        # Python calls this also where the constructor raised
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
        # held on to here, since boosting wraps it
        own = optimizer if isinstance(optimizer, AdamW) else None
        if own is not None and own.updates_in_backward:
            self._require_update_in_backward(own)
        others = criterion, dataloader, lr_scheduler
        if not self.use_fp8:
            boosted = super().configure(model, optimizer, *others)
        else:
            require_fp8(get_accelerator().get_current_device(), self.fp8_config.emulate, self.fp8_config.granularity)
            # before anything changes, and on every rank: one that failed later would leave the others waiting
            if not isinstance(model, ModelWrapper):
                if optimizer is not None:
                    require_parameters(model, in_buffers=self.engine.in_buffers, sparse=self.engine.sparse_gradients)
                if not self.fp8_config.fused:
                    leave_unfused(model)
            model, optimizer = self.convert(model, optimizer)
            with temporarily(self, use_fp8=False):  # Colossal-AI would hook F.linear with its own FP8 product
                boosted = super().configure(model, optimizer, *others)
            if optimizer is not None:
                note_step()  # it writes the weights, and its steps are seen: no backward need count as a change
            sent = self.extend(*boosted[:2])
            thresholds = f"; sizes from which FP8 is sent: {use_links().source}" if self.sends_fp8 else ""
            if self.engine.cuda_graphs is None:
                capture_as_configured(boosted[0], self.fp8_config)
            fused = f"; {fused_summary(boosted[0])}" if self.fp8_config.fused else ""
            moments = "; moments are kept in 8 bits" if own is not None else ""
            self.logger.info(f"{report(boosted[0]).summary()}{fused}; {sent}{thresholds}{moments}", ranks=[0])
        if own is not None:
            # what rounds at random must draw alike on ranks with copies, and differently on those with parts
            places, parameters = self.places(*boosted[:2]), self.parameters(*boosted[:2])
            own.train_for_engine(places, parameters, integer_steps=self.integer_steps)
        return boosted

    def _require_update_in_backward(self, optimizer: AdamW) -> None:
        reason = self.engine.update_in_backward
        if reason is None and optimizer.micro_batches > 1:
            reason = "ZeRO updates at every backward; make the optimizer with micro_batches=1"
        if reason is not None:
            raise ValueError(f"the optimizer was made with update_in_backward=True, and {reason}, or leave that out")

    def convert(self, model: nn.Module, optimizer: Optimizer | None) -> tuple[nn.Module, Optimizer | None]:
        """Return the model, with fused FP8 layers, and the optimizer for Colossal-AI to wrap."""
        # before Colossal-AI wraps the model: FSDP flattens parameters, whose shapes decide which layers are converted
        convert_to_fp8(model, self.fp8_config)
        if self.fp8_config.fused:
            # without `fuse`'s line: configure logs one of the boosted model, where engines have changed what is merged
            fuse_blocks(model)
            use_fused_loss(model)
        return model, optimizer

    def places(self, model: ModelWrapper, optimizer: OptimizerWrapper) -> dict[torch.Tensor, tuple[int, int]]:
        """Return the number of the parameter, and of the part of it, of each tensor that is updated on this rank.

        What several ranks hold has the same on each.
        """
        tensors = [each for group in optimizer.optim.param_groups for each in group["params"]]
        return {each: (number, self.part_of(model, optimizer, each)) for number, each in enumerate(tensors)}

    def part_of(self, model: ModelWrapper, optimizer: OptimizerWrapper, tensor: torch.Tensor) -> int:
        """Return the number of a tensor among the parts of its parameter; 0 for a whole one."""
        return 0

    def parameters(self, model: ModelWrapper, optimizer: OptimizerWrapper) -> dict[torch.Tensor, torch.Tensor]:
        """Return the model's parameter of each tensor that the optimizer inside updates in its place."""
        of: dict[int, torch.Tensor] = getattr(optimizer, "get_master_to_working_map", dict)() or {}
        tensors = (each for group in optimizer.optim.param_groups for each in group["params"])
        return {each: of[id(each)] for each in tensors if id(each) in of}

    def extend(self, model: ModelWrapper, optimizer: OptimizerWrapper | None) -> str:
        """Let the wrappers of Colossal-AI communicate in FP8, and return a clause on the precision of each message."""
        raise NotImplementedError

    def get_checkpoint_io(self) -> CheckpointIO:
        """Return Colossal-AI's, which notices a model that rank 0 saves alone where all ranks must."""
        return saved_by_every_rank(super().get_checkpoint_io())


def _checked_arguments(native: type[Plugin], positional: tuple, named: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call to a plugin's constructor, by name, as far as they were given.

    Raises:
        TypeError: an argument that the plugin does not have, where the message names close matches, or of another type;
            without FP8 the types of Colossal-AI's are left to it.
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
    arguments = dict(signature.replace(parameters=parameters).bind(*positional, **named).arguments)
    types: dict[str, Any] = {"use_fp8": bool, "fp8_communication": bool | None}
    if arguments.get("use_fp8"):
        annotated = {each.name: _WIDER_TYPES.get(each.name, each.annotation) for each in parameters}
        types = {**annotated, **types}
    defaults = {each.name: each.default for each in parameters}
    for name, value in arguments.items():
        wanted = wrong_type(value, types[name], defaults[name]) if name in types else None
        if wanted is not None:
            raise TypeError(f"{native.__name__}'s {name} is {value!r}; it must be {wanted}")
    return arguments


def require_parameters(model: nn.Module, *, in_buffers: bool, sparse: bool) -> None:
    """Raise ValueError where a model has parameters that cannot be trained, on every rank that has the same model.

    Without it one rank fails while it boosts, or all do in backward, and others wait for ever for what it would send.

    Args:
        model: not wrapped yet.
        in_buffers: the engine lays trainable parameters one after the other, and gives each rank a part of them.
        sparse: it reduces sparse gradients.
    """
    every = dict(model.named_parameters())
    trained = {name: each for name, each in every.items() if each.requires_grad and in_buffers}
    tables = [
        name
        for name, each in model.named_modules()
        if isinstance(each, (nn.Embedding, nn.EmbeddingBag)) and each.sparse and each.weight.requires_grad
    ]
    refused = {
        "are complex, and casts to 16 bits drop the imaginary part; hold their real and imaginary parts as one real "
        "parameter (torch.view_as_real)": [name for name, each in every.items() if each.is_complex()],
        "have no values, of which no rank can hold a part; delete them, or freeze them by requires_grad_(False)": [
            name for name, each in trained.items() if not each.numel()
        ],
        "are not contiguous, as channels-last weights are, and ZeRO and Gemini copy them into one buffer; call "
        "model.to(memory_format=torch.contiguous_format), or .contiguous() on what is transposed": [
            name for name, each in trained.items() if each.numel() and not each.is_contiguous()
        ],
        "have sparse gradients, which are not reduced here; make them with sparse=False": [] if sparse else tables,
    }
    for reason, names in refused.items():
        if names:
            raise ValueError(f"some of the model's parameters or tables {reason}: {first_of(names)}")


def zero_engine(
    plugin: FP8Plugin, needs: Mapping[str, bool], *, gradient_accumulation: str | None = None, **limits: Any
) -> Engine:
    """Return the limits of ZeRO's engine, which gathers weights and adds gradients up in FP8 where all else allows it.

    Args:
        plugin: that has ZeRO.
        needs: by argument without which ZeRO gathers no weight in FP8, whether the plugin was given it.
        gradient_accumulation, limits: fields of `Engine`.
    """
    lacking = next((argument for argument, given in needs.items() if not given), None)
    weights = None
    if not plugin.sends_fp8:
        weights = "weights are gathered in 16 bits without fp8_communication; turn it on, or leave the option out"
        gradient_accumulation = (
            "Colossal-AI adds gradients up without fp8_communication; turn it on, or leave the option out"
        )
    elif plugin.fp8_config.finer_scales is not None:
        granularity = f'scaling="{plugin.fp8_config.scaling.name}"'
        weights = f'weights are gathered in 16 bits with {granularity}; use "tensorwise", or leave the option out'
    elif lacking is not None:
        weights = f"no weight is gathered in FP8 but with {lacking}; give that, or leave the option out"
    return Engine(high_precision_weights=weights, gradient_accumulation=gradient_accumulation, **limits)
