"""Patches of saving and loading."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fp8booster.colossal.compat.accelerator import wrap_on_cpu
from fp8booster.colossal.compat.registry import Kind, Replacements, by_name, patch, refuse, wrap
from fp8booster.colossal.temporarily import temporarily
from fp8booster.colossal.unwrapped import module_of
from fp8booster.reading import COPY_AGAIN, faults_named, read_index

_HYBRID = "checkpoint_io.hybrid_parallel_checkpoint_io:HybridParallelCheckpointIO."
_MOE = "checkpoint_io.moe_checkpoint:MoECheckpointIO."


class BackgroundFileWriter:
    """Writes bytes and tensors to `path` in a thread, in the order of the calls.

    It has the calls of tensornvme's AsyncFileWriter that colossalai/utils/safetensors.py makes; that package
    must be compiled against liburing. `n_entries`, `backend` and `n_tasks` tune it and mean nothing here.
    """

    def __init__(self, path: str, n_entries: int, backend: str, n_tasks: int) -> None:
        self.offset = 0
        self._file = open(path, "wb")  # noqa: SIM115 (closed by synchronize)
        # one thread, so that bytes reach the file in the order of the calls
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._writes: list[Future[int]] = []

    def write(self, data: bytes) -> None:
        """Append `data`."""
        self._writes.append(self._thread.submit(self._file.write, data))
        self.offset += len(data)

    def write_raw(self, tensor: torch.Tensor, pointer: int, n_bytes: int, offset: int) -> None:
        """Append `tensor`, on CPU, which must not change until `synchronize`."""
        # as bytes: numpy knows neither BF16 nor FP8
        self.write(memoryview(tensor.detach().contiguous().flatten().view(torch.uint8).numpy()))

    def register_h2d(self, n_tensors: int) -> None:
        """Prepare nothing: `write_tensor` copies before it returns."""

    def write_tensor(self, tensor: torch.Tensor, pinned: torch.Tensor | None = None) -> None:
        """Append a copy of `tensor`, made at once, in `pinned` where that is given."""
        copy = torch.empty_like(tensor, device="cpu") if pinned is None else pinned
        # the next step changes the weights while the thread still writes
        copy.copy_(tensor.detach())
        self.write_raw(copy, copy.data_ptr(), copy.nbytes, self.offset)

    def sync_before_step(self) -> None:
        """Wait for nothing before the weights change: they are copied."""

    def synchronize(self) -> None:
        """Wait until the file is whole on disk; an error of a write is raised here."""
        self._thread.shutdown()
        self._file.close()
        for write in self._writes:
            # an error stays in its future, and a save that failed would pass for a whole one
            write.result()


@patch("utils.safetensors", "10-15", "tensornvme is not installed")
def async_save_without_tensornvme(module: ModuleType, replacements: Replacements) -> None:
    """Without it: NameError: name 'AsyncFileWriter' is not defined."""
    if not hasattr(module, "AsyncFileWriter"):
        replacements.set(module, "AsyncFileWriter", BackgroundFileWriter)


@wrap_on_cpu("checkpoint_io.utils:_pin_tensor", "965-968")
def cpu_memory_is_not_pinned(upstream: Callable, tensor: torch.Tensor, empty: bool = True) -> torch.Tensor:
    """Without it: RuntimeError: Cannot access accelerator device when none is available."""
    return torch.empty_like(tensor, device="cpu") if empty else tensor


@by_name
def _without_pinning(call: Callable[[], Any], given: dict[str, Any]) -> Any:
    """Without it: RuntimeError: pin_memory=True requires a CUDA or other accelerator backend."""
    given.pop("pinned_state_dicts", None)
    return call()


for _name, _where, _lines in (
    (
        "cpu_optimizer_states_are_not_pinned",
        "zero.low_level.low_level_optim:LowLevelZeroOptimizer.state_dict LowLevelZeroOptimizer.state_dict_shard",
        "811,903",
    ),
    ("fsdp_shards_are_not_pinned", "checkpoint_io.utils:shard_model_checkpoint shard_optimizer_checkpoint", "420,450"),
    ("cpu_shards_are_not_pinned", f"{_HYBRID}_model_sharder HybridParallelCheckpointIO._optimizer_sharder", "118,1071"),
    (
        "gemini_states_are_not_pinned",
        "zero.gemini:GeminiDDP.state_dict_shard GeminiOptimizer.state_shard",
        "zero/gemini/gemini_ddp.py:929,950; zero/gemini/gemini_optimizer.py:838",
    ),
):
    wrap_on_cpu(_where, _lines, name=_name)(_without_pinning)


@wrap(
    "zero.low_level.low_level_optim:LowLevelZeroOptimizer.state_dict_shard",
    "884",
    "an optimizer is saved in shards, and a trained parameter has never got a gradient",
)
def states_are_saved_of_what_was_stepped(upstream: Callable, self: Any, *args: Any, **kwargs: Any) -> Iterator[tuple]:
    """Without it: KeyError, the number of that parameter, which has no states yet."""
    whole = self.optim.state_dict()
    whole["state"] = defaultdict(dict, whole["state"])
    vars(self.optim)["state_dict"] = lambda: whole
    try:
        yield from upstream(self, *args, **kwargs)
    finally:
        del vars(self.optim)["state_dict"]


@wrap(
    "checkpoint_io.utils:save_state_dict",
    "484-490",
    "weights are tied and on the CPU, and are saved with use_safetensors=True",
    kind=Kind.CPU,
)
def tied_weights_are_saved_from_the_cpu(
    upstream: Callable, state_dict: dict, checkpoint_file_path: str, use_safetensors: bool
) -> None:
    """Without it: RuntimeError: Some tensors share memory."""
    seen: set[int] = set()
    state_dict = dict(state_dict)
    for name, value in state_dict.items() if use_safetensors else ():
        if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.numel() > 0:
            memory = value.untyped_storage().data_ptr()
            if memory in seen:  # safetensors refuses views of one memory; a GPU's are copied to the host anyway
                state_dict[name] = value.detach().clone()
            seen.add(memory)
    upstream(state_dict, checkpoint_file_path, use_safetensors)


@wrap(
    "zero.gemini.gemini_ddp:GeminiDDP._load_from_state_dict",
    "811-817",
    "Gemini loads a checkpoint of a model with tied weights",
)
def gemini_loads_tied_weights(upstream: Callable, self: Any, state_dict: dict, *args: Any) -> None:
    """Without it: RuntimeError: Unexpected key(s) in state_dict: "lm_head.weight"."""
    names = {name for name, _ in self.module.named_parameters()}
    # the other names of a tied weight, which strict loading takes for unexpected keys
    tied = {name for name, _ in self.module.named_parameters(remove_duplicate=False)} - names
    upstream(self, {name: value for name, value in state_dict.items() if name not in tied}, *args)


@wrap(
    "checkpoint_io.utils:load_state_dict_into_model",
    "726-729",
    "shards that name a tied weight once, as HybridParallelPlugin's, are loaded by another plugin",
)
def shards_name_a_tied_weight_once(
    upstream: Callable,
    model: nn.Module,
    state_dict: dict,
    missing_keys: list,
    strict: bool = False,
    load_sub_module: bool = True,
) -> None:
    """Without it: RuntimeError: Missing key(s) in state_dict: "lm_head.weight"."""
    upstream(model, state_dict, missing_keys, strict, load_sub_module)
    if not strict:
        return
    # past GeminiDDP's own, which takes no such argument
    parameters = dict(nn.Module.named_parameters(module_of(model), remove_duplicate=False))
    missing = set(missing_keys[-1])
    # a name is not missing where its tensor came under another
    found = {parameter for name, parameter in parameters.items() if name not in missing}
    missing_keys[-1] = [name for name in missing_keys[-1] if parameters.get(name) not in found]


@patch(
    "checkpoint_io.utils",
    "checkpoint_io/utils.py:save_config_file",
    "transformers >= 5, which has no modeling_utils.get_parameter_dtype",
)
def sharded_checkpoint_keeps_its_config(module: ModuleType, replacements: Replacements) -> None:
    """Without it the file is left out in silence, and `from_pretrained` cannot load the checkpoint."""
    with suppress(ImportError):
        from transformers.modeling_utils import get_parameter_dtype  # noqa: F401

        return

    def save_config_file(model: nn.Module, checkpoint_path: str, is_master: bool = True) -> None:
        if isinstance(model, module.PeftUnwrapMixin):
            model = model.base_model
        import transformers  # here, not above: importing fp8booster.colossal must stay cheap

        if not isinstance(model, transformers.PreTrainedModel) or not is_master:
            return
        model.config.dtype = model.dtype
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(checkpoint_path)
        if model.can_generate():
            model.generation_config.save_pretrained(checkpoint_path)

    replacements.set_function(module, "save_config_file", save_config_file)


@wrap(
    "checkpoint_io.index_file:CheckpointIndexFile.load",
    "45-66",
    "an index is damaged, or names files outside of its folder",
)
def an_index_names_files_of_its_folder(upstream: Callable, self: Any, json_path: str) -> None:
    """Without it `../other/model.safetensors` is read, and a damaged index ends in an error without its name."""
    path = Path(json_path)
    # where stages of a pipeline write, and read, indices of files that lie in the folder above
    read_index(path, COPY_AGAIN, written=path.parent.name != "tmp_index_files")
    upstream(self, json_path)


@wrap(
    "checkpoint_io.checkpoint_io_base:CheckpointIO.load_model CheckpointIO.load_optimizer "
    "CheckpointIO.load_lr_scheduler",
    "87,196,423",
    "a file of a checkpoint is damaged, or holds code",
)
def a_file_with_code_is_not_to_be_trusted(upstream: Callable, *args: Any, **kwargs: Any) -> Any:
    """Without it: UnpicklingError, with torch's advice to load the file by weights_only=False, which runs its code."""
    with faults_named():
        return upstream(*args, **kwargs)


