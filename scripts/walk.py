"""Count the files of the package that its hot paths enter, and the moves between them.

    python scripts/walk.py [--show PATH]

prints a table, on the CPU; the paths of ZeRO are those of one rank of two, joined by gloo. `--show` prints what one
path calls, a line for each stay in a file.

A path is the sequence of functions of the package that are called, as `sys.setprofile` reports them. A *move* is a
call in another file than the call before it; the first call is one. So a call into another file is a move, and when
that has returned, the next call within the caller's own file is one more. Comprehensions count where Python calls
them as functions (lists up to 3.11). By this definition a forward of a lone FP8Linear entered 20 files in 37 moves at
2fd59d4.

Each path is walked when it has run before, for the first run also fills caches; `configure` runs once.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import socket
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import fp8booster
from fp8booster import FP8Config, convert_to_fp8

PACKAGE = f"{Path(fp8booster.__file__).parent}{os.sep}"

OF_A_CPU = os.path.join("kernels", "instructions.py")
"""Stands for products of PyTorch, which are no function of the package, on CPUs without BF16."""

FORWARD = "forward of a lone FP8Linear"
BACKWARD = "backward of a lone FP8Linear"
MERGED = "forward of q, k, v as one product"
PUBLISH = "publish of one ZeRO weight"
REDUCTION = "reduction of one ZeRO gradient"
CONFIGURE = "FP8Plugin.configure of one layer"


class Call(NamedTuple):
    """A function of the package that was called."""

    file: str
    """Its path, relative to the package."""

    name: str


class Walk:
    """The functions of the package that a path calls, in order."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    @property
    def files(self) -> int:
        """Return how many files are entered."""
        return len({call.file for call in self.calls})

    @property
    def moves(self) -> int:
        """Return how many calls are in another file than the one before."""
        return len(self.stays())

    def stays(self) -> list[tuple[str, list[str]]]:
        """Return each file in order, with the functions called before the next move."""
        return [
            (file, [call.name for call in calls]) for file, calls in groupby(self.calls, key=lambda call: call.file)
        ]

    @contextmanager
    def record(self) -> Iterator[None]:
        """Add the calls of the body."""

        def note(frame: Any, event: str, _: Any) -> None:
            code = frame.f_code
            file = code.co_filename
            if event == "call" and file.startswith(PACKAGE) and not file.endswith(OF_A_CPU):
                self.calls.append(Call(file.removeprefix(PACKAGE), code.co_name))

        before = sys.getprofile()
        sys.setprofile(note)
        try:
            yield
        finally:
            sys.setprofile(before)

    @contextmanager
    def record_in(self, owner: type, *methods: str, where: Callable[..., bool] = lambda *_: True) -> Iterator[None]:
        """Add the calls of these methods in the body, and what they call; with `where`, of arguments it accepts."""
        originals = {method: getattr(owner, method) for method in methods}

        def recorded(original: Callable[..., Any]) -> Callable[..., Any]:
            def method(*args: Any, **kwargs: Any) -> Any:
                if not where(*args):
                    return original(*args, **kwargs)
                with self.record():
                    return original(*args, **kwargs)

            return method

        own = {method: vars(owner)[method] for method in methods if method in vars(owner)}
        for name, original in originals.items():
            setattr(owner, name, recorded(original))
        try:
            yield
        finally:
            for name in methods:
                delattr(owner, name)
            for name, original in own.items():
                setattr(owner, name, original)


def walk_lone_layer() -> dict[str, Walk]:
    """Walk forward and backward of one FP8Linear in training."""
    model = nn.Sequential(nn.Linear(256, 256, bias=False, dtype=torch.bfloat16))
    convert_to_fp8(model, FP8Config(always=True))
    torch.optim.SGD(model.parameters()).step()  # until the first, weights are cast after each backward
    for _ in range(2):
        input = torch.randn(64, 256, dtype=torch.bfloat16, requires_grad=True)
        forward, backward = Walk(), Walk()
        with forward.record():
            output = model[0](input)
        gradient = torch.randn_like(output)
        with backward.record():
            output.backward(gradient)
    return {FORWARD: forward, BACKWARD: backward}


