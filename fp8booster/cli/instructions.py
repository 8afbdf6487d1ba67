"""CPUs that advertise Intel AMX and trap on it: virtual machines whose host does not switch it on.

PyTorch multiplies in BF16 and FP8 by AMX where it is advertised, through oneDNN, and there dies of an illegal
instruction. A variable, which oneDNN reads at its first product, limits it to the instructions before AMX.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from pathlib import Path

from fp8booster.kernels.product import ONEDNN_INSTRUCTIONS

VARIABLE = ONEDNN_INSTRUCTIONS
BEFORE_AMX = "AVX512_CORE_FP16"
"""The newest that has BF16 and FP8 products without AMX."""

_PRODUCT = "import torch; torch.ones(32, 32).bfloat16() @ torch.ones(32, 32).bfloat16()"


@functools.cache
def avoid_trapping_instructions() -> str | None:
    """Limit the products of this process, and of those that it starts, to instructions that this CPU has.

    Call it before the first product. Where AMX is advertised it costs a short process that tries it.

    Returns:
        What was found and done, in a sentence; None where nothing had to be.
    """
    if VARIABLE in os.environ or not _advertises_amx():
        return None
    # in another process: a product that traps ends it
    tried = subprocess.run([sys.executable, "-W", "ignore", "-c", _PRODUCT], capture_output=True, check=False)
    if tried.returncode != -signal.SIGILL:
        return None
    os.environ[VARIABLE] = BEFORE_AMX
    return (
        "This CPU advertises Intel AMX and traps on it, so products take the instructions before it "
        f"({VARIABLE}={BEFORE_AMX})."
    )


def _advertises_amx() -> bool:
    processors = Path("/proc/cpuinfo")
    return processors.exists() and "amx_bf16" in processors.read_text()
