"""The forward of a sharded model's body, between embedding and head: all of its layers, or those of a pipeline's stage.

Colossal-AI 0.5.0 writes it once for each family, pipeline and kind of attention, in the words of transformers 4.51.
This one is for LLaMA, Mistral, Qwen2 and Mixtral, and for transformers 4.51 as for 5, which differ in

                                  4.51                                5
    the causal mask is made by    the body, `_update_causal_mask`     `masking_utils`, one for each kind of layer
    a layer is checkpointed by    the body                            itself
    a layer returns               a tuple                             the hidden states
    its cache is called           past_key_value                      past_key_values; cache since 5.24
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from colossalai.pipeline.stage_manager import PipelineStageManager
from colossalai.shardformer.layer import ColoAttention, RingAttention
from colossalai.shardformer.layer._operation import gather_sp_output, split_forward_gather_backward
from colossalai.shardformer.layer.utils import is_share_sp_tp, split_batch_zigzag
from colossalai.shardformer.shard import ShardConfig
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast, MoeModelOutputWithPast

from fp8booster.colossal.temporarily import temporarily
from fp8booster.nn.fused.caches import CACHES

Masks = list[Any]
"""The mask that each layer's attention is given."""


def body_forward(
    self: Any,
    input_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    past_key_values: Any = None,
    inputs_embeds: torch.Tensor | None = None,
    *,
    cache: Any = None,
    shard_config: ShardConfig,
    stage_manager: PipelineStageManager | None = None,
    stage_index: list[int] | None = None,
    hidden_states: torch.Tensor | None = None,
    gathers_sequence: bool = True,
    output_attentions: bool | None = None,
    output_hidden_states: bool | None = None,
    **_: Any,
) -> BaseModelOutputWithPast | dict[str, torch.Tensor]:
    """Run a body that shardformer has sharded, in place of its own forward.

    Args:
        self: the body: `embed_tokens`, `layers`, `norm` and `rotary_emb`.
        input_ids: [B, S]; or `inputs_embeds`, [B, S, H]. A later stage reads neither.
        attention_mask: [B, S], 0 for padding; None where there is none.
        position_ids: [1 or B, S]; None: tokens are counted.
        past_key_values: a cache, where neither flash attention nor a pipeline is; or `cache`, as 5.24 calls it.
        shard_config: by which the model was sharded.
        stage_manager: of the pipeline; None without one.
        stage_index: this stage's layers, first and last + 1.
        hidden_states: [B, S', H], from the stage before: this rank's part of the sequence.
        gathers_sequence: the last stage gives whole sequences, also where a loss over their parts would do.
        _: what changes nothing here: no cache is made for `use_cache`, and it always returns a dictionary.

    Returns:
        Of the last stage [B, S or S', H] in `last_hidden_state`; of others the message to the next.

    Raises:
        ValueError: for tokens that are not there or there twice, and for what a sharded model does not give.
    """
    name = type(self).__name__
    past_key_values = cache if past_key_values is None else past_key_values
    # refused before the first message: other stages would wait for it
    if output_attentions or (output_hidden_states and stage_manager is not None):
        raise ValueError(f"a sharded {name} gives no attention weights, and in a pipeline no layer's hidden states")
    if past_key_values is not None and (shard_config.enable_flash_attention or stage_manager is not None):
        raise ValueError(f"a sharded {name} keeps no keys and values here; give use_cache=False")
    is_first = stage_manager is None or stage_manager.is_first_stage()
    if is_first:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError(f"{name} takes either input_ids or inputs_embeds")
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds

    first, last = (0, len(self.layers)) if stage_manager is None else stage_index
    layers = self.layers[first:last]
    prepare = _ring if shard_config.sequence_parallelism_mode == "ring_attn" else _whole_sequences
    hidden_states, position_ids, masks = prepare(
        self, hidden_states, attention_mask, position_ids, past_key_values, shard_config, is_first
    )
    # once for all layers, as transformers' bodies do: only the places of tokens matter
    angles = self.rotary_emb(hidden_states, position_ids)
    checkpointed = _checkpointed_layers(self, len(layers), shard_config, stage_manager)
    seen: tuple[torch.Tensor, ...] = ()
    for index, layer in enumerate(layers):
        if output_hidden_states:
            seen += (hidden_states,)
        arguments = {
            "attention_mask": masks[first + index],
            "position_ids": position_ids,
            "position_embeddings": angles,
        }
        if past_key_values is not None:
            arguments |= {
                _cache_name(layer): past_key_values,
                "use_cache": True,
                "cache_position": _places(past_key_values, position_ids),
            }
        hidden_states = _run(self, layer, hidden_states, arguments, checkpoint=index < checkpointed)

    if stage_manager is not None and not stage_manager.is_last_stage():
        return {"hidden_states": hidden_states}
    hidden_states = self.norm(hidden_states)
    along = shard_config.enable_sequence_parallelism
    # a head that is spread over the ranks of the sequence reads all of it; others may compute the loss of a part
    shares_ranks = is_share_sp_tp(shard_config.sequence_parallelism_mode)
    if along and (gathers_sequence or not shard_config.parallel_output or shares_ranks):
        hidden_states = gather_sp_output(hidden_states, shard_config)
    return BaseModelOutputWithPast(
        last_hidden_state=hidden_states,
        past_key_values=past_key_values,
        hidden_states=(*seen, hidden_states) if output_hidden_states else None,
    )


