"""Mends for transformers 5."""

from __future__ import annotations

from types import ModuleType

import torch.nn as nn

from fp8booster.colossal.compat.registry import mend
from fp8booster.colossal.patch import Patch


@mend(
    module="colossalai.checkpoint_io.utils",
    place="checkpoint_io/utils.py:save_config_file",
    needed_when="transformers >= 5, which has no modeling_utils.get_parameter_dtype",
)
def sharded_checkpoint_keeps_its_config(module: ModuleType, patch: Patch) -> None:
    """`save_model(shard=True)` writes config.json beside the weights.

    Without it the file is left out in silence, and `from_pretrained` cannot load the checkpoint. No longer
    needed when colossalai.checkpoint_io.utils.save_config_file writes config.json under transformers 5.
    """
    # Here, not above: importing fp8booster.colossal must stay cheap.
    import transformers.modeling_utils

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

    patch.set_function(module, "save_config_file", save_config_file)
