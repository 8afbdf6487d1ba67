"""Gemini's hook on whatever reads a parameter, where some parameters exist in FP8 alone."""

from __future__ import annotations

import torch
from colossalai.utils import is_ddp_ignored
from colossalai.zero.gemini.gemini_hook import GeminiZeROHook

from fp8booster.colossal.gemini.chunks import FP8Chunk
from fp8booster.colossal.gemini.layers import ReadByProduct


class FP8GeminiHook(GeminiZeROHook):
    """Decodes the weights of FP8 chunks for operators other than their layers' products."""

    def pre_op(self, params: list[torch.Tensor]) -> None:
        """Gather the chunks of these parameters, before a forward or a backward reads them."""
        super().pre_op(params)
        if isinstance(params, ReadByProduct):
            return
        for parameter in params:
            if not is_ddp_ignored(parameter):
                chunk = self._chunk_manager.get_chunk(parameter)
                if isinstance(chunk, FP8Chunk):
                    chunk.decode(parameter)
