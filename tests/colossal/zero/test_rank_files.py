"""Which files of ranks are taken, which are refused, and what of them is whose."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from fp8booster.colossal.zero import rank_files
from fp8booster.colossal.zero.rank_files import _Written
from fp8booster.optim import AdamW
from tests.colossal.zero.runs import Layers, features, gathered, masters, step, wire
from tests.distributed import ranks, shared_folder
from tests.plugins.training import Boosted, assert_equal, boost

ZERO, TENSOR_PARALLEL = "ZeRO", "tp_size=2, pp_size=1, ZeRO"


def written(
    folder: Path, monkeypatch: pytest.MonkeyPatch, rank: int = 1, ranks: int = 2, sharding: str = ZERO
) -> _Written:
    """What a rank of so many reads of a folder."""
    monkeypatch.setattr(rank_files, "_place", lambda optimizer: (rank, ranks))
    monkeypatch.setattr(rank_files, "_sharding", lambda optimizer: sharding)
    return _Written.by_all(folder, SimpleNamespace(), "master weights")


def write(folder: Path, rank: int, ranks: int, sharding: str = ZERO, writer: str | None = None) -> Path:
    file = folder / f"rank-{rank:05d}-of-{ranks:05d}.safetensors"
    metadata = {"sharding": sharding, "rank": writer or f"{rank} of {ranks}"}
    save_file({"weight": torch.full((4,), float(rank))}, file, metadata=metadata)
    return file


@pytest.mark.parametrize(
    "there", [[], [(1, 2)], [(0, 2)], [(0, 2), (1, 3)], [(0, 3), (2, 3)], [(0, 1), (0, 2), (1, 2)]], ids=str
)
def test_a_set_of_files_that_is_not_whole_is_refused(there, tmp_path, monkeypatch) -> None:
    for rank, of in there:
        write(tmp_path, rank, of)
    with pytest.raises(FileNotFoundError, match=rf"holds {len(there)} of \d files of master weights; copy the whole"):
        written(tmp_path, monkeypatch)


def test_as_many_ranks_read_their_own_file_and_others_all(tmp_path, monkeypatch) -> None:
    files = [write(tmp_path, rank, 2) for rank in range(2)]
    for rank in range(2):
        own = written(tmp_path, monkeypatch, rank=rank)
        assert own.files == [files[rank]]
        assert not own.resharded
    for other in (1, 3):
        found = written(tmp_path, monkeypatch, rank=0, ranks=other)
        assert found.files == files
        assert found.resharded


@pytest.mark.parametrize(
    ("of_files", "of_run", "ranks"),
    [(ZERO, TENSOR_PARALLEL, 2), (TENSOR_PARALLEL, ZERO, 2), *[(TENSOR_PARALLEL,) * 2 + (4,)]],
)
def test_masters_that_were_divided_otherwise_are_refused(of_files, of_run, ranks, tmp_path, monkeypatch) -> None:
    for rank in range(2):
        write(tmp_path, rank, 2, of_files)
    with pytest.raises(
        ValueError, match=f"were written by 2 ranks with {of_files}, and this run has {ranks} with {of_run}"
    ):
        written(tmp_path, monkeypatch, ranks=ranks, sharding=of_run)


def test_masters_of_tensor_parallelism_are_read_by_as_many_ranks(tmp_path, monkeypatch) -> None:
    files = [write(tmp_path, rank, 2, TENSOR_PARALLEL) for rank in range(2)]
    assert written(tmp_path, monkeypatch, sharding=TENSOR_PARALLEL).files == files[1:]


@pytest.mark.parametrize("renamed", [0, 1])
def test_a_file_that_another_rank_wrote_is_refused_by_every_rank(renamed, tmp_path, monkeypatch) -> None:
    for rank in range(2):
        write(tmp_path, rank, 2, writer="2 of 3" if rank == renamed else None)
    for rank in range(2):
        with pytest.raises(ValueError, match="holds the master weights of rank 2 of 3: files were renamed or mixed"):
            written(tmp_path, monkeypatch, rank=rank)


@pytest.mark.parametrize(
    ("shapes", "told"),
    [
        ({"weight": (4,), "bias": (4,)}, r"bias is missing there and \(4,\) here"),
        ({}, r"weight is \(4,\) there and missing here"),
        ({"weight": (5,)}, r"weight is \(4,\) there and \(5,\) here"),
        ({"weight": (2, 2)}, r"weight is \(4,\) there and \(2, 2\) here"),
    ],
)
def test_a_file_of_other_tensors_is_refused(shapes, told, tmp_path) -> None:
    file = write(tmp_path, 0, 1)
    one = _Written([file], {"weight"}, 1, 0, 1)
    with one.opened({"weight": torch.Size([4])}) as (shards,):
        assert shards.get_tensor("weight").tolist() == [0.0] * 4
    expected = {name: torch.Size(shape) for name, shape in shapes.items()}
    with pytest.raises(ValueError, match=f"belongs to another model or run: {told}"), one.opened(expected):
        pass


@pytest.mark.parametrize(("by", "ranks"), [(3, 2), (2, 3), (3, 4), (1, 4), (4, 1)])
@pytest.mark.parametrize("values", [10, 12])
def test_parts_are_cut_anew_for_another_number_of_ranks(values, by, ranks) -> None:
    whole = torch.arange(1.0, values + 1)
    size, own_size = -(-values // by), -(-values // ranks)
    parts = list(torch.cat([whole, torch.full((size * by - values,), -1.0)]).split(size))  # padded with whatever
    working, master = torch.empty(values), torch.empty(own_size)
    found = []
    for rank in range(ranks):
        reader = _Written([], set(), by, rank, ranks)
        assert reader.shape(working, master) == (size,)
        found.append(reader.own_part(parts, working, master))
        assert found[-1].shape == (own_size,)
    assert torch.equal(torch.cat(found)[:values], whole)
    assert not torch.cat(found)[values:].any()
    as_many = _Written([], set(), ranks, 0, ranks)
    assert as_many.shape(working, master) == master.shape
    assert as_many.own_part(parts[:1], working, master) is parts[0]


def run_of(optimizer: type, dropped: set[int]) -> Boosted:
    run = boost(wire(), Layers(64, 64, 64), optimizer=optimizer)
    run.model.unwrap().dropped = dropped
    return run


def states_of(run: Boosted) -> dict[str, dict[str, torch.Tensor]]:
    """This rank's, decoded, by name."""
    of_masters = {id(master): name for name, _, master in rank_files._pairs(run.model.unwrap(), run.optimizer)}
    return {
        of_masters[id(master)]: {name: torch.as_tensor(value).clone() for name, value in state.items()}
        for master, state in run.optimizer.optim.state.items()
        if state
    }


