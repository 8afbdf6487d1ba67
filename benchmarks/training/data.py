"""Give each engine the same tokens."""

from __future__ import annotations

import hashlib
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock

from benchmarks.training.job import Job
from fp8booster.cli.train.data import TokenFile, folder_has_tokenizer, open_tokens, prepare_tokens
from fp8booster.cli.train.options import TrainOptions
from fp8booster.files import cache_folder, new_folder
from fp8booster.training.batches import Batches, GlobalBatch, Replica

RANDOM_BATCHES = 2
"""Batches of random tokens, taken in turn."""

_LARGEST = 1 << 20  # bytes of a file that `gather_text` takes
_SUFFIXES = (".py", ".c", ".md", ".rst", ".adoc", ".xml")


def batches(job: Job, replica: Replica, device: torch.device) -> Callable[[int], torch.Tensor]:
    """A function from the number of a step, counted from 0, to this replica's tokens of it.

    Tokens are  [micro_batches * micro_batch, sequence], int64, on `device`.

    Raises:
        ValueError: the text is too short for one step, or has more tokens than the model has embeddings.
    """
    rows = job.micro_batches * job.micro_batch
    vocabulary = job.architecture.vocabulary
    if job.tokens is None:
        generator = torch.Generator().manual_seed(job.seed + replica.index)
        held = [
            torch.randint(0, vocabulary, (rows, job.sequence), generator=generator).to(device)
            for _ in range(RANDOM_BATCHES)
        ]
        return lambda step: held[step % RANDOM_BATCHES]
    if job.tokens.vocabulary > vocabulary:
        raise ValueError(
            f"the text has {job.tokens.vocabulary} kinds of tokens and --model {job.model} embeddings for {vocabulary}"
        )
    batch = GlobalBatch(
        sequence=job.sequence, batch=job.micro_batch, accumulate=job.micro_batches, replicas=replica.count
    )
    text = Batches(_divided(job)[0], batch, replica.index, job.seed)
    return lambda step: _put(torch.cat(list(text.micro_batches(step * batch.sequences))), device)


def held_out(job: Job, device: torch.device) -> Iterator[torch.Tensor]:
    """The part of the text that no step trains on, in order: [micro_batch, sequence], int64, on `device`.

    Raises:
        ValueError: it is too short for one micro-batch.
    """
    tokens = _divided(job)[1]
    if len(tokens) < job.micro_batch * job.sequence:
        raise ValueError(
            f"--held-out {job.held_out:g} of the text is {len(tokens)} tokens, and one micro-batch takes "
            f"{job.micro_batch * job.sequence}; give a larger share or more text"
        )
    yield from _in_order(tokens, job, device)


def of_kind(tokens: TokenFile, job: Job, device: torch.device) -> Iterator[torch.Tensor]:
    """As much text of another kind as is held out, or as there is: [micro_batch, sequence], int64, on `device`.

    Raises:
        ValueError: it is too short for one micro-batch.
    """
    if tokens.count < job.micro_batch * job.sequence:
        raise ValueError(
            f"the text of {tokens.name} is {tokens.count} tokens, and one micro-batch takes "
            f"{job.micro_batch * job.sequence}; leave out its --kind, or give more text"
        )
    yield from _in_order(tokens.open()[: len(_divided(job)[1])], job, device)


def first_read(job: Job, device: torch.device) -> Iterator[torch.Tensor]:
    """What the first steps train on, as much as is held out, or as a run has: [micro_batch, sequence], int64."""
    feed = batches(job, Replica(0, 1), device)  # replicas take turns, so all of them read these first
    held = len(_divided(job)[1]) // (job.micro_batch * job.sequence)
    # a short run has not seen more, however many replicas it has
    for number in range(min(held, job.steps * job.micro_batches)):
        step, part = divmod(number, job.micro_batches)
        yield feed(step).split(job.micro_batch)[part]


def _in_order(tokens: np.ndarray, job: Job, device: torch.device) -> Iterator[torch.Tensor]:
    size = job.micro_batch * job.sequence
    for begin in range(0, len(tokens) - size + 1, size):
        part = tokens[begin : begin + size].reshape(job.micro_batch, job.sequence)
        yield _put(torch.from_numpy(part.astype(np.int64)), device)


