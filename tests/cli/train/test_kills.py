from __future__ import annotations

import re

import pytest

from fp8booster.cli.train import kills
from fp8booster.cli.train.kills import MemoryKills


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ((0, 4), (1, 5), "the memory of its control group .* ran out; lower --batch"),
        ((0, 4), (0, 5), "the kernel ended a process for lack of memory, most likely this one; lower --batch"),
        ((None, 4), (None, 4), "not by the kernel for lack of memory, which it counts: a person, a batch system"),
        ((None, None), (None, None), "the kernel does not tell here whether for lack of memory; look at dmesg"),
    ],
)
def test_a_kill_is_explained_as_far_as_the_kernel_tells(before, after, says) -> None:
    sentence = MemoryKills(*after).explain(MemoryKills(*before))
    assert re.search(says, sentence)
    assert sentence.endswith("--resume the run")


def test_the_kernels_counters_are_read(tmp_path, monkeypatch) -> None:
    (tmp_path / "memory.events").write_text("low 0\nhigh 0\nmax 12\noom 2\noom_kill 3\n")
    monkeypatch.setattr(kills, "_groups", lambda: [tmp_path / "absent", tmp_path])
    assert MemoryKills.now().group == 3
    (tmp_path / "memory.events").unlink()
    (tmp_path / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 7\n")
    assert MemoryKills.now().group == 7
    (tmp_path / "memory.oom_control").unlink()
    assert MemoryKills.now().group is None