@ranks(2)
@pytest.mark.parametrize("reader", [AdamW, torch.optim.AdamW])
def test_moments_come_back_and_those_that_are_not_there_stay_away(reader: type) -> None:
    writer, other = run_of(AdamW, {1}), run_of(reader, {1})
    for _ in range(2):
        step(writer, features())
    folder = shared_folder(f"moments of {reader.__module__}")
    rank_files.save_moments(writer.model.unwrap(), writer.optimizer, folder)
    rank_files.save_master_weights(writer.model.unwrap(), writer.optimizer, shared_folder(f"{folder.name}, masters"))
    dist.barrier()
    rank_files.load_moments(other.model.unwrap(), other.optimizer, folder)
    expected, found = states_of(writer), states_of(other)
    assert found.keys() == expected.keys() == {"layers.0.weight", "layers.0.bias"}
    for name, state in expected.items():
        assert state["step"] == 2
        for entry, value in state.items():
            torch.testing.assert_close(found[name][entry], value, rtol=0, atol=0)
    dist.barrier()
    name, layer = next(gathered(other))
    before = layer.weight.detach().clone()
    rank_files.load_master_weights(other.model.unwrap(), other.optimizer, shared_folder(f"{folder.name}, masters"))
    assert_equal(masters(writer), masters(other))
    assert not torch.equal(before, layer.weight), name  # it was sent anew
    if reader is AdamW:
        for run in (writer, other):
            run.model.unwrap().dropped = set()
            step(run, features())
        assert_equal(masters(writer), masters(other))
