"""Patches of single models: the forwards of bodies, with transformers 4.51 and 5, policies, and expert blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from torch import nn

from fp8booster.colossal.compat.layers import add_up_along_a_sequence
from fp8booster.colossal.compat.registry import Replacements, by_name, patch, refuse, wrap
from fp8booster.colossal.sharding import is_transformers_5, why_model_is_not_sharded
from fp8booster.colossal.temporarily import temporarily

_MIXTRAL = "transformers >= 5, and a Mixtral"


def _body_forward(*args: Any, **kwargs: Any) -> Any:
    from fp8booster.colossal.tensor.body import body_forward  # it imports modules that are patched

    for name in ("force_sp_gather", "force_sp_output_gather"):  # LLaMA's, and Qwen2's
        if name in kwargs:
            kwargs["gathers_sequence"] = kwargs.pop(name)
    return body_forward(*args, **kwargs)


def _have_one_body(
    family: str, lines: str, needed_when: str, without: str, forward: str, maker: str | None = None
) -> None:
    """Register a patch that replaces a family's forward of a stage, and what makes one for a whole body."""

    def run(upstream: Callable, *args: Any, **kwargs: Any) -> Any:
        return _body_forward(*args, **kwargs)

    def make(upstream: Callable, shard_config: Any, *_: Any, **__: Any) -> Callable:
        return partial(_body_forward, shard_config=shard_config)

    def repair(module: ModuleType, replacements: Replacements) -> None:
        replacements.wrap(module, forward, run)
        if maker is not None:
            replacements.wrap(module, maker, make)

    repair.__name__ = f"{family}_has_one_body"
    repair.__doc__ = f"Without it {without}."
    patch(f"shardformer.modeling.{family}", lines, needed_when)(repair)


_have_one_body(
    "llama",
    "101,127,178",
    'transformers >= 5, and sequence_parallelism_mode="ring_attn" in a pipeline',
    "AttributeError: 'LlamaModel' object has no attribute '_update_causal_mask', or layers take the first sequence of "
    "their input for all of it; and in later stages of a pipeline each rank of a ring takes its tokens for the first "
    "of the sequence",
    "LlamaPipelineForwards.llama_model_forward",
)
_have_one_body(
    "mistral",
    "62,104,371",
    "transformers >= 5, inputs_embeds in a pipeline, and gradient checkpointing of flash attention",
    "AttributeError: 'MistralModel' object has no attribute '_update_causal_mask'; TypeError where a pipeline is given "
    "inputs_embeds; and no layer is checkpointed with enable_flash_attention and no pipeline",
    "MistralForwards.mistral_model_forward",
    "get_mistral_model_forward_for_flash_attn",
)
_have_one_body(
    "qwen2",
    "148,211,236,688",
    "transformers >= 5, and a pipeline with sequences longer than a window that the config leaves out",
    "layers take the first sequence of their input for all of it; and in pipelines tokens attend in a window with "
    "use_sliding_window=False",
    "Qwen2PipelineForwards.qwen2_model_forward",
    "get_qwen2_model_forward_for_flash_attn",
)


@refuse(
    "shardformer.shard.shardformer:ShardFormer.optimize",
    "shardformer/shard/sharder.py:27; shardformer/modeling/command.py:12, vit.py:6, ...",
    "transformers >= 5, and a model of a family that is not sharded with it",
    error=ImportError,
    only_if=lambda module: why_model_is_not_sharded("", "") is not None,
)
def models_that_are_not_sharded_are_refused(given: dict[str, Any]) -> str | None:
    """Without it forwards that were written for transformers 4.51 fail, or take the first sequence for all."""
    from colossalai.shardformer.policies.auto_policy import _POLICY_LIST, _fullname

    full_name = _fullname(given["model"])
    module, _, name = full_name.rpartition(".")
    if given.get("policy") is not None or _is_other_mixture(given["model"]):
        return None
    return why_model_is_not_sharded(module, name, full_name in _POLICY_LIST)


@wrap(
    "shardformer.policies.auto_policy:get_autopolicy",
    "258",
    "a Qwen3",
    only_if=lambda module: not any("qwen3" in name for name in module._POLICY_LIST),
)
def qwen3_has_a_policy(upstream: Callable, model: Any) -> Any:
    """Without it: NotImplementedError: Auto policy for Qwen3ForCausalLM is not implemented."""
    from colossalai.shardformer.policies.auto_policy import _fullname

    module, _, name = _fullname(model).rpartition(".")
    if module == "transformers.models.qwen3.modeling_qwen3":
        from fp8booster.colossal.tensor.qwen3 import POLICIES  # it imports modules that are patched

        if name in POLICIES:
            return POLICIES[name]()
    return upstream(model)


