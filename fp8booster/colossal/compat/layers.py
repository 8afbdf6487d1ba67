"""Patches of shardformer's layers, of what ranks gather, reduce and send between them, and of the loss.

Over the groups given to `compress_groups` they send FP8 by `fp8booster.comm`; for all other groups Colossal-AI's
functions stay what they are, so that one of its plugins with `fp8_communication=True` is not changed. The layers that
compute in FP8 do not come here; these are the operations of the others.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from fp8booster.colossal.compat.registry import Kind, Replacements, arguments_of, patch, wrap
from fp8booster.colossal.compressed_groups import encoding_of


def _over_compressed_group(arguments: dict[str, Any]) -> bool:
    return encoding_of(arguments.get("group") or arguments.get("process_group")) is not None


def _send_fp8(upstream: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    given = arguments_of(upstream, args, kwargs).arguments  # callers name the group or give it by place
    if not _over_compressed_group(given):
        return upstream(*args, **kwargs)
    from fp8booster.colossal.tensor import operations  # it imports the module that is patched

    return getattr(operations, upstream.__name__)(**given)


@wrap(
    "quantization.fp8:all_reduce_fp8 reduce_scatter_fp8 all_gather_fp8 all_to_all_fp8 all_to_all_single_fp8",
    "187,258,401,648,680",
    "ranks of tensor, sequence or expert parallelism send FP8",
    kind=Kind.FP8,
)
def collectives_send_fp8(upstream: Callable, *args: Any, **kwargs: Any) -> Any:
    """Without it the sums are never compressed, and the rest is only between nodes, with one scale for all of a
    message. No longer needed when shardformer takes its collectives from an argument.
    """
    return _send_fp8(upstream, args, kwargs)


@wrap(
    "shardformer.layer._operation:_reduce _gather _all_to_all _all_to_all_single",
    "1179,1211,1253,1263",
    "a policy or a mode of sequence parallelism does not pass fp8_communication on, as GPT-2's",
    kind=Kind.FP8,
)
def operations_ask_for_fp8(upstream: Callable, *args: Any, **kwargs: Any) -> Any:
    """Without it activations are sent in 16 bits where their caller leaves `fp8_communication` out. No longer needed
    when every model's policy passes it on.
    """
    given = arguments_of(upstream, args, kwargs)
    if _over_compressed_group(given.arguments):
        given.arguments["fp8_communication"] = True
    return upstream(*given.args, **given.kwargs)


@wrap(
    "shardformer.layer._operation:_reduce",
    "119",
    "fp8_communication=True, or use_fp8, with layers of a sharded GPT-2 that stay in 16 bits",
)
def conv1d_names_the_group(upstream: Callable, *args: Any, **kwargs: Any) -> Any:
    """Without it backward raises TypeError: _reduce() got an unexpected keyword argument 'group'."""
    if "group" in kwargs:
        kwargs["process_group"] = kwargs.pop("group")
    return upstream(*args, **kwargs)


@wrap(
    "shardformer.layer._operation:gather_forward_split_backward linear_gather_forward_reducescatter_backward "
    "linear_reducescatter_forward_gather_backward matmul_gather_forward_reducescatter_backward",
    "585,770,1358",
    "layers along a sequence stay in 16 bits, or a head gathers its logits",
    kind=Kind.FP8,
)
def sequences_are_sent_in_fp8(upstream: Callable, *args: Any, **kwargs: Any) -> Any:
    """Without it linear layers along a sequence send 16 bits, and logits that a head gathers are rounded. No longer
    needed when `linear_gather_forward_reducescatter_backward` takes `fp8_communication`.
    """
    return _send_fp8(upstream, args, kwargs)


@wrap(
    "shardformer.layer._operation:_ring_as_gather",
    "483",
    'sequence_parallelism_mode="ring"',
    only_if=lambda module: "input_tensors" in module._ring_as_gather.__code__.co_varnames,
)
def ring_gathers_what_others_hold(
    upstream: Callable,
    func: Any,
    input_to_gather: dict[str, torch.Tensor],
    input_local: dict[str, torch.Tensor],
    process_group: dist.ProcessGroup | None = None,
    gather_dim: int = 1,
    keep_item: bool = False,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Without it the gathered input holds this rank's part in other ranks' places, and weight gradients of column
    parallel layers are wrong.
    """
    inputs: list[dict[str, torch.Tensor]] = []

    def apply(**tensors: torch.Tensor) -> torch.Tensor:
        # copies: the ring receives the next part into memory that held an earlier one
        inputs.append({name: tensors[name].clone() for name in input_to_gather})
        return func(**tensors)

    output, _ = upstream(apply, input_to_gather, input_local, process_group, gather_dim, keep_item)
    # the first is this rank's, and the next ranks' follow
    ranks, rank = dist.get_world_size(process_group), dist.get_rank(process_group)
    in_order = [inputs[(index - rank) % ranks] for index in range(ranks)]
    return output, {name: torch.cat([part[name] for part in in_order], gather_dim) for name in input_to_gather}


