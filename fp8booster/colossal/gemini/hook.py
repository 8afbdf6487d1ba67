"""Gemini's hook on whatever reads a parameter, where some parameters stay gathered and some exist in FP8 alone."""

from __future__ import annotations

import torch
from colossalai.utils import is_ddp_ignored
from colossalai.zero.gemini.chunk import TensorState
from colossalai.zero.gemini.gemini_hook import GeminiZeROHook

from fp8booster.colossal.gemini.chunks import FP8Chunk
from fp8booster.colossal.gemini.layers import ReadByProduct


class FP8GeminiHook(GeminiZeROHook):
    """Leaves chunks of weights where they are while vectors are read, and decodes FP8 weights for other operators."""

    def pre_op(self, params: list[torch.Tensor]) -> None:
        """Gather the chunks of these parameters, before a forward or a backward reads them."""
        manager = self._chunk_manager
        managed = [parameter for parameter in params if not is_ddp_ignored(parameter)]
        chunks = [manager.get_chunk(parameter) for parameter in managed]
        if not all(chunk.keep_gathered for chunk in chunks):
            super().pre_op(params)
        else:
            # needs no memory: Colossal-AI would release what the layers before and after a norm share
            for parameter, chunk in zip(managed, chunks, strict=True):
                manager.trans_tensor_state(parameter, TensorState.COMPUTE)
                manager.access_chunk(chunk)
        if not isinstance(params, ReadByProduct):
            for parameter, chunk in zip(managed, chunks, strict=True):
                if isinstance(chunk, FP8Chunk):
                    chunk.decode(parameter)
