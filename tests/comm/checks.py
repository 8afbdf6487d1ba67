"""What every rank runs: each function checks one property of `fp8booster.comm` against `torch.distributed`."""

from __future__ import annotations

import faulthandler
import sys
import traceback

import torch
import torch.distributed as dist

from fp8booster import comm
from tests.comm import (  # noqa: F401
    exchange_checks,
    gather_checks,
    handle_checks,
    harness,
    point_to_point_checks,
    reduction_checks,
    sub_group_checks,
    value_checks,
)
from tests.comm.harness import CHECKS

SECONDS = 60
"""What a check lasts at most."""


def run_checks(device: str = "cpu") -> dict[str, str | None]:
    """Run the checks on this rank, up to the first that fails: name to None, or to what went wrong.

    A rank that stops closes its connections, so that the others, which may wait for it, fail at once.
    """
    harness.DEVICE = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    outcomes: dict[str, str | None] = dict.fromkeys(CHECKS, "not run: a check before it failed")
    for name, function in CHECKS.items():
        torch.manual_seed(1000 + dist.get_rank())
        comm.reset_statistics()
        # over NCCL ranks that miss each other hang: say where, and end
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        try:
            function()
            dist.barrier()
            outcomes[name] = None
        except Exception:
            outcomes[name] = traceback.format_exc()
            # at once: over NCCL the other ranks may wait for this one until they are killed
            sys.stderr.write(f"rank {dist.get_rank()}: {name}\n{outcomes[name]}\n")
            break
        finally:
            faulthandler.cancel_dump_traceback_later()
    return outcomes
