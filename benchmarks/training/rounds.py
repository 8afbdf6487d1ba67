"""Engines interleaved: A B C A B C ..., each built, timed and torn down in its turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.training.launch import Turn
from benchmarks.training.measure import Outcome


@dataclass
class Findings:
    """The findings of one engine's turns so far."""

    outcomes: dict[int, Outcome] = field(default_factory=dict)
    """By round, counted from 0."""

    reason: str | None = None
    """Why a turn failed; it has no further ones."""


def take_rounds(
    engines: Sequence[str],
    *,
    rounds: int,
    missing: dict[str, str],
    turn: Callable[[int, str], Turn],
    after_turn: Callable[[dict[str, Findings], bool], None],
) -> dict[str, Findings]:
    """Give every engine one turn a round.

    Args:
        engines: names, in the order of their turns.
        rounds: how many.
        missing: engines that cannot run here, and why.
        turn: takes the round and the engine.
        after_turn: is shown what was found so far, so that a run that is cut short has its result, and whether a round
            has ended.
    """
    findings = {name: Findings(reason=missing.get(name)) for name in engines}
    for number in range(rounds):
        for name, found in findings.items():
            if found.reason is not None:
                continue
            taken = turn(number, name)
            if taken.outcome is None:
                found.reason = taken.reason
            else:
                found.outcomes[number] = taken.outcome
            after_turn(findings, False)
        after_turn(findings, True)
    return findings
