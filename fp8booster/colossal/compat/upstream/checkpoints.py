"""Patches of saving and loading."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fp8booster.colossal.compat.registry import patch, wrap
from fp8booster.colossal.compat.replacements import Replacements
from fp8booster.colossal.compat.upstream.background_writer import BackgroundFileWriter
from fp8booster.reading import COPY_AGAIN, faults_named, read_index


@patch("utils.safetensors", "10-15", needed_when="tensornvme is not installed")
def async_save_without_tensornvme(module: ModuleType, replacements: Replacements) -> None:
    """`use_async=True` writes checkpoints in a thread where tensornvme is not installed.

    Without it: NameError: name 'AsyncFileWriter' is not defined.
    """
    if not hasattr(module, "AsyncFileWriter"):
        replacements.set(module, "AsyncFileWriter", BackgroundFileWriter)


@wrap(
    "zero.gemini.gemini_ddp:GeminiDDP._load_from_state_dict",
    "811-817",
    needed_when="Gemini loads a checkpoint of a model with tied weights",
)
def gemini_loads_tied_weights(upstream: Callable, self: Any, state_dict: dict, *args: Any) -> None:
    """A checkpoint that has a tied weight under each of its names, as Gemini's own, loads.

    Without it: RuntimeError: Unexpected key(s) in state_dict: "lm_head.weight".
    """
    names = {name for name, _ in self.module.named_parameters()}
    tied = {name for name, _ in self.module.named_parameters(remove_duplicate=False)} - names
    upstream(self, {name: value for name, value in state_dict.items() if name not in tied}, *args)


@wrap(
    "checkpoint_io.utils:load_state_dict_into_model",
    "726-729",
    needed_when="shards that name a tied weight once, as HybridParallelPlugin's, are loaded by another plugin",
)
def shards_name_a_tied_weight_once(
    upstream: Callable,
    model: nn.Module,
    state_dict: dict,
    missing_keys: list,
    strict: bool = False,
    load_sub_module: bool = True,
) -> None:
    """Shards that hold a tied weight under one of its names load where every name is asked for.

    Without it: RuntimeError: Missing key(s) in state_dict: "lm_head.weight".
    """
    from colossalai.interface.model import PeftUnwrapMixin

    upstream(model, state_dict, missing_keys, strict, load_sub_module)
    if not strict:
        return
    loaded = model.base_model if isinstance(model, PeftUnwrapMixin) else model
    # past GeminiDDP's own, which takes no such argument
    parameters = dict(nn.Module.named_parameters(loaded, remove_duplicate=False))
    missing = set(missing_keys[-1])
    found = {parameter for name, parameter in parameters.items() if name not in missing}
    missing_keys[-1] = [name for name in missing_keys[-1] if parameters.get(name) not in found]


@patch(
    "checkpoint_io.utils",
    "checkpoint_io/utils.py:save_config_file",
    needed_when="transformers >= 5, which has no modeling_utils.get_parameter_dtype",
)
def sharded_checkpoint_keeps_its_config(module: ModuleType, replacements: Replacements) -> None:
    """`save_model(shard=True)` writes config.json beside the weights.

    Without it the file is left out in silence, and `from_pretrained` cannot load the checkpoint.
    """
    import transformers.modeling_utils  # here, not above: importing fp8booster.colossal must stay cheap

    if hasattr(transformers.modeling_utils, "get_parameter_dtype"):
        return

    def save_config_file(model: nn.Module, checkpoint_path: str, is_master: bool = True) -> None:
        if isinstance(model, module.PeftUnwrapMixin):
            model = model.base_model
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
    needed_when="an index is damaged, or names files outside of its folder",
)
def an_index_names_files_of_its_folder(upstream: Callable, self: Any, json_path: str) -> None:
    """The index of a checkpoint is checked before a file that it names is opened.

    Without it `../other/model.safetensors` is read, and a damaged index ends in an error without its name.
    """
    path = Path(json_path)
    # where stages of a pipeline write, and read, indices of files that lie in the folder above
    read_index(path, COPY_AGAIN, written=path.parent.name != "tmp_index_files")
    upstream(self, json_path)


@wrap(
    "checkpoint_io.checkpoint_io_base:CheckpointIO.load_model CheckpointIO.load_optimizer "
    "CheckpointIO.load_lr_scheduler",
    "87,196,423",
    needed_when="a file of a checkpoint is damaged, or holds code",
)
def a_file_with_code_is_not_to_be_trusted(upstream: Callable, *args: Any, **kwargs: Any) -> Any:
    """What torch does not load is answered with the file's name and the advice not to trust it, for every plugin.

    Without it: UnpicklingError, with torch's advice to load the file with weights_only=False, which runs its code.
    """
    with faults_named():
        return upstream(*args, **kwargs)


@wrap(
    "checkpoint_io.hybrid_parallel_checkpoint_io:HybridParallelCheckpointIO.load_sharded_model "
    "HybridParallelCheckpointIO.load_unsharded_model",
    "384,846",
    needed_when="a pipeline loads a checkpoint that names a tied weight once, as Hugging Face's and other modes' do",
)
def pipeline_stages_load_a_weight_that_they_share(
    upstream: Callable, self: Any, model: nn.Module, *args: Any, **kwargs: Any
) -> None:
    """A stage whose name of a tied weight is not in a checkpoint takes it from the stage whose name is.

    Without it the last stage keeps the head that it had, without a word.
    """
    shared = _shared_between_stages(model)
    with _found({parameter for parameter, _ in shared}, model.unwrap()) as found:
        upstream(self, model, *args, **kwargs)
    sources = [_stage_that_loaded(parameter in found, group) for parameter, group in shared]
    if all(source is None for source in sources):
        return
    model._force_wait_all_gather()
    for (parameter, group), source in zip(shared, sources, strict=True):
        if source is not None:
            value = parameter.detach().clone()
            dist.broadcast(value, source, group=group)
            with torch.no_grad():
                parameter.copy_(value)
    model.update_master_params()


def _shared_between_stages(model: nn.Module) -> list[tuple[nn.Parameter, dist.ProcessGroup]]:
    """What this stage of a pipeline holds together with other stages, and the group of these."""
    by_stages = [by_stage for by_stage in model.shared_params if by_stage]
    return [
        (by_stage[model.stage_manager.stage], group)
        for by_stage, group in zip(by_stages, model.shared_param_process_groups, strict=True)
        if len(by_stage) > 1 and model.stage_manager.stage in by_stage
    ]


@contextmanager
def _found(wanted: set[nn.Parameter], model: nn.Module) -> Iterator[set[nn.Parameter]]:
    """Those parameters whose names are in the state dicts that are loaded meanwhile."""
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
    """The first rank of a group that has loaded a weight which another has not; None: they are alike."""
    loaded: list[bool] = [False] * dist.get_world_size(group)
    dist.all_gather_object(loaded, has_loaded, group=group)
    if any(loaded) and not all(loaded):
        return dist.get_global_rank(group, loaded.index(True))
    return None
