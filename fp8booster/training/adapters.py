"""Adapters of peft on a model whose own weights are frozen."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fp8booster.reading import COPY_AGAIN, faults_named, first_of

if TYPE_CHECKING:
    from peft import PeftModel

ALL_LINEAR = "all-linear"
"""peft's name of all linear layers but the vocabulary head."""

ADAPTER_FILE = "adapter_model.safetensors"
"""Beside `ADAPTER_CONFIG` in a folder that peft's `save_pretrained` writes."""

ADAPTER_CONFIG = "adapter_config.json"


def with_adapters(network: nn.Module, rank: int, *, alpha: float, targets: Sequence[str] | str) -> PeftModel:
    """Return a transformers model with LoRA (Hu et al., arXiv 2106.09685) on linear layers; only that trains.

    Args:
        network: changed in place. Its frozen weights may be in FP8, as `quantize` leaves them.
        rank: of each adapter.
        alpha: an adapter's output is multiplied by `alpha / rank`.
        targets: ends of names of linear layers, or `ALL_LINEAR`.

    Raises:
        ValueError: peft is not installed, or the model has no such layers.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ValueError("LoRA needs peft; pip install peft") from None
    names = targets if isinstance(targets, str) else list(targets)
    linears = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    if not isinstance(names, str) and (
        unknown := [end for end in names if not any(f".{name}".endswith(f".{end}") for name in linears)]
    ):
        known = sorted({name.rpartition(".")[2] for name in linears})
        raise ValueError(f"No linear layer of the model is named {first_of(unknown)}; it has {', '.join(known)}")
    options: dict[str, Any] = {"r": rank, "lora_alpha": alpha, "target_modules": names}
    adapted: Any = get_peft_model(network, LoraConfig(task_type="CAUSAL_LM", **options))  # type: ignore[arg-type]
    return adapted


def adapted(model: nn.Module) -> PeftModel | None:
    """Return the peft model that a model is or wraps; None for a model that trains all its weights."""
    # not imported: a model can hold peft's classes only where somebody has imported it
    peft = sys.modules.get("peft")
    return None if peft is None else next((each for each in model.modules() if isinstance(each, peft.PeftModel)), None)


def save_adapters(model: nn.Module, folder: Path, *, writes: bool) -> None:
    """Write adapters as peft does, and nothing of the model that they are on; every rank calls it, and one `writes`.

    Args:
        model: the peft model, or FSDP's around it, whose state dict has whole tensors under the same names.
    """
    # on every rank, for FSDP gathers its state dict from all of them
    peft_model, state = _required(model), _adapters_of(model)
    if writes:
        # told to, peft does not ask the hub whether the vocabulary has grown
        peft_model.save_pretrained(str(folder), safe_serialization=True, state_dict=state, save_embedding_layers=False)


def load_adapters(model: nn.Module, folder: Path) -> None:
    """Set adapters to those that `save_adapters`, or peft's `save_pretrained`, wrote; every rank calls it.

    Raises ValueError for adapters that are damaged, or of another model, rank or targets.
    """
    from peft import get_peft_model_state_dict
    from safetensors.torch import load_file

    file = folder / ADAPTER_FILE
    with faults_named(file):
        saved = load_file(file)
    state = _adapters_of(model)
    here = get_peft_model_state_dict(_required(model), state_dict=state, save_embedding_layers=False)
    # peft itself skips names that it does not know, and would train on from random adapters
    for name in sorted({*saved, *here}):
        there, own = (list(each[name].shape) if name in each else "missing" for each in (saved, here))
        if there != own:
            raise ValueError(
                f"The adapters in {file} are others: {name} is {there} there and {own} here; resume with the --lora "
                f"options they began with, or {COPY_AGAIN}."
            )
    names = {id(value): name for name, value in state.items()}  # in the state dict, of which peft shortens them
    model.load_state_dict({names[id(value)]: saved[name] for name, value in here.items()}, strict=False)


def _required(model: nn.Module) -> PeftModel:
    peft_model = adapted(model)
    if peft_model is None:
        raise ValueError("the model has no adapters; add them with peft's get_peft_model")
    return peft_model


def _adapters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.state_dict().items() if "lora_" in name}
