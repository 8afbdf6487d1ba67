"""What ranks are forked from: a process with the imports that would take each of them 7 to 10 s."""

from __future__ import annotations

import gc
from importlib import import_module

import torch

import fp8booster.plugins  # noqa: F401  (patches Colossal-AI before it is imported)


def spare_time() -> None:
    """Skip what takes half of the time to boost a tiny model, and what no test looks at."""
    import transformers.models.llama.modeling_llama  # noqa: F401
    from colossalai.logging import DistributedLogger

    # a plugin that goes collects garbage, and would look through all that was ever imported
    gc.collect()
    gc.freeze()
    # the place in the code that logs, for which sources are read, even where nothing is logged
    DistributedLogger._DistributedLogger__get_call_info = staticmethod(lambda: ("", 0, ""))
    for device in (torch.cuda, torch.xpu, torch.mtia):
        if not device.is_available():  # the stack is formatted for each seed of a device that may come
            device.manual_seed_all = lambda seed: None


def import_what_commands_do() -> None:
    """What a command, its ranks and its pictures would import as they run."""
    import PIL.Image
    import pydantic
    from transformers import AutoModelForCausalLM

    for module in ("loop", "run", "rank"):
        import_module(f"fp8booster.cli.train.{module}")
    for module in ("fp8booster.cli.plot.pictures", "matplotlib.backends.backend_agg", "torch.utils.tensorboard"):
        import_module(module)
    PIL.Image.preinit()
    pydantic.TypeAdapter(int)  # typer has one for each option
    AutoModelForCausalLM._model_mapping.keys()  # families' configs, among which it looks for that of a model


import_what_commands_do()
spare_time()
