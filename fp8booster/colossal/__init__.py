"""The seam to Colossal-AI. Importing it applies the patches that colossalai needs to import and to train."""

from __future__ import annotations

from fp8booster.colossal import compat

compat.apply()
