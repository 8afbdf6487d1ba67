"""Do harm to runs in every plugin, and see that they go on as promised.

    python -m tests.faults                                  everything; hours on two cores
    python -m tests.faults --subjects zero,fsdp --kinds files,sigterm --every 4

Ends with a table of counts; the exit status is 1 where a case is not as promised. Full and read-only disks take root on
Linux and are skipped elsewhere.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

from fp8booster.kernels.instructions import avoid_trapping_instructions
from tests.faults.campaign import Done, be_quiet, judge_case, refer_to, sum_up, tell
from tests.faults.cases import KINDS, NOT_COMPARED
from tests.faults.subjects import SUBJECTS, prepare


def main() -> int:
    """Do what the command line says; returns the exit status."""
    arguments = _parse()
    avoid_trapping_instructions()
    began = time.monotonic()
    root = Path(tempfile.mkdtemp(prefix="fp8booster-faults-", dir=arguments.folder))
    done: list[Done] = []
    try:
        place = prepare(root / "place")
        context = get_context("spawn")
        with ProcessPoolExecutor(arguments.jobs, context, initializer=be_quiet) as pool:
            subjects = [SUBJECTS[name] for name in arguments.subjects]
            compared = not set(arguments.kinds) <= NOT_COMPARED
            referred = {
                pool.submit(refer_to, place, subject, root / subject.name, compared): subject for subject in subjects
            }
            pending = []
            for future in as_completed(referred):
                subject, (reference, fault) = referred[future], future.result()
                if reference is None:
                    done.append(Done("undisturbed", subject.name, "references", "FAILED", fault, 0.0))
                    tell(done[-1])
                    continue
                for kind in arguments.kinds:
                    cases = list(KINDS[kind](subject, reference))
                    for number in range(arguments.offset % arguments.every, len(cases), arguments.every):
                        out = root / subject.name / f"{kind}-{number}"
                        pending.append(pool.submit(judge_case, place, subject, reference, kind, number, out))
            for future in as_completed(pending):
                done.append(future.result())
                tell(done[-1])
    finally:
        shutil.rmtree(root, ignore_errors=True)
    sum_up(done, time.monotonic() - began)
    return 1 if any(each.verdict == "FAILED" for each in done) or not done else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def names(known: dict) -> object:
        def of(text: str) -> list[str]:
            given = text.split(",")
            if unknown := set(given) - set(known):
                raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
            return given

        return of

    parser.add_argument("--subjects", type=names(SUBJECTS), default=list(SUBJECTS), help=", ".join(SUBJECTS))
    parser.add_argument("--kinds", type=names(KINDS), default=list(KINDS), help=", ".join(KINDS))
    parser.add_argument("--every", type=int, default=1, help="of each kind in each subject, every so manieth case")
    parser.add_argument("--offset", type=int, default=0, help="the first of them")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="cases at a time")
    parser.add_argument("--folder", help="where runs are kept meanwhile; about 100 MB")
    arguments = parser.parse_args()
    if arguments.every < 1 or arguments.jobs < 1:
        parser.error("--every and --jobs are at least 1")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
