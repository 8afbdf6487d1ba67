"""The runs of `benchmarks.convergence`, and the text that they train and are evaluated on."""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
import sysconfig
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from email.message import Message
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from benchmarks.training import campaign, kinds
from benchmarks.training.campaign import places, work_off
from benchmarks.training.convergence import Findings
from benchmarks.training.data import batches, first_read, gather_text, held_out, tokens_of
from benchmarks.training.job import Job
from benchmarks.training.kinds import kind_of_text
from benchmarks.training.runs import HELD_OUT, NOT_FINITE, Run, RunFolder
from benchmarks.training.samples import recorded
from benchmarks.training.variants import BF16, VARIANTS, chosen, forwards
from fp8booster.cli.train.data import load_tokenizer
from fp8booster.training.batches import Replica
from tests.distributed import TEST_SECONDS
from tests.programs import run_program


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    (folder / "text.txt").write_text("\n".join(f"{i} times {i} is {i * i}." for i in range(1500)))
    return folder / "text.txt"


def train(runs: Sequence[Run], *, until: float = math.inf, at_once: int = 2) -> dict[str, str | None]:
    """Work them off, by name why each failed."""
    outcomes: dict[str, str | None] = {}
    work_off(
        runs,
        places(at_once, 1, "cpu"),
        until=until,
        limit_s=TEST_SECONDS,
        saves=math.isfinite(until),
        before_run=lambda run: None,
        after_run=lambda run, reason: outcomes.update({run.name: reason}),
    )
    return outcomes


