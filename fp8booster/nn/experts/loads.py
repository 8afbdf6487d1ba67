"""The experts that tokens chose last, by block, for the report; nothing is counted before somebody asks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from fp8booster.kernels.device import is_captured
from fp8booster.nn.experts.routing import count_rows


class _LastChoice:
    """The choice of a block's last batch in training; a copy or a pickle of it holds none."""

    def __init__(self) -> None:
        self.chosen: torch.Tensor | None = None
        self.experts = 0

    def __reduce__(self) -> tuple:
        return _LastChoice, ()


_LAST = "_fp8_last_choice"


def note_choice(block: nn.Module, chosen: torch.Tensor, experts: int) -> None:
    """Remember which experts a block's tokens have chosen, in training and in eager code: no replayed graph's.

    Args:
        block: the experts, or what holds them.
        chosen: integers [T, k], of this rank's tokens; kept as it is until the next batch.
        experts: of all ranks.
    """
    if not block.training or torch.compiler.is_compiling():
        return
    # the memory of a capture is the graph's
    if not is_captured(chosen):
        last = vars(block).get(_LAST)
        if last is None:  # one object: who looks whether a block has changed finds none that is new
            last = vars(block)[_LAST] = _LastChoice()
        last.chosen, last.experts = chosen.detach(), experts


def loads_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, tuple[int, ...]]]:
    """Find how many of this rank's tokens chose each expert in the last batch in training: path, block and tokens.

    The host waits for the device. Blocks that have not run are left out.
    """
    for name, module in model.named_modules():
        last = vars(module).get(_LAST)
        if last is not None and last.chosen is not None:
            yield name, module, tuple(count_rows(last.chosen, last.experts).tolist())
