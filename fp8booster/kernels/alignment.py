"""Multiples in which products take rows and columns."""

ALIGNMENT = 16
"""Of `torch._scaled_mm` on CUDA."""

BLOCK = 128
"""Of products with blockwise scales: the values of a group, and the side of a block."""


def multiple_for(granularity: str) -> int:
    """Return the multiple for scales of `FP8Config.granularity`."""
    return BLOCK if granularity == "blockwise" else ALIGNMENT


def aligned(size: int, multiple: int = ALIGNMENT) -> int:
    """Return `size`, rounded up to the next multiple."""
    return (size + multiple - 1) // multiple * multiple
