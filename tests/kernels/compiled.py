"""Compile a Triton kernel for Hopper, which takes no GPU, and read what it moves."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Collection, Mapping
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


def ptx_of(kernel: Any, types: Mapping[str, str], constants: Mapping[str, object], **options: object) -> str:
    """PTX for sm_90; arguments as in `stages_of`."""
    return stages_of(kernel, types, constants, **options)["ptx"]


def stages_of(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, object],
    *,
    unspecialized: Collection[str] = (),
    **options: object,
) -> Mapping[str, str]:
    """What the compiler makes of a kernel for sm_90, by stage: "ttir" (Triton's own form), ..., "ptx".

    Args:
        kernel: a `triton.jit` function.
        types: Triton's type of each parameter that is no constant; others are ignored.
        constants: compile-time constants, as far as the kernel has them.
        unspecialized: parameters that need not be multiples of 16, as all others are.
        options: of the compiler, such as num_warps.
    """
    names = kernel.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    source = ASTSource(
        kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {
            (names.index(name),): [["tt.divisibility", 16]]
            for name in names
            if name not in constants and name not in unspecialized
        },
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm


def narrow_accesses(ptx: str) -> list[str]:
    """Loads and stores of global memory that move one value of 8 or 16 bits."""
    return re.findall(r"\b(?:ld|st)\.global\.b(?:8|16)\b", ptx)


def sass_of(kernel: Any, types: Mapping[str, str], constants: Mapping[str, object], **options: object) -> str:
    """What the GPU runs, for sm_90; arguments as in `stages_of`."""
    cubin = stages_of(kernel, types, constants, **options)["cubin"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = str(triton.knobs.nvidia.nvdisasm.path)
        return subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout
