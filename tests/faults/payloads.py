"""Files that run code when they are unpickled, in the place of each file of a checkpoint: none may run."""

from __future__ import annotations

import dataclasses
import pickle
import shutil
from pathlib import Path

import torch

from fp8booster.checkpoints import newest_checkpoint, write_manifest
from fp8booster.cli.train.data import load_tokenizer, prepare_tokens
from fp8booster.cli.train.model_folder import build_model, load_config
from tests.colossal.payload import Payload
from tests.distributed import RankError, run_ranks
from tests.faults.ranks import load_planted
from tests.faults.runs import Reference, last_line, run
from tests.faults.subjects import SAVED, Place, Subject, checkpoints_of

FORMS = ("torch", "pickle")
"""What `torch.save` writes, and a bare pickle, which earlier versions of torch wrote."""

WHOLE_FILES = ("model.bin", "optimizer.bin", "scheduler.bin")
"""What `booster.save_model`, `save_optimizer` and `save_lr_scheduler` write without `shard=True`."""


def plant(file: Path, form: str, marker: Path) -> None:
    """Put a payload, which would make the folder `marker`, in a file's place."""
    if form == "torch":
        torch.save({"state": Payload(marker)}, file)
    else:
        file.write_bytes(pickle.dumps(Payload(marker), protocol=2))


def require_no_advice(said: str) -> None:
    """Raise AssertionError where a person is told how to run the payload."""
    assert "weights_only=False" not in said, f"advised to run it: {said}"


def planted(subject: Subject, reference: Reference) -> list[tuple[str, str]]:
    """(file, form) of each payload, the file in its checkpoint's folder."""
    checkpoint = newest_checkpoint(checkpoints_of(subject, reference.begun))
    files = [str(path.relative_to(checkpoint)) for path in sorted(checkpoint.rglob("*")) if path.is_file()]
    return [(file, form) for file in files for form in (FORMS if Path(file).suffix in (".bin", ".pt") else FORMS[1:])]


def harmless(place: Place, subject: Subject, reference: Reference, out: Path, file: str, form: str) -> str:
    """Resume from a checkpoint with a payload in it, whose list of files knows of it.

    Returns:
        "refused" or "not read".

    Raises:
        AssertionError: the payload ran, or the answer does not say that the checkpoint is not to be trusted.
    """
    marker = out.with_name(f"{out.name}-ran")
    shutil.copytree(reference.begun, out)
    checkpoint = newest_checkpoint(checkpoints_of(subject, out))
    plant(checkpoint / file, form, marker)
    if file != "files.json":
        write_manifest(checkpoint)
    said = None
    try:
        run(place, subject, out, until=SAVED + 1)
    except RankError as error:
        said = str(error)
    assert not marker.exists(), "the payload ran"
    if said is None:
        assert Path(file).suffix not in (".bin", ".pt", ".safetensors"), "a run went on from a payload"
        return "not read"
    require_no_advice(last_line(said))
    if Path(file).suffix in (".bin", ".pt"):
        assert "trust" in last_line(said), f"it does not say whom to trust: {last_line(said)}"
    return "refused"


def harmless_whole(place: Place, subject: Subject, folder: Path) -> str:
    """Load files that were saved whole, with payloads in their place, by a boosted model's Booster."""
    marker = folder / "ran"
    for form in FORMS:
        (folder / form).mkdir(parents=True)
        for name in WHOLE_FILES:
            plant(folder / form / name, form, marker)
    said = run_ranks(load_planted, 2, place, subject, str(folder), initialize=False)
    assert not marker.exists(), "a payload ran"
    assert len(said[0]) == len(FORMS) * len(WHOLE_FILES)
    for sentence in said[0].values():
        assert "trust" in sentence, sentence
        require_no_advice(sentence)
    return f"{len(said[0])} refused"


def harmless_cache(place: Place, folder: Path) -> str:
    """Start from a cache with payloads in the place of each file of the tokens. Raises AssertionError where one ran."""
    marker, refused = folder / "ran", 0
    files = [path for path in sorted(place.tokens.folder.rglob("*")) if path.is_file()]
    for number, file in enumerate(files):
        cache = folder / str(number)
        shutil.copytree(place.options.cache, cache)
        plant(cache / file.relative_to(place.options.cache), FORMS[1], marker)
        try:
            tokens = prepare_tokens(dataclasses.replace(place.options, cache=str(cache)), lambda _: None)
            tokens.open()
            load_tokenizer(str(tokens.tokenizer))
        except Exception as error:
            require_no_advice(str(error))
            refused += 1
    assert not marker.exists(), "a payload ran"
    return f"{refused} of {len(files)} refused, the others not read as code"


def harmless_model(place: Place, folder: Path) -> str:
    """Build a model from a folder whose weights are a payload. Raises AssertionError where it is not refused."""
    marker = folder / "ran"
    for form in FORMS:
        model = folder / form
        shutil.copytree(place.options.model, model)
        plant(model / "pytorch_model.bin", form, marker)
        config = load_config(str(model), place.tokens.vocabulary, place.options.sequence)
        try:
            build_model(str(model), config, torch.device("cpu"), False, torch.bfloat16)
        except Exception as error:  # whatever it is
            require_no_advice(str(error))
        else:
            raise AssertionError("the model was built from a payload")
    assert not marker.exists(), "a payload ran"
    return f"{len(FORMS)} refused"