def add_up_along_a_sequence(mode: str | None, *parameters: torch.Tensor | None) -> None:
    """Let the ranks of tensor parallelism add up the gradients of parameters, of which each finds a part in `mode`."""
    from colossalai.shardformer.layer.utils import SeqParallelUtils, is_share_sp_tp

    for parameter in parameters:
        if parameter is not None and is_share_sp_tp(mode):
            SeqParallelUtils.marked_as_sp_partial_derived_param(parameter)


def _with_whole_bias(upstream: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
    """Without it each rank trains its copy of the bias by the tokens that it holds, and the copies diverge."""
    upstream(self, *args, **kwargs)
    add_up_along_a_sequence(self.seq_parallel_mode, self.bias)


for _name, _where, _lines in (
    ("biases_along_a_sequence_are_added_up", "linear:Linear1D_Row.__init__", "477"),
    (
        "biases_of_fused_layers_are_added_up",
        "qkv_fused_linear:FusedLinear1D_Row.__init__ GPT2FusedLinearConv1D_Row.__init__",
        "521,1086",
    ),
):
    wrap(
        f"shardformer.layer.{_where}",
        _lines,
        'sequence_parallelism_mode is "split_gather" or "ring", and a row parallel layer has a bias, as GPT-2\'s',
        name=_name,
    )(_with_whole_bias)


@patch("shardformer.layer.normalization", "333,275", "enable_fused_normalization and apex is not installed")
def norms_are_fused_where_apex_is(module: ModuleType, replacements: Replacements) -> None:
    """Without it: TypeError: 'NoneType' object is not callable, NameError: FusedLayerNormWithHook, or norms whose
    gradients the ranks of split_gather do not add up.
    """
    for fused, plain in (("FusedRMSNorm", module.RMSNorm), ("FusedLayerNorm", module.LayerNorm)):
        if getattr(module, f"{fused}WithHook", None) is None:
            replacements.set(getattr(module, fused), "from_native_module", staticmethod(plain.from_native_module))


@wrap(
    "shardformer.layer.qkv_fused_linear:gather_fused_qkv_in_gpt2_style",
    "125",
    "no CUDA device",
    kind=Kind.CPU,
    only_if=lambda module: not torch.cuda.is_available(),
)
def fused_weights_are_gathered_on_cpu(
    upstream: Callable,
    qkv: torch.Tensor,
    split_sizes: list[int],
    process_group: dist.ProcessGroup,
    is_transposed: bool = False,
) -> torch.Tensor:
    """Without it: AssertionError: Torch not compiled with CUDA enabled, or no NVIDIA driver."""
    ranks, dimension = dist.get_world_size(process_group), -1 if is_transposed else 0
    parts = [torch.empty_like(qkv, memory_format=torch.contiguous_format) for _ in range(ranks)]
    dist.all_gather(parts, qkv.contiguous(), group=process_group)
    pieces = [part.split([size // ranks for size in split_sizes], dimension) for part in parts]
    # all ranks' q, then all ranks' k, then all ranks' v
    return torch.cat([piece for fused in zip(*pieces, strict=True) for piece in fused], dimension)


@wrap("shardformer.layer.loss:dist_cross_entropy", "145", "the loss of a sharded model is fused", kind=Kind.FP8)
def losses_are_computed_from_hidden_states(
    upstream: Callable, labels: torch.Tensor, logits: Any, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Without it: TypeError, since what `colossal/tensor/loss.py` gives for logits is no tensor. No longer needed when
    shardformer's forwards can be given their loss.
    """
    loss_of = getattr(logits, "loss_of", None)
    return upstream(labels, logits, *args, **kwargs) if loss_of is None else loss_of(labels)


@wrap(
    "shardformer.layer.loss:DistCrossEntropy.backward",
    "shardformer/layer/loss.py:132; tensor/colo_tensor.py:6",
    "Gemini trains with tensor parallelism",
)
def loss_of_a_sharded_vocabulary_scales_its_gradient(upstream: Callable, ctx: Any, gradient: torch.Tensor) -> tuple:
    """Without it all gradients are as many times too large as there are tokens: the scaling in place makes a copy that
    is dropped, since in ColoTensors, which Gemini's activations are, `mul_` is a `mul`.
    """
    with torch._C.DisableTorchFunction():  # so that `mul_` is torch's, in place
        return upstream(ctx, gradient)


@wrap("shardformer.layer.loss:reduce_forward", "232", "Gemini trains with tensor parallelism")
def loss_is_of_the_ranks_own_tokens(
    upstream: Callable, input_: torch.Tensor, process_group: Any, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Without it all ranks of the job are taken where none is named, as Gemini does: gradients are divided by their
    number.
    """
    return input_ if process_group is None else upstream(input_, process_group, *args, **kwargs)
