"""The zero-bubble schedule as a whole, without ranks."""

from __future__ import annotations

from collections import defaultdict

import pytest

import fp8booster.colossal  # noqa: F401  (patches colossalai before it is imported)


def schedule(*args, **kwargs) -> list[list]:
    from fp8booster.colossal.pipeline import zero_bubble_schedule

    return zero_bubble_schedule(*args, **kwargs)


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (2, 8), (4, 4), (4, 12), (8, 16)])
def test_every_pass_runs_once_and_in_order(stages, micro_batches) -> None:
    for nodes in schedule(stages, micro_batches):
        order = defaultdict(list)
        for node in nodes:
            order[node.type, node.chunk].append(node.minibatch)
        for kind in "FBW":
            for chunk in (0, 1):
                assert order[kind, chunk] == list(range(micro_batches))
        at = {(node.type, node.chunk, node.minibatch): place for place, node in enumerate(nodes)}
        for chunk in (0, 1):
            for number in range(micro_batches):
                assert at["F", chunk, number] < at["B", chunk, number] < at["W", chunk, number]


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 8), (4, 12)])
def test_neighbours_send_and_receive_the_same_in_the_same_order(stages, micro_batches) -> None:
    whole = schedule(stages, micro_batches)
    for direction, chunks in (("FORWARD", (0, 1)), ("BACKWARD", (1, 0))):
        down, up = chunks  # the chunk whose messages go to the next stage, and to the one before
        for stage in range(stages - 1):
            for chunk, sender, receiver in ((down, stage, stage + 1), (up, stage + 1, stage)):
                sent = [n.minibatch for n in whole[sender] if (n.type, n.chunk) == (f"SEND_{direction}", chunk)]
                arrived = [n.minibatch for n in whole[receiver] if (n.type, n.chunk) == (f"RECV_{direction}", chunk)]
                assert sent == arrived == list(range(micro_batches))


def test_stages_idle_less_than_under_1f1b() -> None:
    stages, micro_batches = 4, 12
    busy = 6 * micro_batches  # F, B and W of two chunks
    ends = [max(node.completion_time for node in nodes) for nodes in schedule(stages, micro_batches, communication=0)]
    # a stage of 1F1B without chunks waits for the F, B and W of all others, each twice as long
    assert max(ends) - busy < 6 * (stages - 1) / 2


@pytest.mark.parametrize(
    ("stages", "micro_batches", "message"), [(1, 4, "two or more"), (4, 2, "a multiple"), (4, 6, "a multiple")]
)
def test_what_cannot_be_scheduled_is_refused(stages, micro_batches, message) -> None:
    with pytest.raises(ValueError, match=message):
        schedule(stages, micro_batches)
