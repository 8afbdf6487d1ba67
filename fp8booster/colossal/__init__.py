"""The seam to Colossal-AI. Importing it applies the patches that colossalai needs to import and to train."""

from __future__ import annotations

import torch

from fp8booster.colossal import compat
from fp8booster.kernels.instructions import multiply_bf16_in_fp32

compat.apply()
if not torch.cuda.is_available():
    multiply_bf16_in_fp32()  # in ranks too, which import this before their first product
