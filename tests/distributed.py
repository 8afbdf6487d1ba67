"""Start gloo ranks for a test: `run_ranks(fn, world_size, *args)`."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

_PRELOADED = (
    "fp8booster.plugins",
    "colossalai.booster.plugin",
    "colossalai.shardformer.policies.llama",
    "transformers.models.llama.modeling_llama",
)
"""What takes a rank 7 to 10 s to import; the first of them mends colossalai before it is imported."""


class RankError(RuntimeError):
    """A rank raised, died or did not finish in time; the message names it and carries its traceback."""


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    initialize: bool = True,
    environment: dict[str, str] | None = None,
    preloaded: bool = False,
) -> list[Any]:
    """Call `fn(*args)` in `world_size` new processes joined by gloo; return each rank's value, in rank order.

    `fn`, `args` and the values are pickled, so `fn` lives at the top level of a module. Ranks see the variables
    that torchrun sets (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, ...) and `environment` on top of
    them, before `fn`'s module is imported. Each runs on one thread. With `initialize=False` no process group is
    made, for a `fn` that makes its own (`launch_from_torch`). `timeout` is in seconds, start-up included.
    With `preloaded` the ranks are forks of a process that has imported Colossal-AI and its plugins once for the whole
    session, for a `fn` whose subject is not what gets imported; a process with a GPU is never forked.

    Raises RankError when a rank raises, dies or is late; the other ranks are killed before it is raised.
    """
    # The parent holds the store's socket, so there is no free port for another process to take in between.
    context = rank_context(preloaded)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes, pipes = [], []
    try:
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            variables = _torchrun_variables(rank, world_size, store.port) | (environment or {})
            process = context.Process(
                target=_rank_main, args=(sender, variables, initialize, timeout, pickle.dumps((fn, args)))
            )
            process.start()
            sender.close()
            processes.append(process)
            pipes.append(receiver)
        return _collect(pipes, time.monotonic() + timeout, timeout)
    finally:
        for process in processes:
            process.kill()
            process.join()


def rank_context(preloaded: bool = False) -> multiprocessing.context.BaseContext:
    """What starts the processes of ranks; `preloaded` as in `run_ranks`."""
    if not preloaded or torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))  # heard by the first rank alone, which starts the server
    return context


def _torchrun_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
    }


def _rank_main(
    sender: Connection, variables: dict[str, str], initialize: bool, timeout: float, call: bytes
) -> None:
    os.environ.update(variables)
    try:
        torch.set_num_threads(1)
        if initialize:
            dist.init_process_group("gloo", init_method="env://", timeout=timedelta(seconds=timeout))
        # Unpickled only now, so that the module of `fn` is imported under `variables`.
        fn, args = pickle.loads(call)
        # Plain bytes: a tensor would otherwise travel as shared memory that ends with this process.
        answer = pickle.dumps((True, fn(*args)))
    except BaseException:  # whatever ends a rank is the parent's to report
        answer = pickle.dumps((False, traceback.format_exc()))
    sender.send_bytes(answer)


def _collect(pipes: list[Connection], deadline: float, timeout: float) -> list[Any]:
    values: dict[int, Any] = {}
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankError(f"rank(s) {sorted(waiting.values())} did not finish within {timeout:g} s")
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                succeeded, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                raise RankError(f"rank {rank} died without a Python traceback") from None
            if not succeeded:
                raise RankError(f"rank {rank} of {len(pipes)} failed:\n{value}")
            values[rank] = value
    return [values[rank] for rank in range(len(pipes))]
