"""`GeminiPlugin` (ZeRO stage 3 by chunks, with offload and tensor parallelism) with FP8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from colossalai.accelerator import get_accelerator
from colossalai.booster.plugin import GeminiPlugin as NativeGeminiPlugin
from colossalai.booster.plugin.gemini_plugin import get_param_info
from colossalai.interface import ModelWrapper, OptimizerWrapper
from colossalai.shardformer import ShardFormer
from colossalai.zero import GeminiOptimizer
from colossalai.zero.gemini.gemini_optimizer import _AVAIL_OPTIM_LIST
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from fp8booster.colossal.gemini.model import FP8GeminiDDP, GatheringGeminiDDP
from fp8booster.colossal.gemini.optimizer import FP8GeminiOptimizer
from fp8booster.colossal.sharding import require_sharding
from fp8booster.config import FP8Config
from fp8booster.kernels.device import require_fp8
from fp8booster.nn import convert_to_fp8, report
from fp8booster.nn.fused import fuse, fused_summary
from fp8booster.optim import HybridAdam
from fp8booster.plugins.arguments import bind, require_16_bits, require_config, warn_of_no_effect


class GeminiPlugin(NativeGeminiPlugin):
    """Colossal-AI's GeminiPlugin, where `use_fp8=True` runs the products of linear layers in FP8.

    Takes every argument of the native plugin with the native default. Without `use_fp8` it is the native plugin, but
    that it takes `torch.optim.Adam` and `AdamW` too, which it turns into `fp8booster.optim.HybridAdam` in place;
    native takes only optimizers that need compiled extensions.

    With `use_fp8` and `fp8_communication` the weights of FP8 layers lie in chunks of FP8, one byte a value: no 16-bit
    copy of them exists, on the wire or in memory. Vectors (norms' weights, biases) stay gathered. With
    `FP8Config.fused` these chunks hold q, k and v, and gate and up, together: they are as large as those need, where
    that is more than `min_chunk_size_m` and `chunk_config_dict` ask for.

    Args:
        use_fp8: run fprop, dgrad and wgrad of the layers that `fp8_config` names in FP8.
        fp8_communication: gather the weights of FP8 layers, and reduce all gradients, in FP8; None does so with
            `use_fp8`, unless `fp8_config.communication` is off.
        fp8_config: which layers, which formats; None is `FP8Config()`.

    Raises:
        ValueError: when boosting with `use_fp8`, on a GPU without FP8 products or with a model that has no layer for
            it.
        TypeError: an argument that the native plugin does not have, an `fp8_config` of another type, or, when boosting,
            an optimizer that is no Adam.
        ImportError: `tp_size` above 1 and a transformers whose models Colossal-AI cannot shard.
    """

    def __init__(self, *args: Any, fp8_config: FP8Config | None = None, **kwargs: Any) -> None:
        arguments = bind(NativeGeminiPlugin, args, kwargs)
        if arguments.get("tp_size", 1) > 1 and arguments.get("custom_policy") is None:
            require_sharding(f"GeminiPlugin with tp_size={arguments['tp_size']}")
        use_fp8 = arguments.pop("use_fp8", False)
        communication = arguments.pop("fp8_communication", None)
        self.fp8_config = require_config(fp8_config)
        if use_fp8:
            require_16_bits(arguments.get("precision", "fp16"))
        if communication is None:
            communication = use_fp8 and self.fp8_config.communication
        self.fp8_communication = communication
        # with use_fp8 off all is native's; with it on, native's own FP8 stays off, since ours takes its place
        super().__init__(**arguments, fp8_communication=communication and not use_fp8)
        self.use_fp8 = use_fp8
        warn_of_no_effect(self.logger, fp8_config, use_fp8, communication, self._why_weights_stay())
        if use_fp8 and communication and self.fp8_config.gradient_scaling == "auto":
            self.logger.warning(
                'gradient_scaling="auto" has no effect: Gemini\'s gradients are scaled by block', ranks=[0]
            )

    def _why_weights_stay(self) -> str:
        """Why `FP8Config.weights_in_16_bits=False` changes nothing, and what to do."""
        if self.fp8_communication:
            return "Gemini's chunks hold the weights of FP8 layers in FP8 alone by themselves; leave the option out"
        return "without fp8_communication chunks hold weights in 16 bits; turn it on, and they hold FP8 alone"

    def __del__(self) -> None:
        """Destroy the process groups."""
        if hasattr(self, "pg_mesh"):  # not where the constructor raised
            super().__del__()

    def configure(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable | None = None,
        dataloader: DataLoader | None = None,
        lr_scheduler: LRScheduler | None = None,
    ) -> tuple[nn.Module, OptimizerWrapper, Callable, DataLoader, LRScheduler]:
        """Wrap model and optimizer for Gemini, after turning the model's linear layers into FP8 layers in place."""
        if optimizer is not None and not isinstance(optimizer, OptimizerWrapper):
            self._adapt(optimizer)
        if self.use_fp8:
            parameters = get_param_info(optimizer)  # before their shapes change
            if not isinstance(model, ModelWrapper):
                model = self._wrap(model)
            if optimizer is not None and not isinstance(optimizer, OptimizerWrapper):
                optimizer = self._wrap_optimizer(optimizer, model, parameters)
        return super().configure(model, optimizer, criterion, dataloader, lr_scheduler)

    def _adapt(self, optimizer: Optimizer) -> None:
        """Make the user's optimizer one that Gemini accepts, in place."""
        if type(optimizer) not in _AVAIL_OPTIM_LIST:
            name = type(optimizer).__name__
            HybridAdam.convert_in_place(optimizer)
            self.logger.info(
                f"{name} steps as fp8booster.optim.HybridAdam, with its hyperparameters: Gemini's shards need "
                "an optimizer that takes 16-bit gradients",
                ranks=[0],
            )

    def _wrap(self, model: nn.Module) -> nn.Module:
        require_fp8(get_accelerator().get_current_device(), self.fp8_config.emulate)
        if self.enable_tensor_parallelism:
            # knows all kinds of sharded layers; only this way of training needs it
            from fp8booster.colossal.tensor import compress_groups, convert_sharded_to_fp8, fuse_sharded

            if self.fp8_communication:
                compress_groups(self.tp_group)
            if self.enable_sequence_parallelism:
                # native names no group, and then shardformer finds that there is none
                self.shard_config.sequence_parallel_process_group = self.tp_group
                self.shard_config._sequence_parallel_size = self.tp_size
            model, _ = ShardFormer(self.shard_config).optimize(model)
            convert_sharded_to_fp8(model, self.fp8_config, communication=self.fp8_communication)
            if self.fp8_config.fused:
                fuse_sharded(model, self.shard_config)
        else:
            convert_to_fp8(model, self.fp8_config)
            if self.fp8_config.fused:
                fuse(model)
        arguments = self.gemini_config | {
            "zero_group": self.zero_group,
            "extra_dp_group": self.extra_dp_group,
            "tp_group": self.tp_group,
            "verbose": self.verbose,
        }
        if self.fp8_communication:
            wrapped = FP8GeminiDDP(model, self.fp8_config, **arguments)
            wire = "gradients travel in FP8, and {} of {} weights".format(*wrapped.count_weights())
        else:
            wrapped = GatheringGeminiDDP(model, **arguments)
            wire = "gradients and weights travel in 16 bits"
        fused = f"; {fused_summary(model)}" if self.fp8_config.fused else ""
        self.logger.info(f"{report(wrapped).summary()}{fused}; {wire}", ranks=[0])
        return wrapped

    def _wrap_optimizer(self, optimizer: Optimizer, model: nn.Module, parameters: dict[str, Any]) -> GeminiOptimizer:
        wrapper = FP8GeminiOptimizer if isinstance(model, FP8GeminiDDP) else GeminiOptimizer
        return wrapper(
            optimizer,
            model,
            **self.zero_optim_config,
            **self.optim_kwargs,
            tp_group=self.tp_group,
            params_info=parameters,
            verbose=self.verbose,
        )
