"""The cast of many matrices at once, each with its own real-time scale: a model's weights after an optimizer step.

A small matrix costs more to launch for than to cast. `ManyCast` is made once for matrices and buffers that stay where
they are; each `run` casts the matrices as they are then.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8booster import formats
from fp8booster.kernels.alignment import ALIGNMENT
from fp8booster.kernels.cast import cast
from fp8booster.kernels.device import why_no_fp8


class ManyCast:
    """Casts a list of matrices to FP8 in both layouts, on a GPU by two launches for all of them.

    Matrix i is [R_i, C_i]; R_i and C_i are multiples of 16. Matrices and outputs are contiguous, lie on one device and
    begin at multiples of 16 bytes. All are kept alive and outputs written in place, so a CUDA graph can hold `run`.

    Args:
        matrices: one or more, BF16, FP16 or FP32, all of one dtype.
        plains: [R_i, C_i] of one FP8 dtype; written.
        transposes: [C_i, R_i] of that dtype; written.
        inverse_scales: float32 [matrices] of any stride, see `scales.new_inverse_scales`; written.
        power_of_two: see `scales.scale_of`.

    Raises:
        ValueError: shapes, layouts or devices that are not as above.
        TypeError: dtypes that are not.
    """

    def __init__(
        self,
        matrices: Sequence[Tensor],
        plains: Sequence[Tensor],
        transposes: Sequence[Tensor],
        inverse_scales: Tensor,
        power_of_two: bool = False,
    ) -> None:
        _check(matrices, plains, transposes, inverse_scales)
        self.matrices = [matrix.detach() for matrix in matrices]
        self.plains, self.transposes, self.inverse_scales = list(plains), list(transposes), inverse_scales
        self.power_of_two = power_of_two
        self._launches = None
        if inverse_scales.is_cuda and why_no_fp8(inverse_scales.device) is None:
            from fp8booster.kernels.many_cast_triton import Launches  # Triton is needed only here

            self._launches = Launches(self.matrices, self.plains, self.transposes, inverse_scales, power_of_two)

    def run(self) -> None:
        """Cast the matrices as they are now. A backward that has yet to read the outputs of an earlier run raises."""
        if self._launches is not None:
            self._launches.run()
            torch.autograd.graph.increment_version([*self.plains, *self.transposes, self.inverse_scales])
            return
        for matrix, *outputs in zip(
            self.matrices, self.plains, self.transposes, self.inverse_scales.unbind(), strict=True
        ):
            results = cast.reference(matrix, outputs[0].dtype, transposed=True, power_of_two=self.power_of_two)
            for output, result in zip(outputs, results, strict=True):
                output.copy_(result)


def _check(
    matrices: Sequence[Tensor], plains: Sequence[Tensor], transposes: Sequence[Tensor], inverse_scales: Tensor
) -> None:
    counts = [len(matrices), len(plains), len(transposes), len(inverse_scales)]
    if len(set(counts)) > 1 or counts[0] == 0:
        raise ValueError(
            f"{counts[0]} matrices, {counts[1]} plain outputs, {counts[2]} transposes and {counts[3]} inverse scales; "
            "give one or more, and as many of each"
        )
    source, dtype, device = matrices[0].dtype, plains[0].dtype, inverse_scales.device
    formats.require_high_precision(matrices[0], "the first matrix")
    formats.require_format(dtype)
    if inverse_scales.dtype is not torch.float32:
        raise TypeError(f"inverse scales are {inverse_scales.dtype}; give float32")
    for index, (matrix, plain, transpose) in enumerate(zip(matrices, plains, transposes, strict=True)):
        if matrix.dim() != 2 or matrix.numel() == 0 or any(size % ALIGNMENT for size in matrix.shape):
            raise ValueError(
                f"matrix {index} has shape {tuple(matrix.shape)}; rows and columns must be multiples of {ALIGNMENT}"
            )
        rows, columns = matrix.shape
        for what, tensor, shape, expected in (
            ("matrix", matrix, (rows, columns), source),
            ("plain output", plain, (rows, columns), dtype),
            ("transpose", transpose, (columns, rows), dtype),
        ):
            if tensor.dtype is not expected:
                raise TypeError(f"{what} {index} is {tensor.dtype} and the first is {expected}; give one dtype")
            if tensor.shape != shape:
                raise ValueError(f"{what} {index} has shape {tuple(tensor.shape)}; it must be {shape}")
            if tensor.device != device:
                raise ValueError(f"{what} {index} is on {tensor.device} and the inverse scales on {device}")
            if not tensor.is_contiguous() or tensor.data_ptr() % ALIGNMENT:
                raise ValueError(f"{what} {index} must be contiguous and begin at a multiple of {ALIGNMENT} bytes")