@wrap(
    f"{_HYBRID}load_sharded_model HybridParallelCheckpointIO.load_unsharded_model",
    "384,846",
    "a pipeline loads a checkpoint that names a tied weight once, as Hugging Face's and other modes' do",
)
def pipeline_stages_load_a_weight_that_they_share(
    upstream: Callable, self: Any, model: nn.Module, *args: Any, **kwargs: Any
) -> None:
    """Without it the last stage keeps the head that it had, without a word."""
    by_stages = [by_stage for by_stage in model.shared_params if by_stage]  # none without a pipeline
    shared = [
        (by_stage[model.stage_manager.stage], group)
        for by_stage, group in zip(by_stages, model.shared_param_process_groups, strict=True)
        if len(by_stage) > 1 and model.stage_manager.stage in by_stage
    ]
    with _found({parameter for parameter, _ in shared}, module_of(model.unwrap())) as found:
        upstream(self, model, *args, **kwargs)
    sources = [_stage_that_loaded(parameter in found, group) for parameter, group in shared]
    if all(source is None for source in sources):
        return
    # late gathers would overwrite what is copied here
    model._force_wait_all_gather()
    for (parameter, group), source in zip(shared, sources, strict=True):
        if source is not None:
            value = parameter.detach().clone()
            dist.broadcast(value, source, group=group)
            with torch.no_grad():
                parameter.copy_(value)
    # masters were made from the value before it was copied, and the next step would bring that back
    model.update_master_params()


