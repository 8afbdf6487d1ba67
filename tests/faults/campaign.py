"""What the campaign's processes do, and how it is summed up."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests.distributed import RankError
from tests.faults.cases import KINDS, judge
from tests.faults.runs import Reference, last_line, refer
from tests.faults.subjects import SUBJECTS, Place, Subject

VERDICTS = ("ok", "FAILED", "skipped")


@dataclass(frozen=True)
class Done:
    """What came of a case."""

    kind: str
    subject: str
    what: str
    verdict: str
    found: str
    seconds: float


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def be_quiet() -> None:
    """What ranks print goes nowhere: their errors come back through `RankError`."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)


def refer_to(place: Place, subject: Subject, folder: Path, compared: bool) -> tuple[Reference | None, str]:
    """The references of a subject, or why there are none."""
    try:
        return refer(place, subject, folder, compared), ""
    except AssertionError as fault:
        return None, str(fault)
    except RankError as error:
        return None, last_line(str(error))


def judge_case(place: Place, subject: Subject, reference: Reference, kind: str, number: int, out: Path) -> Done:
    """Do a case of a kind."""
    case = list(KINDS[kind](subject, reference))[number]  # made anew here: what it calls is not pickled
    began = time.monotonic()
    verdict, found = judge(case, place, subject, reference, out)
    return Done(case.kind, case.subject, case.what, verdict, found, time.monotonic() - began)


def tell(done: Done) -> None:
    """A line for a case."""
    say(f"{done.verdict:7}  {done.kind:16}  {done.subject:12}  {done.what}: {done.found}  ({done.seconds:.0f} s)")


def sum_up(done: list[Done], seconds: float) -> None:
    """A table of counts, by kind and subject."""
    counts = Counter((each.kind, each.subject, each.verdict) for each in done)
    kinds = list(dict.fromkeys(each.kind for each in done))
    subjects = [name for name in SUBJECTS if any(each.subject == name for each in done)]
    say(f"\n{'as promised, of all':20}" + "".join(f"{name:>14}" for name in subjects))
    for kind in kinds:
        cells = []
        for subject in subjects:
            ok, failed, skipped = (counts[kind, subject, verdict] for verdict in VERDICTS)
            cells.append(f"{ok}/{ok + failed}" + (f" (-{skipped})" if skipped else "") if ok + failed + skipped else "")
        say(f"{kind:20}" + "".join(f"{cell:>14}" for cell in cells))
    total = Counter(each.verdict for each in done)
    say(f"\n{len(done)} cases in {seconds / 60:.0f} min: " + ", ".join(f"{total[v]} {v}" for v in VERDICTS))
