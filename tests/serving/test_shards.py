"""Tensors of folders by name, files of no more than asked, and the master weights that ranks wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8booster.serving.shards import Masters, Shards, ShardWriter


def numbered(*names: str) -> dict[str, torch.Tensor]:
    return {name: torch.full((2, number + 1), float(number)) for number, name in enumerate(names)}


def test_a_tensor_is_renamed_with_its_scales_and_never_over_another(tmp_path: Path) -> None:
    tensors = numbered("a.weight", "a.weight_scale_inv", "b.weight", "b.weight_scale", "c.weight", "d.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    shards = Shards(tmp_path)
    shards.rename({"a.weight": "x.weight", "b.weight": "y.weight", "c.weight": "d.weight", "none": "z"})
    expected = {"x.weight": "a.weight", "x.weight_scale_inv": "a.weight_scale_inv", "y.weight": "b.weight"}
    expected |= {"y.weight_scale": "b.weight_scale", "c.weight": "c.weight", "d.weight": "d.weight"}
    assert set(shards.names) == expected.keys()
    assert shards.scales() == {"x.weight": "x.weight_scale_inv", "y.weight": "y.weight_scale"}
    for name, origin in expected.items():
        assert torch.equal(shards.tensor(name), tensors[origin]), name
        assert shards.shape(name) == tensors[origin].shape
        assert shards.dtype(name) is torch.float32


def test_a_tensor_may_be_renamed_twice(tmp_path: Path) -> None:
    save_file(tensors := numbered("a", "b"), tmp_path / "model.safetensors")
    shards = Shards(tmp_path)
    shards.rename({"b": "c"})
    shards.rename({"c": "d"})
    assert torch.equal(shards.tensor("d"), tensors["b"])
    assert "b" not in shards
    assert "c" not in shards


def test_files_are_as_full_as_they_may_be(tmp_path: Path) -> None:
    """Tensors have 40, 40, 20, 100, 10 and 100 bytes: a large one alone, and no file that had room for the next."""
    writer = ShardWriter(tmp_path, 100)
    sizes = {"a": 10, "b": 10, "c": 5, "d": 25, "e": 2, "f": 50}
    for name, size in sizes.items():
        writer.add(name, torch.arange(size, dtype=torch.float32))
    writer.close()
    files = sorted(tmp_path.glob("*.safetensors"))
    assert [sorted(load_file(file)) for file in files] == [["a", "b", "c"], ["d"], ["e"], ["f"]]
    assert [file.name for file in files] == [f"model-{number:05d}-of-00004.safetensors" for number in range(1, 5)]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == writer.total == 4 * sum(sizes.values())
    assert index["weight_map"] == {name: file.name for file in files for name in load_file(file)}


def test_a_tensor_is_written_as_it_is_now_and_whole(tmp_path: Path) -> None:
    writer, base = ShardWriter(tmp_path, 2**20), torch.arange(12, dtype=torch.float32).view(3, 4)
    writer.add("transposed", base.t())
    writer.add("column", base[:, 1])
    writer.close()
    found = load_file(tmp_path / "model.safetensors")
    assert torch.equal(found["transposed"], base.t())
    assert torch.equal(found["column"], base[:, 1])
    assert not (tmp_path / "model.safetensors.index.json").exists()


def masters_of(folder: Path, ranks: int, sharding: str | None = "ZeRO") -> torch.Tensor:
    """Write a parameter of 22 values as ranks hold it, the last padded; returns it."""
    whole = torch.arange(1, 23, dtype=torch.float32)
    size = -(-22 // ranks)
    padded = torch.cat([whole, torch.full((ranks * size - 22,), torch.nan)])
    for rank in reversed(range(ranks)):
        file = folder / f"rank-{rank:05d}-of-{ranks:05d}.safetensors"
        metadata = None if sharding is None else {"sharding": sharding}
        save_file({"w": padded[rank * size : (rank + 1) * size].clone()}, file, metadata=metadata)
    return whole.view(2, 11)


@pytest.mark.parametrize("sharding", ["ZeRO", None])
@pytest.mark.parametrize("ranks", [1, 4, 11])
def test_master_weights_are_joined_in_the_order_of_ranks_without_their_padding(tmp_path, ranks, sharding) -> None:
    whole = masters_of(tmp_path, ranks, sharding)
    masters = Masters(tmp_path)
    assert masters.ranks == ranks
    assert "w" in masters
    assert "other" not in masters
    assert torch.equal(masters.tensor("w", whole.shape), whole)


@pytest.mark.parametrize("rank", [0, 2, 3])
def test_master_weights_that_lack_a_rank_are_refused(tmp_path, rank) -> None:
    masters_of(tmp_path, 4)
    (tmp_path / f"rank-{rank:05d}-of-00004.safetensors").unlink()
    with pytest.raises(ValueError, match="holds 3 of 4 files of master weights; copy the checkpoint"):
        Masters(tmp_path)


def test_master_weights_of_ranks_that_divide_layers_are_not_read_as_shards(tmp_path) -> None:
    masters_of(tmp_path, 4, "tensor parallel")
    assert Masters(tmp_path).ranks == 0
    assert "w" not in Masters(tmp_path)
    assert Masters(None).ranks == 0
