from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks import dispatch
from benchmarks.transfers.calls import relative_error
from benchmarks.transfers.one_sided import ONE_SIDED
from benchmarks.transfers.tokens import AS_CAST, COMBINE, DISPATCH, ENCODED, PLAIN, Mixture, Work, ways
from fp8booster.cli.doctor.calls import Bench
from fp8booster.comm import Encoding
from fp8booster.comm.threshold import group_or_all
from tests.distributed import ranks, run_ranks

MIXTURE = Mixture(tokens=128, hidden=256, experts=16, top_k=4)
SIZES = [f"--{name.replace('_', '-')}={size}" for name, size in MIXTURE._asdict().items()]
ROW_BYTES = {PLAIN: 512, AS_CAST: 256, ENCODED: Encoding().layout(256).bytes}


def run(*arguments: str) -> object:
    app = typer.Typer()
    app.command()(dispatch.main)
    return CliRunner().invoke(app, list(arguments))


def measure(folder: str, device: str) -> None:
    options = ["--device", device, "--rounds", "2", "--sample-ms", "0.1", *SIZES]
    result = run(*options, "--out", folder, "--json", f"{folder}/result.json")
    assert result.exit_code == 0, result.output


def rows_between_ranks(world_size: int, uneven: float, once: bool) -> torch.Tensor:
    """[ranks, ranks], rows from each for the experts of each; `once`: tokens."""
    chosen = [MIXTURE.choose(uneven, world_size, rank) // (MIXTURE.experts // world_size) for rank in range(world_size)]
    of_ranks = [torch.stack([owners == rank for rank in range(world_size)], 2) for owners in chosen]
    return torch.stack([each.any(1).sum(0) if once else each.sum((0, 1)) for each in of_ranks])


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_variant_is_measured_and_written_by_the_first_rank(tmp_path: Path, world_size: int) -> None:
    run_ranks(measure, world_size, str(tmp_path), "cpu", initialize=False)
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["head"]["ranks"] == str(world_size)
    assert found["left_out"] == {ONE_SIDED: "RuntimeError: torch finds no NVSHMEM"}
    records = found["tables"]["rows"]
    assert [(r["uneven"], r["phase"], r["variant"]) for r in records] == [
        (uneven, phase, variant)
        for uneven in (1, 4)
        for phase in (DISPATCH, COMBINE)
        for variant in (PLAIN, AS_CAST, ENCODED)
    ]
    for record in records:
        assert len(record["ms"]["values"]) == 2
        form = record["variant"]
        rows, of_plain = (
            rows_between_ranks(world_size, record["uneven"], once=once) for once in (form != PLAIN, False)
        )
        if world_size > 1:
            assert (rows.sum() < of_plain.sum()) == (form != PLAIN)
        if record["phase"] == COMBINE:
            rows, form = rows.T, PLAIN if form == PLAIN else ENCODED  # in which rows come back, however they went
        leave, row_bytes = rows.sum(1) - rows.diag(), ROW_BYTES[form]
        if record["phase"] == DISPATCH and form != PLAIN:
            row_bytes += 3 * 4 * MIXTURE.top_k  # choices and weights
        assert record["bytes_sent"]["most"] == leave.max() * row_bytes
        assert record["bytes_sent"]["mean"] == leave.double().mean() * row_bytes
        assert record["rows_received"] == {"most": rows.sum(0).max(), "least": rows.sum(0).min()}
        if record["variant"] == PLAIN:
            assert record["ratio"]["median"] == 1
            reach = rows.sum(0) - rows.diag()
            busiest = max(leave.max(), reach.max()).item() * row_bytes
            assert record["bf16_bytes_per_second"] == pytest.approx(busiest / record["ms"]["median"] * 1e3)
            assert record["error"] < 2**-8
        else:
            assert 2**-8 < record["error"] < 2**-4
    counts = found["tables"]["counts"]
    assert [(r["uneven"], r["shape"]) for r in counts] == [(u, [world_size, 16 // world_size]) for u in (1, 4)]
    (markdown,) = tmp_path.glob(f"dispatch-{world_size}_*.md")
    assert "Left out: BF16, one-sided" in markdown.read_text()


@pytest.mark.gpu
def test_it_measures_a_gpu(tmp_path: Path) -> None:
    run_ranks(measure, 1, str(tmp_path), "cuda", initialize=False)
    records = json.loads((tmp_path / "result.json").read_text())["tables"]["rows"]
    assert all(r["error"] < (2**-8 if r["variant"] in (PLAIN, ONE_SIDED) else 2**-4) for r in records)


@ranks(1, 2, 4)
def test_what_comes_back_are_the_tokens_times_the_sums_of_their_weights() -> None:
    work = Work(MIXTURE, 4.0, Bench(group_or_all(None), torch.device("cpu")))
    variants = ways(work)
    expected = work.tokens.float() * work.weights.float().sum(1, keepdim=True)
    arrived = variants[DISPATCH][PLAIN].values(variants[DISPATCH][PLAIN].call())
    assert len(arrived) == sum(work.received)
    for name in (PLAIN, AS_CAST, ENCODED):
        bound = 2**-8 if name == PLAIN else 2**-4
        for phase, exact in ((DISPATCH, arrived), (COMBINE, expected)):
            way = variants[phase][name]
            assert relative_error(way.values(way.call()), exact) < bound, (phase, name)


@pytest.mark.parametrize("world_size", [2, 8])
def test_the_busiest_rank_has_as_many_times_the_rows_as_asked_for(world_size: int) -> None:
    mixture = Mixture(tokens=2048, hidden=1, experts=64, top_k=4)
    chosen = mixture.choose(4.0, world_size, 0)
    assert (chosen.sort(1).values.diff(dim=1) > 0).all()  # no expert twice
    assert not torch.equal(chosen, mixture.choose(4.0, world_size, 1))
    rows = (chosen // (64 // world_size)).flatten().bincount(minlength=world_size)
    assert rows[0] / rows[-1] == pytest.approx(4, rel=0.1)
    assert (rows.diff() < 0).all()


@pytest.mark.parametrize(("experts", "top_k", "uneven"), [(15, 2, 1.0), (16, 2, 0.5), (4, 3, 4.0)])
def test_experts_that_cannot_be_chosen_are_refused(experts: int, top_k: int, uneven: float) -> None:
    with pytest.raises(ValueError, match="to 1"):
        Mixture(8, 32, experts, top_k).choose(uneven, 2, 0)


def test_without_torchrun_one_sentence_and_exit_code_2(monkeypatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    result = run("--device", "cpu")
    assert result.exit_code == 2
    assert "torchrun" in result.output
    assert len(result.output.strip().splitlines()) == 1
