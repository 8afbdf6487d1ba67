"""Patches of what Colossal-AI does with a checkpoint that is damaged, or that someone made to do harm."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from fp8booster.colossal.compat.registry import mend
from fp8booster.colossal.patch import Patch
from fp8booster.reading import COPY_AGAIN, faults_named, read_index

_BEING_WRITTEN = "tmp_index_files"
"""Where stages of a pipeline write, and read, indices of files that lie in the folder above."""


@mend(
    module="colossalai.checkpoint_io.index_file",
    place="checkpoint_io/index_file.py:45-66",
    needed_when="an index is damaged, or names files outside of its folder",
)
def an_index_names_files_of_its_folder(module: ModuleType, patch: Patch) -> None:
    """The index of a checkpoint is checked before a file that it names is opened.

    Without it `../other/model.safetensors` is read, and a damaged index ends in an error without its name. No longer
    needed when `CheckpointIndexFile.from_file` refuses such a name.
    """
    upstream = module.CheckpointIndexFile.load

    @functools.wraps(upstream)
    def load(self, json_path: str) -> None:
        path = Path(json_path)
        read_index(path, COPY_AGAIN, written=path.parent.name != _BEING_WRITTEN)
        upstream(self, json_path)

    patch.set(module.CheckpointIndexFile, "load", load)


@mend(
    module="colossalai.checkpoint_io.checkpoint_io_base",
    place="checkpoint_io/checkpoint_io_base.py:87,196,423",
    needed_when="a file of a checkpoint is damaged, or holds code",
)
def a_file_with_code_is_not_to_be_trusted(module: ModuleType, patch: Patch) -> None:
    """What torch does not load is answered with the file's name and the advice not to trust it, for every plugin.

    Without it: UnpicklingError, with torch's advice to load the file with weights_only=False, which runs its code. No
    longer needed when `CheckpointIO.load_model` of such a file does not quote it.
    """
    for name in ("load_model", "load_optimizer", "load_lr_scheduler"):
        patch.set(module.CheckpointIO, name, _explaining(getattr(module.CheckpointIO, name)))


def _explaining(upstream: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(upstream)
    def load(*args: Any, **kwargs: Any) -> Any:
        with faults_named():
            return upstream(*args, **kwargs)

    return load