def mixtral_body_forward(
    self: Any,
    *args: Any,
    output_router_logits: bool | None = None,
    past_router_logits: tuple[torch.Tensor, ...] | None = None,
    stage_index: list[int] | None = None,
    **kwargs: Any,
) -> MoeModelOutputWithPast | dict[str, Any]:
    """Run `body_forward` of a Mixtral, which gives the logits of its routers too.

    Args:
        self, args, stage_index, kwargs: as in `body_forward`.
        output_router_logits: give the logits of each layer's router, [B S, experts]; None: as the config says.
        past_router_logits: of the layers of stages before.
    """
    if output_router_logits is None:
        output_router_logits = self.config.output_router_logits
    logits = list(past_router_logits or ())
    first, last = stage_index or (0, len(self.layers))
    with ExitStack() as hooks:
        for layer in self.layers[first:last] if output_router_logits else ():
            # a layer of transformers 5 returns its hidden states alone
            handle = layer.mlp.gate.register_forward_hook(lambda _, __, output: logits.append(output))
            hooks.callback(handle.remove)
        made = body_forward(self, *args, stage_index=stage_index, **kwargs)
    if isinstance(made, dict) and not hasattr(made, "last_hidden_state"):
        return made | {"past_router_logits": tuple(logits)} if output_router_logits else made
    return MoeModelOutputWithPast(**made, router_logits=tuple(logits) if output_router_logits else None)


def _ring(
    self: Any,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    _: Any,
    config: ShardConfig,
    is_first: bool,
) -> tuple[torch.Tensor, torch.Tensor, Masks]:
    """Return this rank's part of a sequence, the places of its tokens in the whole one, and `RingAttention`'s masks.

    Each rank has a part of the sequence's beginning and one of its end, and padding lies at the end.
    """
    group = config.sequence_parallel_process_group
    if attention_mask is None:
        batch, length = hidden_states.shape[:2]
        length *= 1 if is_first else config.sequence_parallel_size
        attention_mask = torch.ones(batch, length, dtype=torch.bool, device=hidden_states.device)
    if position_ids is None:
        position_ids = torch.arange(attention_mask.shape[1], dtype=torch.int64, device=hidden_states.device)[None]
    prepare = RingAttention.prepare_varlen_batch
    if not is_first:
        position_ids, mask, _ = prepare(attention_mask, group, position_ids.expand(attention_mask.shape))
    elif attention_mask.bool().all():
        _, mask, _ = prepare(attention_mask, group)
        hidden_states, position_ids = split_batch_zigzag([hidden_states, position_ids], group)
    else:
        hidden_states, mask, position_ids = prepare(attention_mask, group, hidden_states, position_ids)
    return hidden_states, position_ids, [mask] * len(self.layers)


