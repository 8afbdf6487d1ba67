"""The cases of the campaign, by kind: what goes wrong, where, and what must be true afterwards."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.distributed import RankError, run_ranks
from tests.faults.commands import COMMANDS
from tests.faults.damage import damaged, refused
from tests.faults.disks import leave_room, read_only, small_disk
from tests.faults.payloads import harmless, harmless_cache, harmless_model, harmless_whole, planted
from tests.faults.ranks import Harm, soak
from tests.faults.runs import Reference, harmed, last_line, run, went_on
from tests.faults.subjects import SAVED, Place, Subject, checkpoints_of, prepare

Found = str
"""What a case that is as promised found."""


@dataclass(frozen=True)
class Case:
    """One fault."""

    kind: str
    subject: str
    what: str
    """Where, for people."""
    check: Callable[[Place, Subject, Reference, Path], Found]
    """Raises AssertionError where something is not as promised, RankError where a run fails that must not."""


def kills_at_file_events(subject: Subject, reference: Reference) -> Iterator[Case]:
    """SIGKILL of a rank before each of its file events in a save, and in the middle of each file.

    Of files that are synced one after the other the first: a sync changes nothing that a kill could leave.
    """
    for rank, ended in enumerate(reference.events):
        for number, event in enumerate(ended.files, 1):
            if event.startswith("fsync") and number > 1 and ended.files[number - 2].startswith("fsync"):
                continue
            yield _harm("kill, file event", subject, f"rank {rank}, {number}: {event}", Harm("file", rank, number))


def kills_in_collectives(subject: Subject, reference: Reference, count: int = 6) -> Iterator[Case]:
    """SIGKILL of a rank as it enters a collective, of those of two steps and a save."""
    yield from _at_collectives("kill, collective", "kill", subject, reference, count)


def sigterms(subject: Subject, reference: Reference, count: int = 3) -> Iterator[Case]:
    """SIGTERM to one rank: all save the same step, and end."""
    yield from _at_collectives("SIGTERM", "term", subject, reference, count)


def _at_collectives(kind: str, signal: str, subject: Subject, reference: Reference, count: int) -> Iterator[Case]:
    for number in range(count):
        rank = number % 2
        names = reference.events[rank].collectives
        at = 1 + (2 * number + 1) * len(names) // (2 * count)
        yield _harm(kind, subject, f"rank {rank}, {at} of {len(names)}: {names[at - 1]}", Harm(signal, rank, at))


def _harm(kind: str, subject: Subject, what: str, harm: Harm) -> Case:
    return Case(
        kind, subject.name, what, lambda place, subject, reference, out: harmed(place, subject, reference, out, harm)
    )


def full_disks(subject: Subject, reference: Reference) -> Iterator[Case]:
    """A disk that takes a part of the second checkpoint."""

    def check(part: float) -> Callable[..., Found]:
        def fill(place: Place, subject: Subject, reference: Reference, out: Path) -> Found:
            with small_disk(out) as disk:
                shutil.copytree(reference.begun, disk, dirs_exist_ok=True)
                checkpoint = checkpoints_of(subject, disk)
                size = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
                leave_room(disk, int(part * size))
                said = _failure(place, subject, disk)
                assert any(word in said for word in ("space", "write", "File too large")), said
                leave_room(disk)
                return went_on(place, subject, reference, disk)

        return fill

    for part in (0.02, 0.3, 0.6, 0.9):
        yield Case("full disk", subject.name, f"after {part:.0%} of a checkpoint", check(part))


def read_only_disks(subject: Subject, reference: Reference) -> Iterator[Case]:
    """A disk that cannot be written when a run goes on."""

    def check(place: Place, subject: Subject, reference: Reference, out: Path) -> Found:
        shutil.copytree(reference.begun, out)
        with read_only(out):
            said = _failure(place, subject, out)
        assert "Read-only" in said, said
        return went_on(place, subject, reference, out)

    yield Case("read-only", subject.name, "from the resumed run's start", check)


def _failure(place: Place, subject: Subject, out: Path) -> str:
    """What a run says that cannot save."""
    try:
        run(place, subject, out, until=2 * SAVED)
    except RankError as error:
        return str(error)
    raise AssertionError("it did not fail")


def payloads(subject: Subject, reference: Reference) -> Iterator[Case]:
    """Code in the place of each file of a checkpoint."""

    def check(file: str, form: str) -> Callable[..., Found]:
        return lambda place, subject, reference, out: harmless(place, subject, reference, out, file, form)

    for file, form in planted(subject, reference):
        yield Case("payload", subject.name, f"{file}, {form}", check(file, form))
    if subject.options is not None:
        yield Case(
            "payload",
            subject.name,
            "files saved whole",
            lambda place, subject, _, out: harmless_whole(place, subject, out),
        )


def damages(subject: Subject, reference: Reference) -> Iterator[Case]:
    """A file in each folder of the newest checkpoint, cut or altered."""

    def check(folder: str, form: str) -> Callable[..., Found]:
        return lambda place, subject, reference, out: refused(place, subject, reference, out, folder, form)

    for folder, form in damaged(subject, reference) if subject.options is not None else ():
        yield Case("damage", subject.name, f"{folder}/, {form}", check(folder, form))


def command_faults(subject: Subject, reference: Reference) -> Iterator[Case]:
    """Faults of `fp8booster train` as a person starts it: what it says, and what it leaves running."""
    for what, check in COMMANDS.items() if subject.options is not None else ():
        yield Case("command", subject.name, what, check)


def inputs(subject: Subject, reference: Reference) -> Iterator[Case]:
    """Code in what every plugin reads before ranks start; done once."""
    if subject.name == "zero":
        yield Case("payload, inputs", subject.name, "token cache", lambda place, _, __, out: harmless_cache(place, out))
        yield Case(
            "payload, inputs", subject.name, "--model folder", lambda place, _, __, out: harmless_model(place, out)
        )


SOAK_STEPS, SOAK_SAVES, WARM_UP = 300, 60, 100
MOST_GROWTH = 4 << 20  # bytes of resident memory in 200 steps; a tensor leaked in each step would be more


def soaks(subject: Subject, reference: Reference) -> Iterator[Case]:
    """300 steps with saves: neither memory nor descriptors grow after the warm-up."""

    def check(place: Place, subject: Subject, reference: Reference, out: Path) -> Found:
        place = prepare(out / "place", SOAK_STEPS, SOAK_SAVES)
        ranks = run_ranks(soak, 2, place, subject, str(out / "run"), timeout=1500, initialize=False)
        found = []
        for rank, samples in enumerate(ranks):
            assert len(samples) == SOAK_STEPS
            memory, descriptors = zip(*samples[WARM_UP:], strict=True)
            # medians of a period of saves, in which what a save takes for a while comes once
            growth = statistics.median(memory[-SOAK_SAVES:]) - statistics.median(memory[:SOAK_SAVES])
            more = max(descriptors[-SOAK_SAVES:]) - max(descriptors[:SOAK_SAVES])
            found.append(f"rank {rank} {growth / 2**20:+.1f} MiB, {more:+d} descriptors")
            assert growth < MOST_GROWTH, found
            assert more <= 0, found
        return "; ".join(found)

    if subject.options is not None:
        yield Case("soak", subject.name, f"{SOAK_STEPS} steps, a save each {SOAK_SAVES}", check)


KINDS = {
    "files": kills_at_file_events,
    "collectives": kills_in_collectives,
    "sigterm": sigterms,
    "full-disk": full_disks,
    "read-only": read_only_disks,
    "payloads": payloads,
    "inputs": inputs,
    "damage": damages,
    "commands": command_faults,
    "soak": soaks,
}
"""What `--kinds` takes."""

NOT_COMPARED = {"payloads", "inputs", "soak"}
"""Those that need no undisturbed run to compare with."""


def judge(case: Case, place: Place, subject: Subject, reference: Reference, out: Path) -> tuple[str, str]:
    """Do a case: ("ok", "FAILED" or "skipped", what was found)."""
    from tests.faults.disks import CannotMount

    try:
        return "ok", case.check(place, subject, reference, out)
    except CannotMount as reason:
        return "skipped", f"no mount: {reason}"
    except AssertionError as fault:
        return "FAILED", str(fault)
    except RankError as error:
        return "FAILED", f"a run that should do ended: {last_line(str(error))}"
    finally:
        for left in (out, out.with_name(f"{out.name}-ran")):
            shutil.rmtree(left, ignore_errors=True)
