"""Runs of a subject and what they leave: references, harmed runs, and whether one went on as promised."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open

from fp8booster.checkpoints import checkpoints_in, newest_checkpoint
from tests.distributed import RankError, run_ranks
from tests.faults.ranks import Ended, Harm, train
from tests.faults.subjects import SAVED, STEPS, Place, Subject, checkpoints_of


def run(place: Place, subject: Subject, out: Path, until: int = STEPS, harm: Harm | None = None) -> list[Ended]:
    """Train to a step, or until harm ends it; what each rank tells. Raises RankError where one fails."""
    return run_ranks(train, 2, place, subject, str(out), until, harm, initialize=False)


def digests(checkpoint: Path) -> dict[str, str]:
    """Of each file of a checkpoint that must be equal in two runs of the same steps."""
    return {
        str(path.relative_to(checkpoint)): hashlib.sha256(_content(path)).hexdigest()
        for path in sorted(checkpoint.rglob("*"))
        # one names folders, one sums up
        if path.is_file() and path.name not in ("state.json", "files.json")
    }


def _content(path: Path) -> bytes:
    data = path.read_bytes()
    if path.suffix == ".json":  # stages of a pipeline are listed as the disk names them
        values = json.loads(data)
        if path.name.endswith(".safetensors.index.json"):
            # weights that ranks of experts share are in the files of each, and it names the one that was listed last
            values["weight_map"] = {
                name: _tensor(path.parent / file, name) for name, file in values["weight_map"].items()
            }
        return json.dumps(values, sort_keys=True).encode()
    if path.suffix != ".safetensors":
        return data
    # its header lists what it likes first
    end = 8 + int.from_bytes(data[:8], "little")
    return json.dumps(json.loads(data[8:end]), sort_keys=True).encode() + data[end:]


def _tensor(file: Path, name: str) -> str:
    """The digest of a tensor in a file."""
    with safe_open(file, framework="pt") as tensors:
        value = tensors.get_tensor(name)
    return hashlib.sha256(value.reshape(-1).view(torch.uint8).numpy()).hexdigest()


def assert_same(found: End, wanted: End, why: str) -> None:
    """The same files and losses; the message names what differs."""
    names = found[0].keys() | wanted[0].keys()
    other = sorted(name for name in names if found[0].get(name) != wanted[0].get(name))
    assert not other, f"{why}: {', '.join(other)} differ"
    assert found[1] == wanted[1], f"{why}: losses {found[1]} for {wanted[1]}"


End = tuple[dict[str, str], list[float]]
"""Digests of the last checkpoint's files, and the losses."""


@dataclass
class Reference:
    """Undisturbed runs of a subject."""

    begun: Path
    """A run stopped after the first save; copied, not touched."""
    events: list[Ended]
    """Of each rank, from there to the second save."""
    ends: dict[int, End] = field(default_factory=dict)
    """By the step that a run goes on from."""


def refer(place: Place, subject: Subject, folder: Path, compared: bool = True) -> Reference:
    """Make the references of a subject; not `compared`, only the run that others begin with.

    Raises:
        AssertionError: the subject does not resume as promised even without harm.
    """
    whole, begun, second = (folder / name for name in ("whole", "begun", "second"))
    if not compared:
        run(place, subject, begun, until=SAVED)
        return Reference(begun, [])
    losses = run(place, subject, whole)[0].losses
    end = digests(newest_checkpoint(checkpoints_of(subject, whole)))
    run(place, subject, begun, until=SAVED)
    shutil.copytree(begun, second)
    reference = Reference(begun, run(place, subject, second, until=2 * SAVED))
    first = folder / "first"
    shutil.copytree(begun, first)
    for step, out in ((SAVED, first), (2 * SAVED, second)):
        resumed = run(place, subject, out)[0].losses
        reference.ends[step] = digests(newest_checkpoint(checkpoints_of(subject, out))), resumed
        if subject.exact:
            assert_same(reference.ends[step], (end, losses[step:]), f"even undisturbed, from step {step}")
    return reference


def harmed(place: Place, subject: Subject, reference: Reference, out: Path, harm: Harm) -> str:
    """Do harm between the first save and the second, go on, and compare.

    Returns:
        what was found, "step 2" or "step 4" for where it went on from.

    Raises:
        AssertionError: the harm did nothing, or the run did not go on as promised.
    """
    shutil.copytree(reference.begun, out)
    ended = None
    try:
        run(place, subject, out, until=2 * SAVED, harm=harm)
    except RankError as error:
        ended = str(error)
    if harm.kind == "term":
        assert ended is None, f"SIGTERM was not answered with a save: {last_line(ended)}"
    else:
        assert ended is not None, "the harm did nothing"
        lost = ("died", "peer", "Connection", "reset")  # its end, or what the other rank saw of it first
        assert any(word in ended for word in lost), f"not killed, but: {last_line(ended)}"
    return went_on(place, subject, reference, out)


def went_on(place: Place, subject: Subject, reference: Reference, out: Path) -> str:
    """Resume what is left of a run, to its end, and compare. Raises AssertionError where it is not as promised."""
    checkpoints = checkpoints_of(subject, out)
    left = newest_checkpoint(checkpoints)
    assert left is not None, "no checkpoint is left"
    step = json.loads((left / "state.json").read_text())["step"]
    assert step >= SAVED, f"the checkpoint of step {SAVED} is lost"
    losses = run(place, subject, out)[0].losses
    assert [path.name for path in checkpoints_in(checkpoints)] == [f"step-{STEPS:08d}"]
    assert not [path.name for path in checkpoints.iterdir() if path.name.startswith(".step")], "rubbish is left"
    found = digests(newest_checkpoint(checkpoints)), losses
    if step in reference.ends:
        assert_same(found, reference.ends[step], f"from step {step}")
    elif subject.exact:  # SIGTERM saved a step between
        end, of_first = reference.ends[SAVED]
        assert_same(found, (end, of_first[step - SAVED :]), f"from step {step}")
    return f"step {step}"


def last_line(text: str | None) -> str:
    """The last line of an error."""
    return (text or "").strip().rpartition("\n")[2]