def walk_merged_layers() -> dict[str, Walk]:
    """Walk the one product of q, k and v in a fused decoder layer in training."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from fp8booster import fuse
    from fp8booster.nn.fused.merged_layers import MergedLayers

    sizes = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4, vocab_size=512
    )
    model = LlamaForCausalLM(sizes).bfloat16()
    convert_to_fp8(model, FP8Config(always=True))
    fuse(model)
    torch.optim.SGD(model.parameters()).step()
    tokens = torch.randint(512, (1, 64))
    for _ in range(2):
        merged = Walk()
        with merged.record_in(MergedLayers, "__call__", where=lambda layers, _: len(layers.layers) == 3):
            model(input_ids=tokens, labels=tokens).loss.backward()
    return {MERGED: merged}


def walk_zero() -> dict[str, Walk]:
    """Walk publish, reduction and `configure` of ZeRO 2 with one FP8 layer, on each rank of the default group."""
    from fp8booster.colossal.zero.gathered_weights import GatheredWeights
    from fp8booster.plugins import LowLevelZeroPlugin

    # isort: split
    from colossalai.booster import Booster

    plugin = LowLevelZeroPlugin(stage=2, precision="bf16", use_fp8=True, fp8_config=FP8Config(always=True))
    model = nn.Sequential(nn.Linear(256, 256, bias=False))
    configure = Walk()
    with configure.record_in(type(plugin), "configure"):
        model, optimizer, *_ = Booster(plugin=plugin).boost(model, torch.optim.AdamW(model.parameters()))
    for _ in range(2):
        loss = model(torch.randn(64, 256, dtype=torch.bfloat16)).float().square().mean()
        reduction, publish = Walk(), Walk()
        with reduction.record_in(type(optimizer), "_add_to_bucket", "_reduce_grad"):
            optimizer.backward(loss)
        with publish.record_in(GatheredWeights, "publish"):
            optimizer.step()
        optimizer.zero_grad()
    return {PUBLISH: publish, REDUCTION: reduction, CONFIGURE: configure}


def _run_rank(rank: int, ranks: int, port: int, results: Any) -> None:
    warnings.simplefilter("ignore")
    import fp8booster.plugins  # noqa: F401  (patches colossalai before it is imported)

    # isort: split
    import colossalai

    logging.disable(logging.WARNING)
    colossalai.launch(rank, ranks, "localhost", port)
    results.put((rank, {title: walk.calls for title, walk in walk_zero().items()}))


def walk_zero_on(ranks: int) -> dict[str, Walk]:
    """Walk the paths of ZeRO in new processes joined by gloo, and return those of rank 0.

    Raises:
        RuntimeError: a rank failed.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    processes = [context.Process(target=_run_rank, args=(rank, ranks, port, results)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        if process.exitcode:
            for other in processes:
                other.kill()
            raise RuntimeError(f"a rank ended with {process.exitcode}; its traceback is above")
    walks = {}
    for title, calls in dict(results.get() for _ in processes)[0].items():
        walks[title] = Walk()
        walks[title].calls = calls
    return walks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--show", metavar="PATH", help="print what a path calls: a part of its name, such as 'reduction'"
    )
    shown = parser.parse_args().show
    walks = {**walk_lone_layer(), **walk_merged_layers(), **walk_zero_on(2)}
    print("| path | files | moves | calls |\n|---|--:|--:|--:|")
    for title, walk in walks.items():
        print(f"| {title} | {walk.files} | {walk.moves} | {len(walk.calls)} |")
    for title, walk in walks.items():
        if shown and shown.lower() in title.lower():
            print(f"\n{title}:")
            for file, names in walk.stays():
                print(f"  {file}: {', '.join(names)}")


if __name__ == "__main__":
    main()
