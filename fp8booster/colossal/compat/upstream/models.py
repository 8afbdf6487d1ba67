"""Patches of single models: OPT, T5, Command-R and Mixtral."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from fp8booster.colossal.compat.registry import wrap
from fp8booster.colossal.temporarily import temporarily


@wrap("shardformer.modeling.opt:get_opt_flash_attention_forward", "548", needed_when="OPT with enable_flash_attention")
def opt_attention_takes_positions(upstream: Callable, shard_config: Any) -> Callable:
    """OPT's flash attention takes the positions that transformers' layers give, and needs none.

    Without it: TypeError: forward() got an unexpected keyword argument 'position_ids', and then 'cache_position'.
    """
    attention = upstream(shard_config)

    @functools.wraps(attention)
    def forward(*args: Any, position_ids: Any = None, cache_position: Any = None, **kwargs: Any) -> Any:
        # positions were embedded before the first layer, and caches are for generation
        return attention(*args, **kwargs)

    return forward


@wrap(
    "shardformer.policies.opt:OPTPolicy.module_policy",
    "55",
    needed_when='OPT with transformers\' "sdpa" attention, its default',
)
def opt_is_sharded_with_any_attention(upstream: Callable, self: Any) -> dict[Any, Any]:
    """OPT is sharded whichever attention of transformers it has.

    Without it: KeyError: 'sdpa'.
    """
    from transformers.models.opt import modeling_opt

    attention, config = getattr(modeling_opt, "OPTSdpaAttention", None), self.model.config
    if attention is None or config._attn_implementation != "sdpa":
        return upstream(self)
    with temporarily(config, _attn_implementation="eager"):
        policy = upstream(self)
    if modeling_opt.OPTAttention in policy:
        policy[attention] = policy.pop(modeling_opt.OPTAttention)
    return policy


@wrap(
    "shardformer.modeling.t5:T5PipelineForwards.t5_stack_forward",
    "260",
    needed_when="T5's encoder or decoder lies on two or more stages of a pipeline",
)
def t5_stages_return_all_gradients(upstream: Callable, *args: Any, **kwargs: Any) -> Any:
    """Stages of T5 go backward through all that they sent: position biases and the encoder's output too.

    Without it they go through `hidden_states` alone: the table of relative positions learns from the first stage's
    layers only, and the encoder from the first of the decoder's stages.
    """
    output = upstream(*args, **kwargs)
    if type(output) is dict:
        # the schedule then takes whatever the next stage has a gradient for
        output.pop("backward_tensor_keys", None)
    return output


@wrap(
    "shardformer.modeling.t5:T5PipelineForwards.t5_stack_forward",
    "141,149",
    needed_when="T5's decoder lies on two or more stages of a pipeline",
)
def t5_decoders_go_on_in_later_stages(upstream: Callable, *args: Any, **kwargs: Any) -> Any:
    """Later stages of T5's decoder make their masks from hidden states.

    Without it: AttributeError: 'NoneType' object has no attribute 'device' (or 'dtype', where a mask is given), and
    the stages before wait for ever.
    """
    given = inspect.signature(upstream).bind(*args, **kwargs).arguments
    starts = (0, given["decoder_starting_stage"])
    if given["stage_manager"].stage not in starts and given.get("inputs_embeds") is None:
        # upstream reads device and dtype of it there, and nothing else
        given["inputs_embeds"] = given["hidden_states"]
    return upstream(**given)


@wrap(
    "shardformer.policies.command:CommandPolicy.preprocess",
    "shardformer/modeling/command.py:395",
    needed_when="enable_flash_attention is off",
)
def command_prepares_masks_for_its_attention(upstream: Callable, self: Any) -> nn.Module:
    """Command-R's policy switches flash attention on before the first forward, as its attention does within it.

    Without it: AssertionError: Flash Attention Error: attention_mask should be a dict.
    """
    self.shard_config.enable_flash_attention = True
    return upstream(self)


@wrap(
    "shardformer.policies.command:CommandPolicy.postprocess",
    "275",
    needed_when='Command-R with sequence_parallelism_mode "split_gather" or "ring"',
)
def norms_of_command_are_added_up(upstream: Callable, self: Any) -> Any:
    """Command-R's norms, of which each rank sees its part of the sequence, get the whole gradient.

    Without it each rank trains its copy by the tokens that it holds, and the copies diverge.
    """
    from colossalai.shardformer.layer.utils import SeqParallelUtils, is_share_sp_tp

    model = upstream(self)
    if is_share_sp_tp(self.shard_config.sequence_parallelism_mode):
        for name, norm in model.named_modules():
            if name.rpartition(".")[2] in ("input_layernorm", "norm"):
                for parameter in norm.parameters():
                    SeqParallelUtils.marked_as_sp_partial_derived_param(parameter)
    return model


@wrap(
    "shardformer.policies.mixtral:MixtralPolicy.module_policy",
    "shardformer/modeling/mixtral.py:675,783",
    needed_when="a Mixtral with enable_sequence_parallelism",
)
def mixtral_along_a_sequence_is_refused(upstream: Callable, self: Any) -> dict:
    """Sequence parallelism is refused for Mixtral when the model is boosted.

    Without it every forward raises AttributeError: 'MixtralModel' object has no attribute '_attn_implementation', and
    behind that heads and tokens change places on the way to attention.
    """
    if self.shard_config.enable_sequence_parallelism:
        raise ValueError(
            "colossalai's sequence parallelism does not run a Mixtral; leave enable_sequence_parallelism out, and use "
            "tensor, pipeline or expert parallelism"
        )
    return upstream(self)
