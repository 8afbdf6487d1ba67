"""Levels by name: each keeps what the table of docs/configuration.md says."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from unittest import mock

import pytest
import torch

from fp8booster import FP8Config, level, report
from fp8booster.config import WeightCopies
from fp8booster.levels import LEVELS
from fp8booster.monitor.traffic import count_traffic
from fp8booster.optim import AdamW
from tests.colossal.zero.runs import gathered
from tests.distributed import ranks
from tests.plugins.training import boost, ours, train

TABLE = Path(__file__).parent.parent / "docs" / "configuration.md"


def rows() -> dict[str, list[str]]:
    """The table's cells by level."""
    lines = re.findall(r"^\| `\"(\w+)\"` \|(.*)\|$", TABLE.read_text(encoding="utf-8"), re.MULTILINE)
    return {name: [cell.strip() for cell in cells.split("|")] for name, cells in lines}


def stored(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the memory behind tensors."""
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())


@ranks(1, 2)
@pytest.mark.parametrize("name", LEVELS)
def test_each_keeps_what_the_table_says(name: str) -> None:
    chosen = level(name, always=True)
    plugin = ours(use_fp8=True, fp8_config=chosen.config)
    with mock.patch.object(plugin.logger, "info") as info:
        run = boost(plugin, optimizer=chosen.optimizer)
    with count_traffic() as traffic:
        train(run, steps=2)
    weights, sent, accumulated, master, moments, activations, all_of_it = rows()[name]

    layers = [layer for _, layer in gathered(run)]
    assert len(layers) > 10
    held = [layer.fp8_weight.held for layer in layers]
    assert all(matrix.data.dtype is torch.float8_e4m3fn for matrix in held)
    in_16_bits = not any(layer.held_weight.isnan().any() for layer in layers)
    assert in_16_bits is (weights == "BF16 and E4M3")
    assert in_16_bits or all(layer.held_weight.isnan().all() for layer in layers)
    transposes = sum(matrix.transpose.numel() > 0 for matrix in held)
    assert transposes == (len(layers) if in_16_bits else 0)

    shards = run.optimizer.get_working_to_master_map()
    assert {shards[id(layer.weight)].dtype for layer in layers} == {torch.float32}
    assert master == "FP32"
    states = [run.optimizer.optim.state[shards[id(layer.weight)]] for layer in layers]
    in_8_bits = moments == "8 bits"
    assert isinstance(run.optimizer.optim, AdamW) is in_8_bits

    stores = run.optimizer.pg_to_grad_store.values()
    assert {store.kind for store in stores} == {{"FP32": "32-bit", "8 bits": "8-bit"}[accumulated]}

    (line,) = [call.args[0] for call in info.call_args_list]
    assert ("moments are kept in 8 bits" in line) is in_8_bits

    in_fp8 = sum(count.payload for (_, dtype), count in traffic.counts.items() if dtype is torch.uint8)
    assert sent == "E4M3"
    assert torch.distributed.get_world_size() == 1 or in_fp8 > 0.5 * traffic.payload
    assert (report(run.model).saved_in_8_bits != ()) is (activations == "8 bits")

    values = sum(layer.weight.numel() for layer in layers)
    replicated = (2 if in_16_bits else 0) + (len(held) + transposes) / len(held)
    if in_8_bits:
        of_states = sum(state.nbytes for state in states)
    else:
        of_states = stored(state[name] for state in states for name in ("exp_avg", "exp_avg_sq"))
    shared = stored(shards[id(layer.weight)] for layer in layers) + of_states
    ranks_sharing = torch.distributed.get_world_size()
    said = re.fullmatch(r"(\d) \+ ([\d.]+)/n", all_of_it)
    assert said is not None
    gradients = 2
    assert replicated == int(said[1])
    assert shared / values * ranks_sharing + gradients == pytest.approx(float(said[2]), rel=0.02)


def test_an_unknown_level_is_told_with_all_of_them() -> None:
    with pytest.raises(ValueError, match="no level 'O4'; use O1, O2, O3 or lean"):
        level("O4")


def test_fields_that_are_given_win() -> None:
    assert level("O3", weight_copies=WeightCopies(high_precision=True)).config == FP8Config(
        weight_copies=WeightCopies(high_precision=True)
    )
    assert level("O2", scaling="rowwise").config.gradient_format is FP8Config(scaling="rowwise").gradient_format
    with pytest.raises(TypeError, match="rounding"):
        level("O1", rounding="stochastic")


def test_documents_name_each_level() -> None:
    assert set(rows()) == set(LEVELS)
    for document in (TABLE.with_name("cli.md"), TABLE.parent.parent / "README.md"):
        text = document.read_text(encoding="utf-8")
        assert all(f"`{name}`" in text for name in LEVELS), document
