"""`GeminiPlugin` (ZeRO stage 3 by chunks, with offload and tensor parallelism) with FP8."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from colossalai.booster import plugin
from colossalai.booster.plugin.gemini_plugin import get_param_info
from colossalai.interface import ModelWrapper, OptimizerWrapper
from colossalai.shardformer import ShardFormer
from colossalai.zero import GeminiOptimizer
from colossalai.zero.gemini.gemini_optimizer import _AVAIL_OPTIM_LIST
from torch import nn
from torch.optim import Optimizer

from fp8booster.colossal.gemini.model import FP8GeminiDDP, GatheringGeminiDDP
from fp8booster.colossal.gemini.optimizer import FP8GeminiOptimizer
from fp8booster.colossal.sharding import require_sharding
from fp8booster.engine import BY_BLOCK, Engine
from fp8booster.optim import HybridAdam
from fp8booster.plugins.fp8_plugin import FP8Plugin


class GeminiPlugin(FP8Plugin, plugin.GeminiPlugin):
    """Colossal-AI's GeminiPlugin, where `use_fp8=True` runs the products of linear layers in FP8.

    It takes `torch.optim.Adam` and `AdamW` too, which it turns into `fp8booster.optim.HybridAdam` in place;
    Colossal-AI's takes only optimizers that need compiled extensions.

    With `use_fp8` and `fp8_communication` the weights of FP8 layers lie in chunks of FP8, one byte a value: no 16-bit
    copy of them exists, on the wire or in memory. Vectors (norms' weights, biases) stay gathered. With
    `FP8Config.fused` these chunks hold q, k and v, and gate and up, together: they are as large as those need, where
    that is more than `min_chunk_size_m` and `chunk_config_dict` ask for.

    Arguments are those of `FP8Plugin`, of which `fp8_communication` gathers the weights of FP8 layers, and reduces all
    gradients, in FP8.

    Raises:
        TypeError: when boosting, an optimizer that is no Adam.
        ImportError: `tp_size` above 1 and a transformers whose models Colossal-AI cannot shard.
    """

    native = plugin.GeminiPlugin
    integer_steps = True

    def require_support(self, arguments: Mapping[str, Any]) -> None:
        # only tensor parallelism shards models
        if arguments.get("tp_size", 1) > 1 and arguments.get("custom_policy") is None:
            require_sharding(f"GeminiPlugin with tp_size={arguments['tp_size']}")

    def find_engine(self, arguments: Mapping[str, Any]) -> Engine:
        alone = "Gemini's chunks hold the weights of FP8 layers in FP8 alone by themselves; leave the option out"
        plain = "without fp8_communication chunks hold weights in 16 bits; turn it on for FP8 alone, or leave it out"
        return Engine(
            high_precision_weights=alone if self.sends_fp8 else plain,
            # a rank holds frozen weights whole, outside chunks, and their FP8 copies stay
            transposes="Gemini keeps no transposes of weights that train; leave the option out, unless some are frozen",
            automatic_scaling=f"Gemini's {BY_BLOCK}",
            cuda_graphs="Gemini moves weights from chunk to chunk; use LowLevelZeroPlugin, or leave the option out",
            in_buffers=True,
        )

    def configure(self, model: nn.Module, optimizer: Optimizer | None = None, *others: Any, **named: Any) -> tuple:
        """Wrap model and optimizer for Gemini; with `use_fp8`, the model's linear layers are FP8 layers then."""
        is_own = isinstance(optimizer, OptimizerWrapper) or type(optimizer) in _AVAIL_OPTIM_LIST
        if optimizer is not None and not is_own:
            name = type(optimizer).__name__
            # in place: a learning rate schedule that was made before boosting goes on with the same object
            HybridAdam.convert_in_place(optimizer)
            self.logger.info(
                f"{name} steps as fp8booster.optim.HybridAdam, with its hyperparameters: Gemini's shards need "
                "an optimizer that takes 16-bit gradients",
                ranks=[0],
            )
        return super().configure(model, optimizer, *others, **named)

    def convert(self, model: nn.Module, optimizer: Optimizer | None) -> tuple[nn.Module, Optimizer | None]:
        """Return the model with FP8 layers, and the optimizer, in wrappers of their own, unless they are wrapped."""
        parameters = get_param_info(optimizer)  # before their shapes change
        common = {"tp_group": self.tp_group, "verbose": self.verbose}
        if not isinstance(model, ModelWrapper):
            # shardformer replaces layers, so those of a sharded model are converted behind it
            if self.enable_tensor_parallelism:
                self._shard(model)
            else:
                super().convert(model, None)
            groups = {"zero_group": self.zero_group, "extra_dp_group": self.extra_dp_group}
            arguments = {**self.gemini_config, **groups, **common}
            if self.sends_fp8:
                model = FP8GeminiDDP(model, self.fp8_config, **arguments)
            else:
                model = GatheringGeminiDDP(model, **arguments)
        # behind the model: the optimizer takes its shards from the chunks of the wrapped one
        if optimizer is not None and not isinstance(optimizer, OptimizerWrapper):
            wrapper = FP8GeminiOptimizer if isinstance(model, FP8GeminiDDP) else GeminiOptimizer
            arguments = {**self.zero_optim_config, **self.optim_kwargs, **common}
            optimizer = wrapper(optimizer, model, **arguments, params_info=parameters)
        return model, optimizer

    def _shard(self, model: nn.Module) -> None:
        # knows all kinds of sharded layers; only this way of training needs it
        from fp8booster.colossal.tensor import compress_groups, convert_sharded_to_fp8, fuse_sharded

        if self.sends_fp8:
            compress_groups(self.tp_group, encoding=self.encoding)
        if self.enable_sequence_parallelism:
            # Colossal-AI names no group, and then shardformer finds that there is none
            self.shard_config.sequence_parallel_process_group = self.tp_group
            self.shard_config._sequence_parallel_size = self.tp_size
        ShardFormer(self.shard_config).optimize(model)
        convert_sharded_to_fp8(model, self.fp8_config, communication=self.sends_fp8)
        if self.fp8_config.fused:
            fuse_sharded(model, self.shard_config)

    def places(self, model: ModelWrapper, optimizer: GeminiOptimizer) -> dict[torch.Tensor, tuple[int, int]]:
        # a rank has no tensor for parameters that lie in other ranks' shards
        chunks = {shard: optimizer.param_to_chunk16[shard] for shard in optimizer.id_to_fake_params.values()}
        return {
            shard: (number, 0 if chunks[shard].keep_gathered else chunks[shard].pg_rank)
            for number, shard in optimizer.id_to_fake_params.items()
        }

    def parameters(self, model: ModelWrapper, optimizer: GeminiOptimizer) -> dict[torch.Tensor, torch.Tensor]:
        return {shard: optimizer.id_to_real_params[number] for number, shard in optimizer.id_to_fake_params.items()}

    def extend(self, model: ModelWrapper, optimizer: OptimizerWrapper | None) -> str:
        if not isinstance(model, FP8GeminiDDP):
            return "gradients and weights are sent in 16 bits"
        return "gradients are sent in FP8, and {} of {} weights".format(*model.count_weights())