def _divided(job: Job) -> tuple[np.ndarray, np.ndarray]:
    """The text's tokens: those that are trained on, and those that are held out."""
    text = job.tokens.open()
    end = len(text) - int(job.held_out * len(text))
    return text[:end], text[end:]


def _put(tokens: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On the device, without waiting for it."""
    return tokens.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tokens


def tokens_of(data: str, text_column: str, job: Job, tokenizer: Path | None = None) -> TokenFile:
    """The text as tokens, made once a machine, by a tokenizer with at most as many as the model has embeddings.

    Args:
        data: as `fp8booster train --data` takes it; "python", the standard library's sources; "packages", those of
            installed packages and their documents; "mixed=FOLDER", sources and documents below a folder, as of several
            repositories, in an order of chance; or a folder of tokens that this made before.
        text_column: of tables.
        job: whose model.
        tokenizer: a folder of one; None: it is trained on the text.

    Raises:
        ValueError: the folder has no tokenizer, or its tokens are not whole, or have a tokenizer already.
    """
    if Path(data, "tokens.json").is_file():
        if tokenizer is not None:
            raise ValueError(f"--data {data} is tokens, which keep their tokenizer; leave out --tokenizer {tokenizer}")
        return open_tokens(Path(data), "copy the whole folder again")
    if tokenizer is not None and not folder_has_tokenizer(str(tokenizer)):
        raise ValueError(f"--tokenizer {tokenizer} holds no tokenizer; give a folder in Hugging Face's format")
    cache = cache_folder()
    kind, named, folder = data.partition("=")
    if data == "packages":
        data = str(gather_text([Path(sysconfig.get_paths()[name]) for name in ("purelib", "platlib")], cache))
    elif kind == "mixed" and named:
        data = str(gather_text([Path(folder)], cache))
    options = TrainOptions(
        model="7b",  # a size, so the tokenizer is trained on the text
        data=None if data == "python" else data,
        text_column=text_column,
        vocabulary=min(job.architecture.vocabulary, 32000),
        cache=str(cache),
    )
    return prepare_tokens(options, lambda text: None, None if tokenizer is None else str(tokenizer))


def gather_text(roots: Iterable[Path], cache: Path) -> Path:
    """A folder of copies of the sources and documents below folders, in an order that depends on the content of each.

    So what is held out at the end is of all of them. Files that are equal, not UTF-8, or above a megabyte, which are
    tables more than text, are left out.

    Raises:
        ValueError: there is no such file, or one changes meanwhile.
    """
    found: dict[str, Path] = {}
    for root in dict.fromkeys(roots):
        for folder, folders, names in os.walk(root):
            folders.sort()
            for name in sorted(names):
                path = Path(folder, name)
                if path.suffix not in _SUFFIXES or not 0 < path.stat().st_size <= _LARGEST:
                    continue
                content = path.read_bytes()
                try:
                    content.decode()
                except UnicodeDecodeError:
                    continue
                found.setdefault(hashlib.sha256(content).hexdigest(), path)
    if not found:
        raise ValueError(
            f"no file below {', '.join(map(str, roots))} ends in {', '.join(_SUFFIXES)}; give --data another folder"
        )
    # not the former "mixed-", whose folders have links to files that may have changed
    name = f"gathered-{hashlib.sha256(''.join(sorted(found)).encode()).hexdigest()[:24]}"
    cache.mkdir(parents=True, exist_ok=True)
    # other commands may gather the same text now
    with FileLock(cache / f"{name}.lock"):
        if not (cache / name).exists():
            for left in cache.glob(f".{name}.*.partial"):  # after a kill: while the lock is held, nobody writes it
                shutil.rmtree(left)
            with new_folder(cache / name) as partial:
                for digest, path in found.items():
                    content = path.read_bytes()
                    if hashlib.sha256(content).hexdigest() != digest:
                        raise ValueError(f"{path} changed while it was read; start again when nothing writes it")
                    (partial / f"{digest}.txt").write_bytes(content)
    return cache / name
