"""The multiple in which `torch._scaled_mm` takes rows and columns on CUDA."""

ALIGNMENT = 16


def aligned(size: int) -> int:
    """`size`, rounded up to the next multiple of `ALIGNMENT`."""
    return (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