def test_runs_go_on_bit_for_bit(text, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(text.parent / "cache"))
    job = Job(
        model="micro",
        sequence=32,
        steps=12,
        warm_up=0,
        lr=1e-2,
        max_norm=0.0,
        held_out=0.1,
        device="cpu",
        fp8_options=("always=true",),
    )
    tokens = tokens_of(str(text), "text", job)
    (other := tmp_path / "other.txt").write_text("eleven and twelve are twenty-three.\n" * 300)
    evaluated = [kind_of_text(each, str(text), tokens, "text") for each in (f"words={other}", "seen")]
    job = replace(job, tokens=tokens, kinds=tuple(evaluated), forwards=forwards(["fp8", "fp8-rowwise"], job))
    variants = chosen(["bf16", "fp8", "fp8-delayed", "fp8-lean"], [])
    watched = replace(job, evaluate_every=5, record=1)
    whole, parts = (Run.of(tmp_path / name, variants, [3], watched) for name in ("whole", "parts"))
    unwatched = Run.of(tmp_path / "unwatched", variants, [3], job)
    (unevaluated,) = Run.of(tmp_path / "unevaluated", variants[-1:], [3], replace(job, record=1))
    tiny, broken, between = (
        Run.of(tmp_path / name, variants[:1], [3], replace(job, **changes))
        for name, changes in (
            ("tiny", {"gradient_scale": 2.0**-20}),
            ("broken", {"outlier": (5, 1e38)}),
            ("between", {"fp32_start": True}),
        )
    )
    assert set(train([*unwatched, unevaluated, *tiny, *broken, *between]).values()) == {None}
    # these are saved before they are evaluated, and the others are not
    assert set(train(whole, until=time.time() + TEST_SECONDS).values()) == {None}
    no_layer = (("ends", ("high_precision_ends=1", "emulate=true")),)
    refused = Run.of(tmp_path / "refused", variants[:1], [3], replace(job, forwards=no_layer))
    assert "no layer of the model would compute in FP8" in str(*train(refused).values())
    assert not refused[0].folder.losses()
    # late after the last step, a run evaluates when it is begun again
    for steps, ended in ((5, False), (10, False), (12, False), (12, True)):
        with monkeypatch.context() as patch:
            # it is late for the runs as soon as they look, not for who begins them
            patch.setattr(campaign, "time", Mock(wraps=time, time=lambda: 0.0))
            train(parts, until=1.0)
        assert [len(run.folder.losses()) for run in parts] == [steps] * len(parts)
        assert all((run.folder.checkpoint_bytes > 0) == (not ended) for run in parts)
        assert all((run.folder.end() is not None) == ended for run in parts)
    for one, other, plain in zip(whole, parts, unwatched, strict=True):
        assert one.folder.losses() == plain.folder.losses()  # to evaluate and to record changes nothing
        assert one.folder.end() == plain.folder.end()
        curves = one.folder.curves()
        assert other.folder.curves() == curves
        assert [tokens for tokens, _, _ in curves[HELD_OUT]] == [5 * 64, 10 * 64, 12 * 64]
        assert list(curves) == [HELD_OUT, "words", "seen"]
        assert curves[HELD_OUT][0][1] > curves[HELD_OUT][-1][1] > 0 < curves[HELD_OUT][0][2]
        assert recorded(one.folder.scales, 12) == recorded(other.folder.scales, 12)
        assert one.folder.scales.exists() == (one.variant.label != BF16)
        assert one.folder.losses() == other.folder.losses()
        assert one.folder.end() == other.folder.end()
        assert one.folder.end()["end"] == HELD_OUT
        assert not other.folder.checkpoints.exists()
    rows = recorded(whole[-1].folder.scales, 12)
    assert rows == recorded(unevaluated.folder.scales, 12)  # evaluations are not recorded
    assert sum(row["samples"] for row in rows if row["role"] == "input") == 12
    bf16, _, _, lean = (run.folder.end() for run in whole)
    assert bf16["held_out"]["own"] == bf16["held_out"]["BF16"]  # the same weights in the same precision
    assert bf16["held_out"]["own"] < whole[0].folder.losses()[0]
    assert lean["held_out"]["own"] == pytest.approx(lean["held_out"]["BF16"], rel=1e-2)
    assert lean["held_out"]["own"] != lean["held_out"]["BF16"]
    for end in (bf16, lean):  # the weights of either, in FP8 as neither trains
        for text in (end["held_out"], *end["kinds"].values()):
            assert text["FP8, rowwise"] == pytest.approx(text["BF16"], rel=1e-2)
            assert len({text[way] for way in ("BF16", "FP8", "FP8, rowwise")}) == 3
    assert "14 of 15" in lean["layers"]
    assert bf16["kinds"]["words"]["own"] > bf16["held_out"]["own"] + 1  # it has not seen such text
    assert bf16["kinds"]["seen"]["own"] < bf16["kinds"]["words"]["own"] - 1
    assert lean["kinds"]["words"]["own"] == pytest.approx(bf16["kinds"]["words"]["own"], rel=0.1)
    assert lean["kinds"] != bf16["kinds"]

    # masters between 16-bit values begin with the same weights in 16 bits, and go elsewhere
    (run,) = between
    first, *rest = run.folder.losses()
    assert first == whole[0].folder.losses()[0]
    assert rest != whole[0].folder.losses()[1:]
    assert rest == pytest.approx(whole[0].folder.losses()[1:], rel=0.05)

    # gradients a million times smaller train as before, and what is not finite ends a run
    (run,) = tiny
    assert run.folder.losses() == whole[0].folder.losses()
    (run,) = broken
    assert run.folder.end() == {"end": NOT_FINITE, "at_step": 1}
    found, left_out = Findings.of([*whole, *broken])
    assert found.not_finite == {3: {BF16: 1}}
    assert left_out == {"seed 3, BF16": "its loss is not finite at step 1"}

    # an FP8 run without a layer in FP8 is told of
    (none,) = Run.of(tmp_path / "none", [VARIANTS["fp8"]], [3], job)
    none.folder.path.mkdir(parents=True)
    none.folder.append(end=HELD_OUT, held_out={"own": 4.0, "error": 0.1}, kinds={}, layers=None)
    assert Findings.of([none, whole[0]])[0].facts == {"FP8": "no layer, as their logs say why"}

    # the folder of a run is its own
    (other,) = Run.of(tmp_path / "whole", variants[:1], [3], replace(job, lr=1e-3))
    with pytest.raises(ValueError, match="holds a run that differs in record, evaluate_every, lr; give another --runs"):
        train([other])


def test_masters_between_16_bits_round_to_the_same_16_bits() -> None:
    from benchmarks.training.colossal import put_between_16_bits

    torch.manual_seed(0)
    values = torch.cat([torch.randn(10000), 2.0 ** torch.arange(-20.0, 4.0), torch.zeros(3)]).bfloat16()
    masters = values.float()
    put_between_16_bits([masters])
    assert torch.equal(masters.bfloat16(), values)
    moved = masters != values.float()
    assert moved[: len(values) - 3].float().mean() > 0.99
    assert not moved[-3:].any()
    # evenly, up to half a spacing, which is at least 2^-9 of a value
    apart = ((masters - values.float()) / values.float()).abs()[moved]
    assert 2.0**-9 < apart.max() <= 2.0**-8
    assert apart.mean() > 2.0**-11


def test_runs_share_the_gpus(monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")

    def gpus(at_once: int | None, ranks: int) -> list[str]:
        return [place.environment["CUDA_VISIBLE_DEVICES"] for place in places(at_once, ranks, "cuda")]

    assert gpus(3, 1) == ["4", "7", "4"]
    assert gpus(None, 1) == ["4", "7"]
    assert gpus(2, 2) == ["4,7", "4,7"]
    with pytest.raises(ValueError, match="--processes is 3, and there are 2 GPUs; give at most as many"):
        places(1, 3, "cuda")


def test_steps_after_the_checkpoint_are_forgotten(tmp_path) -> None:
    folder = RunFolder(tmp_path)
    folder.append(step=10, losses=[1.0] * 10, tokens=1000, seconds=4.0)
    folder.append(step=20, losses=[2.0] * 10, tokens=1000, seconds=8.0)
    with (tmp_path / "losses.jsonl").open("a") as stream:
        stream.write('{"step": 30, "lo')  # a kill
    assert len(folder.losses()) == 20
    assert folder.speed(10) == 1000 / 8.0
    assert folder.speed() == (125.0 + 250.0) / 2
    assert folder.speed(20) is None
    folder.cut(10)
    assert folder.losses() == [1.0] * 10


def test_a_run_that_fails_says_why(text, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(text.parent / "cache"))
    job = Job(model="micro", sequence=32, steps=1, warm_up=0, held_out=0.001, device="cpu")
    job = replace(job, tokens=tokens_of(str(text), "text", job))
    runs = Run.of(tmp_path, chosen(["bf16"], []), [0], job)
    (reason,) = train(runs).values()
    assert reason.startswith("ValueError: --held-out 0.001 of the text is")
    assert runs[0].folder.end() is None


def test_a_tokenizer_that_is_there_is_taken(text, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(text.parent / "cache"))
    job = Job(model="micro")
    trained = tokens_of(str(text), "text", job)
    taken = tokens_of(str(text), "text", job, trained.tokenizer)
    assert taken.folder != trained.folder
    assert (taken.open() == trained.open()).all()
    assert tokens_of(str(taken.folder), "text", job) == taken
    with pytest.raises(ValueError, match=r"is tokens, which keep their tokenizer; leave out --tokenizer"):
        tokens_of(str(taken.folder), "text", job, trained.tokenizer)


def test_kinds_of_text_that_a_machine_has(text, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(text.parent / "cache"))
    packages = tmp_path / "packages"
    folder = packages / "de" / "LC_MESSAGES"
    folder.mkdir(parents=True)
    (folder / "damaged.mo").write_bytes(b"no catalogue")
    message = "Die Datei wurde nicht gefunden; bitte geben Sie eine andere an."
    (folder / "program.mo").write_bytes(catalogue({"": "Content-Type: text/plain; charset=UTF-8\n", "a": message}))
    monkeypatch.setattr(kinds, "distributions", lambda: [SimpleNamespace(metadata=Message())])
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"purelib": str(packages)})
    tokens = tokens_of(str(text), "text", Job(model="micro"))
    name, found = kind_of_text("de", str(text), tokens, "text")
    assert (name, found.vocabulary) == ("de", tokens.vocabulary)
    assert message in load_tokenizer(str(found.tokenizer)).decode(found.open())
    assert kind_of_text("seen", str(text), tokens, "text") == ("seen", tokens)
    with pytest.raises(ValueError, match="--kind is 'tlh', and this machine has no messages of programs in a language"):
        kind_of_text("tlh", str(text), tokens, "text")
    (header := packages / "include" / "a.cuh").parent.mkdir()
    header.write_text("#pragma once // a header")
    (header.parent / "latin.h").write_bytes(b"\xe4")
    assert list(kinds._headers()) == ["#pragma once // a header"]
    with pytest.raises(ValueError, match="--kind is 'prose', and this machine has no descriptions"):
        kind_of_text("prose", str(text), tokens, "text")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("", "--kind is '', which is no text of this machine; use code, prose, headers, seen, the code of a language"),
        ("/data/x.txt", "--kind is '/data/x.txt', which is no text of this machine; .* NAME=PATH for a text of your"),
        ("=x.txt", "--kind is '=x.txt'; write it as NAME=PATH"),
        ("b=", "--kind is 'b='; write it as NAME=PATH"),
        ("seen=x.txt", "--kind is 'seen=x.txt', and 'seen' names another text; give it a name of its own"),
        ("held out=x.txt", "'held out' names another text"),
        ("s=nope.txt", "--kind s=nope.txt: nope.txt does not exist; give a file, a folder or a saved dataset"),
    ],
)
def test_a_kind_that_is_none_is_refused(given: str, sentence: str, text, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(text.parent / "cache"))
    with pytest.raises(ValueError, match=sentence):
        kind_of_text(given, str(text), tokens_of(str(text), "text", Job(model="micro")), "text")