def _is_other_mixture(model: Any) -> bool:
    """Tell whether a model has experts that can be spread over ranks, and Colossal-AI has no policy for them."""
    from colossalai.shardformer.policies.auto_policy import _POLICY_LIST, _fullname

    from fp8booster.colossal.moe.mixtral import is_split
    from fp8booster.nn.experts.parallel import blocks_to_spread

    # a Mixtral of transformers 5 is split for what shards the rest of it
    has_policy = _fullname(model) in _POLICY_LIST and is_split(model)
    return not has_policy and bool(blocks_to_spread(model))


@wrap(
    "shardformer.policies.auto_policy:get_autopolicy",
    "258",
    "a mixture of experts but DeepSeek's own code and Mixtral of transformers 4: Qwen3-MoE, Qwen2-MoE, OLMoE, ...",
)
def mixtures_have_a_policy(upstream: Callable, model: Any) -> Any:
    """Without it: NotImplementedError: Auto policy for Qwen3MoeForCausalLM is not implemented."""
    if _is_other_mixture(model):
        from fp8booster.colossal.moe.policy import MixturePolicy  # it imports modules that are patched

        return MixturePolicy()
    return upstream(model)


def _has_whole_experts(module: ModuleType) -> bool:
    return is_transformers_5()


@wrap("shardformer.policies.mixtral:MixtralPolicy.module_policy", "133,182,214", _MIXTRAL, only_if=_has_whole_experts)
def mixtral_policies_know_the_block(upstream: Callable, self: Any) -> dict:
    """Without it: AttributeError: 'MixtralDecoderLayer' object has no attribute 'block_sparse_moe'."""
    from transformers.models.mixtral.modeling_mixtral import MixtralModel

    from fp8booster.colossal.moe.mixtral import is_split

    # asked before upstream's policy looks for experts that are modules
    if not is_split(self.model):
        raise ValueError(
            "this policy shards a Mixtral of transformers 5 with tp_size or pp_size above 1 alone, by "
            "HybridParallelPlugin or MoeHybridParallelPlugin; leave custom_policy out"
        )
    policy = upstream(self)
    for description in policy.values():
        for replacement in description.sub_module_replacement or ():
            # transformers 5 has given the block another name
            replacement.suffix = replacement.suffix.replace("block_sparse_moe", "mlp")
    if self.pipeline_stage_manager is None:
        self.append_or_create_method_replacement(
            description={"forward": partial(_mixtral_body_forward, shard_config=self.shard_config)},
            policy=policy,
            target_key=MixtralModel,
        )
    return policy


@functools.cache
def _unsharded() -> Any:
    from colossalai.shardformer.shard import ShardConfig

    return ShardConfig()


def _mixtral_body_forward(*args: Any, shard_config: Any = None, **kwargs: Any) -> Any:
    from fp8booster.colossal.tensor.body import mixtral_body_forward  # it imports modules that are patched

    # the policy gives none to a pipeline's stages, which have whole sequences
    return mixtral_body_forward(*args, shard_config=shard_config or _unsharded(), **kwargs)


@wrap(
    "shardformer.modeling.mixtral:MixtralPipelineForwards.mixtral_model_forward",
    "340,377",
    _MIXTRAL,
    only_if=_has_whole_experts,
)
def mixtral_has_one_body(upstream: Callable, *args: Any, **kwargs: Any) -> Any:
    """Without it: TypeError: MixtralDecoderLayer.forward() takes fewer positional arguments."""
    return _mixtral_body_forward(*args, **kwargs)


@wrap("shardformer.modeling.mixtral:EPMixtralSparseMoeBlock.forward", "214", _MIXTRAL, only_if=_has_whole_experts)
def mixtral_blocks_return_their_output(upstream: Callable, self: Any, hidden_states: Any) -> Any:
    """Without it: TypeError: unsupported operand type(s) for +: 'Tensor' and 'tuple'."""
    output, logits = upstream(self, hidden_states)
    return (output, logits) if getattr(self, "returns_logits", True) else output


