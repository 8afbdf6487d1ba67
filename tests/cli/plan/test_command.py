"""`fp8booster plan`: what it refuses, what it compares and what it shows."""

from __future__ import annotations

import dataclasses
import json
import os
import time
import warnings
from collections import Counter
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import SimpleNamespace

import psutil
import pytest
import torch
from rich.console import Console
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from typer.testing import CliRunner

from fp8booster.cli.main import app
from fp8booster.cli.plan import dry_run, planning
from fp8booster.cli.plan.configurations import GIB, GPUS, MASTERS, MOMENTS, Configuration, Gpu, configurations
from fp8booster.cli.plan.planning import _count, _end_with_the_command, as_record, show
from fp8booster.cli.train.errors import OutOfMemory
from fp8booster.cli.train.options import TrainOptions
from fp8booster.kernels import device
from fp8booster.monitor.memory import ACTIVATIONS, BACKWARD, FORWARD
from tests.programs import run_program


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["7b", "--gpu", "V100"], "no FP8 products"),
        (["7b", "--gpu", "H1000"], "H100-NVL"),
        (["7b", "--tokens", "5000"], "--sequence"),
        (["no-such-folder"], "no-such-folder"),
        (["7b", "--gpus", "3", "--plugin", "hybrid", "--tp", "2"], "3 processes"),
        (["7b", "--plugin", "gemini"], "docs/guide.md"),
        (["7b", "--gpus", "2", "--plugin", "moe", "--ep", "2"], "plan --plugin hybrid"),
        (["7b", "--plugin", "moe"], "plan --plugin hybrid"),
        (["7b", "--gpus", "2", "--plugin", "hybrid", "--sp", "2", "--sp-mode", "ring_attn"], "all_to_all"),
        (["7b", "--fp8-option", "nothing=1"], "nothing"),
        (["7b", "--gpus", "1000000000"], "65536"),
        (["7b", "--accumulate", "1000000000"], "4096"),
        (["7b", "--tokens", str(10**18)], "1073741824"),
        (["7b", "--checkpointing", "--checkpointed-layers", "33"], "the model has 32"),
        (["7b", "--gpu", "L40S", "--fp8-option", "scaling=blockwise"], "--gpu H100, H100-NVL, H200"),
        (["7b", "--gpu", "B200", "--fp8-option", "scaling=blockwise"], "scaling=rowwise"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_give(arguments: list[str], named: str) -> None:
    done = CliRunner().invoke(app, ["plan", *arguments])
    assert done.exit_code == 2
    assert named in done.output


COMPARED = ["BF16", "FP8", "+ no copies", "+ 8-bit moments", "+ recomputed inputs", "+ 8-bit activations"]
"""Of a run that asks for nothing of it, but checkpointing."""


def test_a_plan_as_json():
    done = run_program("fp8booster", "plan", "tiny", "--sequence", "512", "--tokens", "1024", "--gpus", "2", "--json")
    assert done.returncode == 0, done.stderr
    assert " counted: BF16" in done.stderr  # how far it is
    records = json.loads(done.stdout)
    assert [record["name"] for record in records] == [*COMPARED, "+ checkpointing"]
    for record in records:
        assert record["peak_bytes"] == max(sum(parts.values()) for parts in record["bytes_by_phase"].values())
        assert record["fits_on"] == "L40S"
    assert "--checkpointing" in records[-1]["command"]


def test_sums_of_gradients_in_8_bits_are_compared_where_micro_batches_are_reduced():
    sizes = {"model": "7b", "batch": 2, "sequence": 4096, "nproc": 2}
    for given, compared in (({}, False), ({"accumulate": 4}, True), ({"accumulate": 4, "stage": 1}, False)):
        found = {each.name: each.options for each in configurations(TrainOptions(**sizes, **given))}
        assert ("+ 8-bit gradient sums" in found) == compared
    assert "gradient_accumulation=8-bit" in configurations(TrainOptions(**sizes, accumulate=4))[-1].command


def plan(*sizes: float) -> list[Configuration]:
    """Configurations whose peaks are so many GiB, in FP8 but for the first."""
    found = configurations(TrainOptions(model="7b", batch=2, sequence=4096, nproc=2))
    return [
        Configuration(
            name=each.name,
            precision=each.precision,
            options=each.options,
            peaks={
                FORWARD: Counter({MASTERS: GIB, MOMENTS: int((size - 3) * GIB), ACTIVATIONS: 2 * GIB}),
                BACKWARD: Counter({MASTERS: GIB}),
            },
        )
        for each, size in zip(found, sizes, strict=False)
    ]


def shown(found: list[Configuration], gpu: Gpu) -> str:
    console = Console(width=100, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    show(found, gpu, console)
    return console.export_text()


def test_the_first_in_fp8_that_fits_has_its_command():
    text = shown(plan(60, 90, 70), GPUS["H100"])
    assert "fp8booster train --precision fp8 --model 7b --batch 2 --sequence 4096" in text
    assert "weight_copies.transposes=false" in text
    assert "87.0" in text  # moments
    assert "90.0" in text  # peak
    assert [each.fits_on for each in plan(60, 90, 70, 1000)] == ["H100", "H200", "H100", None]


def test_as_few_layers_are_checkpointed_as_must_be():
    found = planning._with_fewest_checkpointed(plan(100, 95, 92, 91, 91, 90, 58), GPUS["H100"])
    assert [each.name for each in found[-2:]] == ["+ checkpointing 15 of 32", "+ checkpointing"]
    assert found[-2].parts.total() == 75 * GIB  # of 79, with 4 left free
    assert "--checkpointed-layers 15" in " ".join(found[-2].command)
    for sizes in ((100, 95, 92, 91, 91, 70, 58), (100, 95, 92, 91, 91, 90, 80)):  # it fits without; nothing fits
        assert len(planning._with_fewest_checkpointed(plan(*sizes), GPUS["H100"])) == 7


def test_what_cannot_be_counted_is_named():
    configuration = Configuration(name="odd", precision="fp8", options=TrainOptions(), why_not="it is odd")
    assert "odd cannot be counted: it is odd" in shown([*plan(60, 60), configuration], GPUS["H100"])
    assert "Nothing of this fits" not in shown([configuration], GPUS["H100"])
    assert "more GPUs" in shown(plan(200, 200), GPUS["H100"])
    assert as_record([configuration])[0]["why_not"] == "it is odd"


def test_what_graphs_take_is_said_of_the_first_that_fits():
    def text(pair: str | None, peak: float | None, why: str | None = None) -> str:
        options = TrainOptions(model="7b", fp8_options=() if pair is None else (pair,))
        given = {
            "options": options,
            "peaks_with_graphs": None if peak is None else {FORWARD: Counter({MOMENTS: int(peak * GIB)})},
            "why_no_graphs": why,
        }
        return shown([dataclasses.replace(each, **given) for each in plan(60, 60)], GPUS["H100"])

    assert "take 2.5 GiB more, 62.5 at the peak, if the host takes longer" in text(None, 62.5)
    assert "take 2.5 GiB more, 62.5 at the peak." in text("cuda_graphs=true", 62.5)
    assert "H100 has no room for those of all layers" in text("cuda_graphs=true", 77)
    assert "No layer is captured into CUDA graphs: they are off." in text("cuda_graphs=false", None, "they are off")


def test_graphs_are_counted_as_the_options_say(monkeypatch):
    asked = []

    def footprint(options: TrainOptions, precision: str, _: int) -> dict[str, Counter[str]]:
        asked.append(options.fp8_options)
        captured = "cuda_graphs=true" in options.fp8_options
        if captured and options.plugin == "fsdp":
            raise dry_run.NotCaptured("FSDP gathers")
        return {FORWARD: Counter({MASTERS: 3 if captured else 2})}

    monkeypatch.setattr(dry_run, "footprint", footprint)

    def found(**given: object) -> Configuration:
        return _count(Configuration(name="", precision="fp8", options=TrainOptions(**given)), GIB)

    for pairs in ((), ("cuda_graphs=true",)):
        counted = found(fp8_options=pairs)
        assert (counted.parts.total(), counted.total_with_graphs) == (2, 3)
        assert counted.options.fp8_options == pairs
        assert as_record([counted])[0]["peak_bytes_with_graphs"] == 3
    assert asked == [("cuda_graphs=false",), ("cuda_graphs=true",)] * 2
    assert "off" in found(fp8_options=("cuda_graphs=false",)).why_no_graphs
    assert as_record([found(plugin="fsdp")])[0]["why_no_graphs"] == "FSDP gathers"


def test_names_with_brackets_are_shown_as_they_are():
    options = TrainOptions(model="models [b]")
    found = [dataclasses.replace(each, options=options) for each in plan(60, 60)]
    odd = Configuration(name="odd", precision="fp8", options=options, why_not="it reads [/tmp/x] and [red]")
    text = shown([*found, odd], GPUS["H100"])
    assert "odd cannot be counted: it reads [/tmp/x] and [red]" in text
    assert "--model 'models [b]'" in text


def test_settings_that_the_user_gave_stay():
    given = TrainOptions(fp8_options=("weight_copies.transposes=true",), checkpointing=True, stage=1)
    found = configurations(given)
    assert [each.name for each in found] == COMPARED
    assert found[2].options.fp8_options == ("weight_copies.transposes=true", "weight_copies.high_precision=false")
    assert not any("weights_in_16_bits" in pair for pair in _last_options(TrainOptions(plugin="ddp")))


def test_copies_that_a_plugin_does_not_keep_are_not_left_out():
    assert "+ no copies" in [each.name for each in configurations(TrainOptions(plugin="ddp"))]
    assert "+ no copies" not in [each.name for each in configurations(TrainOptions(plugin="fsdp"))]


def test_a_level_leaves_what_is_not_in_it_yet():
    found = configurations(TrainOptions(level="O2"))
    assert [each.name for each in found] == [
        "BF16",
        "FP8, O2",
        "+ no copies",
        "+ recomputed inputs",
        "+ 8-bit activations",
        "+ checkpointing",
    ]
    assert found[0].options.level is None
    assert "--level O2" in " ".join(found[1].command)
    lean = configurations(TrainOptions(level="lean"))
    assert [each.name for each in lean[1:]] == ["FP8, lean", "+ recomputed inputs", "+ checkpointing"]


def _last_options(options: TrainOptions) -> tuple[str, ...]:
    return configurations(options)[-1].options.fp8_options


@pytest.fixture
def explained(monkeypatch, capsys):
    """`explained(plan, **options)`: what is said of a run in FP8 that ran out of memory, and what was planned."""

    def explain(found: list[Configuration] | Exception, **options: object) -> tuple[str, list[tuple[int, int, float]]]:
        asked = []

        def make_plan(options: TrainOptions, tokens: int, gpu: Gpu) -> list[Configuration]:
            asked.append((options.nproc, tokens, gpu.memory))
            if isinstance(found, Exception):
                raise found
            return found

        monkeypatch.setattr(planning, "make_plan", make_plan)
        task = SimpleNamespace(options=TrainOptions(batch=2, sequence=4096, nproc=2, **options), precision="fp8")
        planning.explain(OutOfMemory("A GPU ran out of memory", 80 * GIB, task))
        return capsys.readouterr().err, asked

    return explain


def test_a_run_out_of_memory_shows_what_takes_it(explained):
    text, asked = explained(plan(60, 90, 70))
    assert asked == [(2, 8192, 80)]
    assert "activ." in text
    assert "weight_copies.transposes=false" in text.replace("\n", "")
    assert "BF16" not in text


def test_a_run_out_of_memory_that_cannot_be_counted_is_told_why(explained):
    text, _ = explained(TypeError("this model reads values"))
    assert "could not be counted: this model reads values" in text
    text, asked = explained(plan(60, 90), lora=8)  # most of its weights are frozen
    assert "--lora" in text
    assert not asked


def test_a_run_on_several_machines_is_explained_with_all_its_ranks(explained, monkeypatch):
    for name, value in (("RANK", "8"), ("WORLD_SIZE", "16")):
        monkeypatch.setenv(name, value)
    assert explained(plan(60, 90))[1] == [(16, 8192, 80)]


def test_a_model_that_reads_values_is_refused_in_a_sentence(monkeypatch):
    def reads(*_: object) -> None:
        raise DynamicOutputShapeException(torch.ops.aten.nonzero.default)

    monkeypatch.setattr(dry_run, "footprint", reads)
    counted = _count(Configuration(name="odd", precision="fp8", options=TrainOptions()), GIB)
    assert "nonzero" in counted.why_not
    assert "transformers 5" in counted.why_not


def test_this_machines_gpu_needs_no_fp8_for_a_plan_of_another(monkeypatch):
    monkeypatch.setattr(device, "why_no_fp8", lambda _: "this GPU is too old")
    found = [Configuration(name=name, precision=name.lower(), options=TrainOptions()) for name in ("BF16", "FP8")]
    monkeypatch.setattr(planning, "counted", lambda *_: found)
    assert planning.make_plan(TrainOptions(model="tiny", nproc=1), None, GPUS["H100"]) == found


def test_what_colossalai_advertises_is_no_part_of_a_plan(monkeypatch, recwarn):
    def advertise(*_: object) -> list[Configuration]:
        warnings.warn("Please install apex", stacklevel=1)
        return [Configuration(name=name, precision=name.lower(), options=TrainOptions()) for name in ("BF16", "FP8")]

    monkeypatch.setattr(planning, "counted", advertise)
    planning.make_plan(TrainOptions(model="tiny", nproc=1), None, GPUS["H100"])
    assert not list(recwarn)


def test_commands_are_those_that_train_takes():
    found = configurations(TrainOptions(model="1b", level="O2", fp8_options=("fused=false",)))
    assert found[0].command == ["fp8booster", "train", "--precision", "bf16", "--model", "1b"]
    assert not any("recompute" in word or "saved_activations" in word for each in found for word in each.command)
    assert "weight_copies.transposes=false" in found[2].command


def test_blockwise_scales_fit_on_hopper_alone():
    small = Counter({MASTERS: GIB})
    for pairs, wanted in (((), "L40S"), (("scaling=blockwise",), "H100")):
        options = TrainOptions(fp8_options=pairs)
        found = Configuration(name="", precision="fp8", options=options, peaks={FORWARD: small})
        assert found.fits_on == wanted
        assert dataclasses.replace(found, precision="bf16").fits_on == "L40S"


def _counting(told: Connection) -> None:
    _end_with_the_command()
    told.send(os.getpid())
    time.sleep(60)


def _command(told: Connection) -> None:
    get_context("fork").Process(target=_counting, args=(told,)).start()
    time.sleep(60)


def test_counts_end_with_a_command_that_is_killed():
    context = get_context("fork")
    heard, told = context.Pipe(duplex=False)
    command = context.Process(target=_command, args=(told,))
    command.start()
    assert heard.poll(30)
    counting = psutil.Process(heard.recv())
    command.kill()
    psutil.wait_procs([counting], timeout=30)
    assert not counting.is_running() or counting.status() == psutil.STATUS_ZOMBIE