def test_the_text_that_is_trained_on_is_no_other_text_whatever_it_is_called(text, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(text.parent / "cache"))
    tokens = tokens_of(str(text), "text", Job(model="micro"))
    (copied := tmp_path / "copied.md").write_text(text.read_text())
    for path, trained_on in ((text, text), (copied, text), (text, tokens.folder)):
        with pytest.raises(ValueError, match=f"--kind other={path} is the text that --data {trained_on} trains on"):
            kind_of_text(f"other={path}", str(trained_on), tokens, "text")
    # one word more is another text
    copied.write_text(text.read_text() + " more")
    assert kind_of_text(f"other={copied}", str(text), tokens, "text")[1].count > tokens.count
    with pytest.raises(ValueError, match="--kind has two texts named 'b'; give each a name of its own"):
        Job(kinds=(("b", tokens), ("a", tokens), ("b", tokens)))


def test_what_was_seen_is_what_a_short_run_has_trained_on(text, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(text.parent / "cache"))
    job = Job(model="micro", sequence=32, micro_batches=2, held_out=0.1, steps=3, device="cpu")
    job = replace(job, tokens=tokens_of(str(text), "text", job))
    cpu = torch.device("cpu")
    feed = batches(job, Replica(0, 1), cpu)
    assert torch.equal(torch.cat([*first_read(job, cpu)]), torch.cat([feed(step) for step in range(3)]))
    # a long run has seen more than is held out
    many = replace(job, steps=10_000)
    assert sum(map(len, first_read(many, cpu))) == sum(map(len, held_out(many, cpu)))


def catalogue(messages: dict[str, str]) -> bytes:
    """A file of translations in gettext's format."""
    keys, values = (b"".join(text.encode() + b"\0" for text in texts) for texts in (messages, messages.values()))
    tables, begin = [], 28 + 16 * len(messages)
    for texts in (messages, messages.values()):
        for each in texts:
            tables += [len(each.encode()), begin]
            begin += len(each.encode()) + 1
    head = (0x950412DE, 0, len(messages), 28, 28 + 8 * len(messages), 0, begin)
    return struct.pack(f"<{7 + len(tables)}I", *head, *tables) + keys + values