def _whole_sequences(
    self: Any,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    past_key_values: Any,
    config: ShardConfig,
    is_first: bool,
) -> tuple[torch.Tensor, torch.Tensor, Masks]:
    """Return the same where an attention sees whole sequences: positions and masks are theirs."""
    batch, length = hidden_states.shape[:2]
    along = config.enable_sequence_parallelism
    if along and not is_first:
        length *= config.sequence_parallel_size
    if position_ids is None:
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        position_ids = torch.arange(past, past + length, dtype=torch.int64, device=hidden_states.device).unsqueeze(0)
    if config.enable_flash_attention:
        mask = ColoAttention.prepare_attn_kwargs(
            (batch, 1, length, length),
            hidden_states.dtype,
            hidden_states.device,
            q_padding_mask=attention_mask,
            is_causal=True,
        )
        masks = [mask] * len(self.layers)
    else:
        masks = _masks(self, hidden_states, attention_mask, position_ids, past_key_values)
    if along and is_first:
        mode, group = config.sequence_parallelism_mode, config.sequence_parallel_process_group
        # under all_to_all gradients are averaged over its ranks later
        scale = None if is_share_sp_tp(mode) else 1 / config.sequence_parallel_size
        hidden_states = split_forward_gather_backward(
            hidden_states, 1, group, scale, fp8_communication=config.fp8_communication
        )
    return hidden_states, position_ids, masks


def _is_of_4_51(body: Any) -> bool:
    return hasattr(body, "_update_causal_mask")


def _masks(
    self: Any,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor,
    past_key_values: Any,
) -> Masks:
    """Return the masks that transformers makes for its own attentions."""
    config, count = self.config, len(self.layers)
    places = _places(past_key_values, position_ids)
    if _is_of_4_51(self):
        return [self._update_causal_mask(attention_mask, hidden_states, places, past_key_values, False)] * count
    from transformers import masking_utils

    makers: dict[str, Callable] = {
        "full_attention": masking_utils.create_causal_mask,
        "sliding_attention": masking_utils.create_sliding_window_causal_mask,
    }
    windowed = getattr(config, "sliding_window", None) is not None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if windowed else "full_attention"] * count
    known = {
        "config": config,
        "input_embeds": hidden_states,  # as 5.0 calls them
        "inputs_embeds": hidden_states,
        "attention_mask": attention_mask,
        "cache_position": places,  # 5.0 asks for it
        "past_key_values": past_key_values,
        "cache": past_key_values,  # as 5.24 calls it
        "position_ids": position_ids,
    }
    made = {}
    # one for each kind and not for each layer: a mask may be [S, S]
    for kind in dict.fromkeys(kinds):
        taken = inspect.signature(makers[kind]).parameters
        made[kind] = makers[kind](**{name: value for name, value in known.items() if name in taken})
    return [made[kind] for kind in kinds]


def _cache_name(layer: nn.Module) -> str:
    """Return what a layer, as transformers wrote it or with mixins before that, calls the cache that it is given."""
    forwards = [vars(cls)["forward"] for cls in type(layer).__mro__ if "forward" in vars(cls)]
    taken = {name for forward in forwards for name in inspect.signature(forward).parameters}
    return next((name for name in CACHES if name in taken), CACHES[0])


def _places(past_key_values: Any, position_ids: torch.Tensor) -> torch.Tensor:
    """Return the places of the tokens behind those of a cache, which the newest layers do not ask for."""
    past = 0 if past_key_values is None else past_key_values.get_seq_length()
    return torch.arange(past, past + position_ids.shape[-1], dtype=torch.int64, device=position_ids.device)


def _checkpointed_layers(self: Any, layers: int, config: ShardConfig, stage: PipelineStageManager | None) -> int:
    """Return the number of a stage's layers, from the first on, whose activations backward computes again."""
    if not (self.gradient_checkpointing and self.training):
        return 0
    if stage is None or config.gradient_checkpoint_config is None:
        return layers
    return config.gradient_checkpoint_config.get_num_ckpt_layers(
        stage=stage.stage,
        num_stages=stage.num_stages,
        num_layers=layers,
        model_chunk_id=stage.model_chunk_id if stage.is_interleave else 0,
        num_model_chunks=stage.num_model_chunks,
    )


def _run(
    self: Any, layer: nn.Module, hidden_states: torch.Tensor, arguments: dict[str, Any], *, checkpoint: bool
) -> torch.Tensor:
    """Return the hidden states that a layer makes, [B, S', H]."""
    # layers of transformers 5 checkpoint themselves, by an attribute that has to be off for layers that are not to
    if not hasattr(layer, "gradient_checkpointing"):
        call = partial(layer, **arguments)
        made = self._gradient_checkpointing_func(call, hidden_states) if checkpoint else call(hidden_states)
    elif checkpoint:
        made = layer(hidden_states, **arguments)
    else:
        with temporarily(layer, gradient_checkpointing=False):
            made = layer(hidden_states, **arguments)
    return made[0] if isinstance(made, tuple) else made
