"""Folders of models, as their tests compare them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import fp8booster

export = partial(fp8booster.export, engine_ranks=None)
"""For models of any size: `tests/serving/test_engines.py` has those that engines refuse."""


def files(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a folder by name."""
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose values torch compares: FP8 as bytes."""
    return tensor.contiguous().view(torch.uint8) if tensor.element_size() == 1 else tensor


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    """Tell whether two folders hold the same tensors, bit for bit."""
    return found.keys() == expected.keys() and all(
        torch.equal(bits(found[name]), bits(value)) for name, value in expected.items()
    )


def exported(model: Any, folder: Path, **options: Any) -> list[Path]:
    """Export a model from memory and from its folder; return both exports."""
    model.save_pretrained(folder / "model")
    return [
        export(source, folder / out, **options).folder
        for source, out in ((model, "live"), (folder / "model", "stored"))
    ]
