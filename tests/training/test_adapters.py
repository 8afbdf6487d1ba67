"""Adapters that are saved, and loaded where they fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8booster.training.adapters import ADAPTER_FILE, load_adapters, save_adapters, with_adapters
from tests.colossal.models import tiny_llama

pytest.importorskip("peft")


def test_adapters_of_another_rank_or_of_other_layers_are_refused(tmp_path: Path) -> None:
    save_adapters(with_adapters(tiny_llama(), 8, alpha=16, targets=["q_proj"]), tmp_path, writes=True)
    load_adapters(with_adapters(tiny_llama(), 8, alpha=16, targets=["q_proj"]), tmp_path)
    for rank, targets, says in ((4, ["q_proj"], r"is \[8, 64\] there and \[4, 64\] here"), (8, ["k_proj"], "missing")):
        with pytest.raises(ValueError, match=f"{ADAPTER_FILE} are others: .*{says}.*--lora options they began with"):
            load_adapters(with_adapters(tiny_llama(), rank, alpha=16, targets=targets), tmp_path)
