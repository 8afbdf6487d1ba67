"""What colossalai 0.5.0 lacks for ranks without CUDA, joined by gloo."""

from __future__ import annotations

from fp8booster.colossal.compat.cpu import accelerator, engines, gemini, saving  # noqa: F401 (registers their patches)
