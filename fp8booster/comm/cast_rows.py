"""Rows that are in FP8 before they are sent: as they are, with no message around them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from fp8booster.comm.observer import observer

_COLLECTIVE = "all_to_all_single"
"""Its name, and the row of `statistics`."""


def send_cast_rows(
    rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup, *, payload: int, scaling: object
) -> Tensor:
    """Send each rank its rows, and return those that come for this one.

    Args:
        rows: [sum(sent), B] FP8, contiguous, those for each rank one after the other.
        sent, received: rows for and from each rank; may be zero.
        group: the ranks.
        payload: bytes of the rows in high precision, with which those sent are compared.
        scaling: the strategy of the cast, which ranks must have alike.

    Returns:
        [max(sum(received), 1), B], for kernels read no empty matrix: without a row that came, one of no meaning.

    Raises:
        ValueError: the ranks do not agree on size, format or scaling.
    """
    width, total = rows.shape[1], sum(received)
    # of an empty part nothing arrives
    what = {"values": f"cast rows of {width}", "dtype": rows.dtype, "scaling": scaling}
    observer.enter(group, _COLLECTIVE, on_arrival=False, what=what)
    output = torch.empty(max(total, 1), width, dtype=torch.uint8, device=rows.device)
    dist.all_to_all_single(output[:total], rows.view(torch.uint8), received, sent, group)
    # behind the launch, for which a GPU waits
    observer.count_encoded(_COLLECTIVE, group.size(), payload, {_COLLECTIVE: rows.nbytes})
    return output.view(rows.dtype)
