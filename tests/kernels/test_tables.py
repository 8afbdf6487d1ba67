"""Tables of a launch over many tensors are made once for tensors that lie where others have lain."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fp8booster import formats
from fp8booster.kernels import shard_cast_triton, tables_triton
from fp8booster.kernels.scales import amaxes_of
from fp8booster.kernels.shard_cast import cast_shards, unpack
from fp8booster.kernels.tables_triton import launch_over

on_gpu = pytest.mark.gpu


@pytest.fixture(autouse=True)
def none_remembered() -> Iterator[None]:
    tables_triton._known_parts.cache_clear()
    yield
    tables_triton._known_parts.cache_clear()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[list]:
    """The rows of each table that is made; kernels do nothing."""
    rows: list[list] = []
    table = tables_triton._table
    monkeypatch.setattr(tables_triton, "_table", lambda of, *rest: (rows.append(of.tolist()), table(of, *rest))[1])
    monkeypatch.setattr(tables_triton, "launch", lambda *arguments, **options: None)
    return rows


def over(tensors: list[Tensor], programs=shard_cast_triton._parts_of) -> None:
    launch_over(shard_cast_triton.cast_shards_kernel, [tensors], [list(map(Tensor.numel, tensors))], programs)


def test_a_table_is_made_again_for_other_places_sizes_types_programs_and_streams(made, monkeypatch) -> None:
    whole = torch.zeros(3 * 4096)
    parts = list(whole.split(4096))
    over(parts)
    over(list(whole.split(4096)))  # other objects in the same places
    assert len(made) == 1
    assert [row[0] for row in made[0]] == [part.data_ptr() for part in parts]
    over(parts[::-1])
    over([part[:100] for part in parts])
    over([part.view(torch.int32) for part in parts])
    over(parts, lambda counts: counts)
    assert len(made) == 5
    monkeypatch.setattr(tables_triton, "current_stream", lambda tensor: 7)
    over(parts)
    over(parts)
    assert len(made) == 6


def test_what_moves_is_in_no_table_but_tells_entries_apart(made, monkeypatch) -> None:
    launched: list[tuple] = []
    monkeypatch.setattr(tables_triton, "launch", lambda *arguments, **options: launched.append((arguments, options)))
    parts = list(torch.zeros(3 * 4096).split(4096))

    def move(*moving: Tensor) -> None:
        launched.clear()
        sizes = [list(map(Tensor.numel, parts))]
        programs = shard_cast_triton._parts_of
        launch_over(shard_cast_triton.cast_shards_kernel, [parts], sizes, programs, moving=[moving])

    for _ in range(2):
        here = [torch.zeros(4096) for _ in parts]
        move(*here)
        [(arguments, options)] = launched
        assert arguments[2][-1] is here[0]
        assert options["ALIGNED"]
    assert len(made) == 1
    assert [row[:-1] for row in made[0]] == [[each.data_ptr(), 4096, place] for place, each in enumerate(parts)]
    move(here[0], torch.zeros(4097)[1:], here[2].bfloat16())
    assert [options["ALIGNED"] for _, options in launched] == [True, False, True]
    assert len(made) == 4


def test_a_capture_neither_reads_nor_remembers_tables(made, monkeypatch) -> None:
    tensors = [torch.zeros(4096)]
    captured = []

    def table(rows, runs, device) -> tuple[Tensor, Tensor]:
        captured.append(rows)
        return torch.zeros(1), torch.zeros(1)

    over(tensors)
    monkeypatch.setattr(tables_triton, "_captured_table", table)
    with monkeypatch.context() as capturing:
        capturing.setattr(tables_triton, "is_captured", lambda like: True)
        over(tensors)
        over(tensors)
    over(tensors)
    assert (len(made), len(captured)) == (1, 2)


def cast_of(shards: list[Tensor], outs: list[Tensor], inverse_scales: list[Tensor]) -> None:
    """Leave in each shard what its FP8 values decode to."""
    cast_shards(shards, torch.stack(amaxes_of(shards)), outs, inverse_scales)
    unpack([out.view(1, -1) for out in outs], inverse_scales, [None] * len(outs), [each.view(1, -1) for each in shards])


def expected(shards: list[Tensor]) -> list[Tensor]:
    """What `cast_of` leaves in copies of shards, by the definitions."""
    copies = [shard.cpu().clone() for shard in shards]
    cast_of(copies, *places_for(copies))
    return copies


def places_for(shards: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """FP8 values and inverse scales."""
    outs = [torch.empty_like(shard, dtype=formats.E4M3) for shard in shards]
    return outs, [torch.empty((), device=shard.device) for shard in shards]


@on_gpu
def test_tensors_that_move_are_found_where_they_are() -> None:
    torch.manual_seed(0)
    sizes = (4096, 100, 70000)
    held = []  # so that none lies where another has lain
    for _ in range(3):
        shards = [torch.randn(size, device="cuda") for size in sizes]
        places = places_for(shards)
        held += [shards, places]
        for _ in range(3):  # in the same places, by the table of before
            for shard in shards:
                shard.normal_()
            wanted = expected(shards)
            cast_of(shards, *places)
            for found, want in zip(shards, wanted, strict=True):
                assert torch.equal(found.cpu(), want)
    assert tables_triton._known_parts.cache_info().hits > 0


@on_gpu
def test_a_stream_does_not_read_a_table_that_another_has_yet_to_copy() -> None:
    torch.manual_seed(0)
    streams, held = [torch.cuda.Stream(), torch.cuda.Stream()], []
    # the first time, of which nothing is expected, kernels are compiled, and the driver is asked for memory, which may
    # wait for the GPU
    for is_first in (True, False):
        shards = [torch.randn(2**16, device="cuda") for _ in range(8)]
        places = places_for(shards)
        wanted = expected(shards)
        torch.cuda.synchronize()
        with torch.cuda.stream(streams[0]):
            torch.cuda._sleep(400_000_000)  # its copy of the table waits for about a fifth of a second
            cast_of(shards, *places)
        with torch.cuda.stream(streams[1]):
            cast_of(shards, *places)
            found = [shard.cpu() for shard in shards]  # the host waits for this stream alone
        waited = streams[0].query()
        torch.cuda.synchronize()
        held.append((shards, places))  # so that the second ones lie elsewhere
        assert is_first or (not waited and all(map(torch.equal, found, wanted)))