@refuse(
    "shardformer.policies.mixtral:MixtralPolicy.module_policy",
    "shardformer/modeling/mixtral.py:675,783",
    "a Mixtral with enable_sequence_parallelism",
)
def mixtral_along_a_sequence_is_refused(given: dict[str, Any]) -> str | None:
    """Without it every forward raises AttributeError: 'MixtralModel' object has no attribute '_attn_implementation',
    and behind that heads and tokens change places on the way to attention.
    """
    if not given["self"].shard_config.enable_sequence_parallelism:
        return None
    return (
        "colossalai's sequence parallelism does not run a Mixtral; leave enable_sequence_parallelism out, and use "
        "tensor, pipeline or expert parallelism"
    )


@wrap("shardformer.modeling.opt:get_opt_flash_attention_forward", "548", "OPT with enable_flash_attention")
def opt_attention_takes_positions(upstream: Callable, shard_config: Any) -> Callable:
    """Without it: TypeError: forward() got an unexpected keyword argument 'position_ids', and then 'cache_position'."""
    attention = upstream(shard_config)

    @functools.wraps(attention)
    def forward(*args: Any, position_ids: Any = None, cache_position: Any = None, **kwargs: Any) -> Any:
        # positions were embedded before the first layer, and caches are for generation
        return attention(*args, **kwargs)

    return forward


@wrap("shardformer.policies.opt:OPTPolicy.module_policy", "55", 'OPT with transformers\' "sdpa" attention, its default')
def opt_is_sharded_with_any_attention(upstream: Callable, self: Any) -> dict[Any, Any]:
    """Without it: KeyError: 'sdpa'."""
    from transformers.models.opt import modeling_opt

    attention, config = getattr(modeling_opt, "OPTSdpaAttention", None), self.model.config
    if attention is None or config._attn_implementation != "sdpa":
        return upstream(self)
    with temporarily(config, _attn_implementation="eager"):
        policy = upstream(self)
    if modeling_opt.OPTAttention in policy:
        # policies are looked up by class, and the "sdpa" one has the same parts
        policy[attention] = policy.pop(modeling_opt.OPTAttention)
    return policy


_T5_STACK = "shardformer.modeling.t5:T5PipelineForwards.t5_stack_forward"


@wrap(_T5_STACK, "260", "T5's encoder or decoder lies on two or more stages of a pipeline")
def t5_stages_return_all_gradients(upstream: Callable, *args: Any, **kwargs: Any) -> Any:
    """Without it stages of T5 go backward through `hidden_states` alone: the table of relative positions learns from
    the first stage's layers only, and the encoder from the first of the decoder's stages.
    """
    output = upstream(*args, **kwargs)
    if type(output) is dict:
        # the schedule then takes whatever the next stage has a gradient for
        output.pop("backward_tensor_keys", None)
    return output


@wrap(_T5_STACK, "141,149", "T5's decoder lies on two or more stages of a pipeline")
@by_name
def t5_decoders_go_on_in_later_stages(call: Callable[[], Any], given: dict[str, Any]) -> Any:
    """Without it: AttributeError: 'NoneType' object has no attribute 'device' (or 'dtype', where a mask is given), and
    the stages before wait for ever.
    """
    starts = (0, given["decoder_starting_stage"])
    if given["stage_manager"].stage not in starts and given.get("inputs_embeds") is None:
        # upstream reads device and dtype of it there, and nothing else
        given["inputs_embeds"] = given["hidden_states"]
    return call()


@wrap(
    "shardformer.policies.command:CommandPolicy.preprocess",
    "shardformer/modeling/command.py:395",
    "enable_flash_attention is off",
)
def command_prepares_masks_for_its_attention(upstream: Callable, self: Any) -> nn.Module:
    """Without it: AssertionError: Flash Attention Error: attention_mask should be a dict."""
    # its attention is ColoAttention in any case, which takes no other masks
    self.shard_config.enable_flash_attention = True
    return upstream(self)


@wrap(
    "shardformer.policies.command:CommandPolicy.postprocess",
    "275",
    'Command-R with sequence_parallelism_mode "split_gather" or "ring"',
)
def norms_of_command_are_added_up(upstream: Callable, self: Any) -> Any:
    """Without it each rank trains its copy of the norms by the tokens that it holds, and the copies diverge."""
    model = upstream(self)
    for name, norm in model.named_modules():
        if name.rpartition(".")[2] in ("input_layernorm", "norm"):
            add_up_along_a_sequence(self.shard_config.sequence_parallelism_mode, *norm.parameters())
    return model