def test_text_is_gathered_once_and_in_an_order_of_its_own(tmp_path) -> None:
    packages = tmp_path / "packages"
    (packages / "a").mkdir(parents=True)
    for name, content in {"a/x.py": b"x", "same.py": b"x", "y.md": b"y", "latin.py": b"\xe4", "z.so": b"z"}.items():
        (packages / name).write_bytes(content)
    folder = gather_text([packages, packages], tmp_path / "cache")
    assert sorted(path.read_text() for path in folder.iterdir()) == ["x", "y"]
    # the order is that of digests, wherever a file lies
    (packages / "same.py").rename(packages / "a" / "moved.py")
    (packages / "y.md").rename(packages / "first.md")
    assert gather_text([packages], tmp_path / "cache") == folder
    with pytest.raises(ValueError, match="give --data another folder"):
        gather_text([tmp_path / "none"], tmp_path / "cache")
    # what is gathered stays, though its sources change or go
    (packages / "first.md").write_bytes(b"changed")
    (packages / "a" / "x.py").unlink()
    (packages / "a" / "moved.py").unlink()
    assert sorted(path.read_text() for path in folder.iterdir()) == ["x", "y"]
    (packages / "first.md").write_bytes(b"y")
    (packages / "x.py").write_bytes(b"x")
    assert gather_text([packages], tmp_path / "cache") == folder


def test_links_that_an_earlier_version_gathered_are_not_trusted(tmp_path) -> None:
    (source := tmp_path / "source").mkdir()
    (source / "a.md").write_text("a")
    (linked := tmp_path / "linked.txt").write_text("another text")
    digest = hashlib.sha256(b"a").hexdigest()
    former = tmp_path / "cache" / f"mixed-{hashlib.sha256(digest.encode()).hexdigest()[:24]}"
    former.mkdir(parents=True)
    (former / f"{digest}.txt").symlink_to(linked)
    assert [path.read_text() for path in gather_text([source], tmp_path / "cache").iterdir()] == ["a"]


def test_commands_that_gather_the_same_text_at_once_share_it(tmp_path) -> None:
    (source := tmp_path / "source").mkdir()
    for number in range(50):
        (source / f"{number}.md").write_text(str(number))
    with ThreadPoolExecutor(4) as pool:
        folders = [*pool.map(lambda _: gather_text([source], tmp_path / "cache"), range(4))]
    assert len({*folders}) == 1
    assert len([*folders[0].iterdir()]) == 50


def test_mixed_text_is_that_of_a_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "texts").mkdir()
    for number in range(3):
        (tmp_path / "texts" / f"{number}.md").write_text(f"text {number} " * 50)
    tokens = tokens_of(f"mixed={tmp_path / 'texts'}", "text", Job(model="micro"))
    assert tokens.count > 100
    # results are joined by it, so it stays as it was
    assert tokens.identity == "823cc34f1d88930a5a2fefa7"


def test_the_whole_command(text, tmp_path) -> None:
    command = ["benchmarks.convergence", "--device", "cpu", "--processes", "2", "--held-out", "0.1"]
    command += ["--model", "micro", "--sequence", "32", "--data", str(text), "--lr", "1e-2"]
    command += ["--variant", "bf16", "--steps", "12", "--seeds", "2", "--first-seed", "3"]
    command += ["--fp8-option", "emulate=true"]
    command += ["--also", "formats.gradient=e4m3", "--out", str(tmp_path), "--json", str(tmp_path / "a.json")]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "XDG_CACHE_HOME": str(text.parent / "cache")}
    done = run_program(*command, environment=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["left_out"] == {}
    also = "FP8, formats.gradient=e4m3"
    *by_seed, over_all = found["tables"]["ends"]
    assert [record["seed"] for record in by_seed] == ["3", "4"]
    for record in by_seed:
        assert list(record["losses"]) == [BF16, also]
        assert {len(losses) for losses in record["losses"].values()} == {12}
        assert record["held_out"][also]["own"] == pytest.approx(record["held_out"][BF16]["own"], rel=0.02)
        assert record["last"][also] == pytest.approx(record["last"][BF16], rel=0.02)
        assert record["last"][also] < record["losses"][also][0]
    assert by_seed[0]["losses"][BF16] != by_seed[1]["losses"][BF16]
    assert abs(over_all["differences"][also]["mean"]) < 0.02
    (markdown,) = tmp_path.glob("convergence-micro-2-seeds-3-4_*.md")
    images = list(tmp_path.glob("convergence-micro-2-seeds-3-4_*.png"))
    assert len(images) == 2
    assert all(image.name in markdown.read_text() for image in images)