@contextmanager
def _found(wanted: set[nn.Parameter], model: nn.Module) -> Iterator[set[nn.Parameter]]:
    """Collect those parameters whose names are in the state dicts that are loaded meanwhile."""
    found: set[nn.Parameter] = set()

    def look(module: nn.Module, state_dict: dict, prefix: str, *_: Any) -> None:
        found.update(
            parameter
            for name, parameter in module._parameters.items()
            if parameter in wanted and prefix + name in state_dict
        )

    hooks = [
        module.register_load_state_dict_pre_hook(look)
        for module in model.modules()
        if not wanted.isdisjoint(module._parameters.values())
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _stage_that_loaded(has_loaded: bool, group: dist.ProcessGroup) -> int | None:
    """Return the first rank of a group that has loaded a weight which another has not; None: they are alike."""
    loaded: list[bool] = [False] * dist.get_world_size(group)
    # each rank must know of the others: a broadcast that one of them leaves out hangs
    dist.all_gather_object(loaded, has_loaded, group=group)
    if any(loaded) and not all(loaded):
        return dist.get_global_rank(group, loaded.index(True))
    return None


@wrap_on_cpu(f"{_MOE}pre_save_model", "697")
def moe_models_are_gathered_on_cpu(upstream: Callable, *args: Any, **kwargs: Any) -> Any:
    """Without it: AssertionError: Torch not compiled with CUDA enabled (or RuntimeError: no NVIDIA driver)."""
    with temporarily(torch.Tensor, cuda=lambda tensor, *_, **__: tensor):
        return upstream(*args, **kwargs)


@wrap(f"{_MOE}pre_save_model", "687", "MoeHybridParallelPlugin, saving a model in one file")
def moe_saves_the_names_of_the_model(upstream: Callable, self: Any, model: Any) -> Any:
    """Without it names begin with "module.", and no plugin loads the file."""
    return upstream(self, model.unwrap() if hasattr(model, "unwrap") else model)


@wrap(
    "tensor.padded_tensor.api:_hijack_back_detach_and_clone",
    "47",
    "a vocabulary that HybridParallel pads, as GPT-2's, saved without tensor parallelism",
)
def detached_weights_lose_their_padding(upstream: Callable, tensor: torch.Tensor) -> torch.Tensor:
    """Without it: AttributeError: 'Tensor' object has no attribute '_unpad_detach'."""
    # what `detach` of a padded tensor gives knows the padding, and its methods are its own
    return upstream(tensor) if hasattr(tensor, "_unpad_detach") else tensor


@wrap_on_cpu(f"{_MOE}gather_from_sharded_optimizer_state", "284")
def moe_states_are_gathered_on_cpu(upstream: Callable, *args: Any, **kwargs: Any) -> Any:
    """Without it: AssertionError: Torch not compiled with CUDA enabled (or RuntimeError: no NVIDIA driver)."""
    with temporarily(torch.Tensor, cuda=lambda tensor, *_, **__: tensor):
        return upstream(*args, **kwargs)


@wrap(
    f"{_MOE}gather_from_sharded_optimizer_state",
    "230,265",
    "each rank holds other experts, or experts in one parameter are spread over ranks",
)
@by_name
def moe_gathers_states_of_all_experts(call: Callable[[], Any], given: dict[str, Any]) -> Any:
    """Without it states of an expert that one rank holds are saved flat, which other numbers of ranks cannot load; and
    those of experts in one parameter raise AssertionError: The parameter isn't evenly distributed among tensor parallel
    group.
    """
    from colossalai.accelerator import get_accelerator

    from fp8booster.nn.experts.spread import spread_of

    parameter, spread = given["param"], spread_of(given["param"])
    is_stacked = spread is not None and parameter.shape != given["original_shape"]
    if is_stacked:
        given["original_shape"] = parameter.shape
    state = call()
    # the first of the ranks that hold the same experts writes
    writes = dist.get_rank(given["moe_dp_group"]) == 0
    if not given["is_moe_param"] or not writes or dist.get_world_size(given["tp_group"]) > 1:
        return state
    device = get_accelerator().get_current_device()
    for name, value in state.items():
        if name != "step" and torch.is_tensor(value):
            own = value.flatten()[: parameter.numel()].view(parameter.shape)
            state[name] = spread.gathered(own.to(device)).to(own.device) if is_stacked else own
    return state


@wrap(
    f"{_MOE}shard_from_complete_optimizer_state",
    "643",
    "each rank holds other experts, or experts in one parameter are spread over ranks",
)
@by_name
def moe_divides_states_of_all_experts(call: Callable[[], Any], given: dict[str, Any]) -> Any:
    """Without it states of an expert that one rank holds keep their shape, and the next step raises RuntimeError: The
    size of tensor a must match the size of tensor b; and those of experts in one parameter raise AssertionError: The
    parameter isn't evenly distributed among tensor parallel group.
    """
    own, whole, checkpoints = given["current_shape"], given["original_shape"], given["self"]
    if not given["is_moe_param"] or checkpoints.tp_size > 1:
        return call()
    if own != whole:
        given["original_shape"] = own
        given["state"] = {
            name: value.chunk(checkpoints.ep_size)[checkpoints.ep_rank] if _has_shape(value, whole) else value
            for name, value in given["state"].items()
        }
    state = call()
    if not checkpoints.use_zero or checkpoints.moe_dp_size > 1:
        return state
    return {name: value.flatten() if _has_shape(value, own) else value for name, value in state.items()}


def _has_shape(value: Any, shape: torch.Size) -> bool:
    return torch.is_tensor(value) and value.shape == shape


@refuse(
    f"{_MOE}save_unsharded_model MoECheckpointIO.save_unsharded_optimizer",
    "680,719,741",
    "experts are spread over ranks, and a checkpoint is to be one file",
)
def moe_saves_spread_experts_in_shards(given: dict[str, Any]) -> str | None:
    """Without it the first rank's experts are written with those of other ranks behind them in the same tensor, and the
    others' are missing.
    """
    ranks = given["self"].ep_size
    if ranks == 1:
        return None
    return f"experts are spread over {ranks} ranks, and colossalai cannot write them to one file; save with shard=True"


@wrap(
    f"{_MOE}save_sharded_model MoECheckpointIO.save_unsharded_model",
    "116,686",
    "overlap_allgather is on, or weights are sent in FP8",
)
def moe_waits_before_saving(upstream: Callable, self: Any, model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Without it weights that ZeRO still gathers are saved as they are by then."""
    model._force_wait_all_gather()
    upstream(self, model, *args, **kwargs)


@wrap(
    f"{_MOE}_model_sharder",
    "96",
    "a model has buffers that its state dict leaves out, as a Mixtral's rotary embedding has",
)
def moe_saves_what_a_state_dict_holds(
    upstream: Callable, model: nn.Module, *args: Any, **kwargs: Any
) -> Iterator[tuple]:
    """Without it a Mixtral's checkpoint holds "model.rotary_emb.inv_freq", and other plugins do not load it: Unexpected
    key(s).
    """
    from colossalai.utils import get_non_persistent_buffers_set

    # its own set is without those of the modules inside
    with temporarily(module_of(model), _non_persistent_buffers_set=get_non_persistent_buffers_set(model)):
        yield from upstream(model, *args, **kwargs)


@wrap(
    f"{_MOE}_model_sharder", "90,139", "the experts of a family without a policy of Colossal-AI's lie on several ranks"
)
def moe_writes_each_weight_once(upstream: Callable, model: nn.Module, *args: Any, **kwargs: Any) -> Iterator[tuple]:
    """Without it each of these ranks writes the whole model but the others' experts, and of experts in one parameter
    all.
    """
    from colossalai.checkpoint_io.utils import gather_distributed_param
    from colossalai.tensor.d_tensor.api import is_customized_distributed_tensor

    from fp8booster.nn.experts.spread import spread_of

    spreads = [spread for _, parameter in model.named_parameters() if (spread := spread_of(parameter)) is not None]
    if all(spread.first == 0 for spread in spreads):
        yield from upstream(model, *args, **kwargs)
        return
    every = list(model.named_parameters())

    def own() -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in every:
            if is_customized_distributed_tensor(parameter):
                gather_distributed_param(parameter)  # for the first rank, which writes it
            elif spread_of(parameter) is not None:
                yield name, parameter

    vars(model)["named_parameters"] = own
    try:
        yield from upstream(model, *args, **kwargs)
    finally:
        del vars(model)["named_parameters"]  # and none of the class's is left behind, which a copy would hold


@wrap(
    "checkpoint_io.utils:gather_state_dict_fast",
    "1142,1153",
    "adapters are saved, and no expert that another rank holds has any",
)
def ranks_without_adapters_send_none(upstream: Callable, *args: Any, **kwargs: Any) -> Any:
    """Without it: IndexError: list index out of range."""
    start = dist.batch_isend_irecv
    with temporarily(dist, batch_isend_irecv=lambda operations: start(operations) if operations else []):
        return upstream(*args, **kwargs)
