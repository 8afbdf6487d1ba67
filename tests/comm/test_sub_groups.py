"""That every function does in a part of the ranks what torch.distributed's does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fp8booster import comm
from tests.comm import harness
from tests.comm.harness import rank_test


def calls_in(group: dist.ProcessGroup) -> dict[str, Callable[..., list[torch.Tensor]]]:
    """Each function that torch.distributed has too, in a group; of the module and options it gives what arrived.

    What a rank has for another differs from all else by a half or more, which no rounding hides.
    """
    members = dist.get_process_group_ranks(group)
    ranks, rank = len(members), group.rank()
    after, before = members[(rank + 1) % ranks], members[rank - 1]
    rows = torch.tensor([2.0 ** (4 * rank + part) for part in range(ranks)], device=harness.DEVICE)
    values = rows.repeat_interleave(300)
    own = values[:300] * 3
    sizes = [[100 * (1 + sender + 2 * receiver) for receiver in range(ranks)] for sender in range(ranks)]
    sent, received = sizes[rank], [of[rank] for of in sizes]
    uneven = rows.repeat_interleave(torch.tensor(sent, device=harness.DEVICE))

    def all_reduce(module: Any, op: Any = dist.ReduceOp.SUM, **options: Any) -> list[torch.Tensor]:
        out = values.clone()
        module.all_reduce(out, op, group, **options)
        return [out]

    def reduce_scatter(module: Any, **options: Any) -> list[torch.Tensor]:
        outs = torch.empty_like(own), torch.empty_like(own)
        module.reduce_scatter_tensor(outs[0], values, group=group, **options)
        module.reduce_scatter(outs[1], list(values.chunk(ranks)), group=group, **options)
        return list(outs)

    def gather(module: Any, **options: Any) -> list[torch.Tensor]:
        out, outs = torch.empty_like(values), [torch.empty_like(own) for _ in members]
        module.all_gather_into_tensor(out, own, group, **options)
        module.all_gather(outs, own, group, **options)
        return [out, *outs]

    def all_to_all(module: Any, **options: Any) -> list[torch.Tensor]:
        out, outs = torch.empty_like(values), [torch.empty_like(own) for _ in members]
        module.all_to_all_single(out, values, group=group, **options)
        module.all_to_all(outs, [part.clone() for part in values.chunk(ranks)], group, **options)
        return [out, *outs]

    def all_to_all_of_rows(module: Any, **options: Any) -> list[torch.Tensor]:
        outs = []
        for shape in ((), (4,), (2, 3), (1, 2, 2)):
            out = torch.empty(sum(received), *shape, device=harness.DEVICE)
            given = uneven.view(-1, *[1] * len(shape)).expand(-1, *shape).contiguous()
            module.all_to_all_single(out, given, received, sent, group, **options)
            outs.append(out)
        return outs

    def broadcast(module: Any, **options: Any) -> list[torch.Tensor]:
        outs = [own.clone(), own.clone()]
        module.broadcast(outs[0], members[-1], group, **options)
        module.broadcast(outs[1], group=group, group_src=ranks - 1, **options)
        return outs

    def one_by_one(module: Any, **options: Any) -> list[torch.Tensor]:
        outs = [torch.empty_like(own) for _ in range(4)]
        for pair, by_group in enumerate((False, True)):
            to = {"group_dst": (rank + 1) % ranks} if by_group else {"dst": after}
            source = {"group_src": (rank - 1) % ranks} if by_group else {"src": before}
            # the second of two messages is asked for first: their tags tell them apart
            works = [
                module.isend(own, group=group, tag=1, **to, **options),
                module.isend(own * 2, group=group, tag=2, **to, **options),
                module.irecv(outs[2 * pair + 1], group=group, tag=2, **source, **options),
                module.irecv(outs[2 * pair], group=group, tag=1, **source, **options),
            ]
            for work in works:
                work.wait()
        return outs

    def batched(module: Any, **options: Any) -> list[torch.Tensor]:
        outs = [torch.empty_like(own) for _ in range(3)]
        to, source = ({"peer": after}, {"peer": before})
        to_member, from_member = ({"group_peer": (rank + 1) % ranks}, {"group_peer": (rank - 1) % ranks})
        works = module.batch_isend_irecv(
            [
                module.P2POp(module.isend, own, group=group, tag=1, **to, **options),
                module.P2POp(module.isend, own * 2, group=group, tag=2, **to, **options),
                module.P2POp(module.irecv, outs[1], group=group, tag=2, **source, **options),
                module.P2POp(module.irecv, outs[0], group=group, tag=1, **source, **options),
                module.P2POp(module.isend, own * 4, group=group, tag=3, **to_member, **options),
                module.P2POp(module.irecv, outs[2], group=group, tag=3, **from_member, **options),
            ]
        )
        for work in works:
            work.wait()
        return outs

    return {
        "all_reduce": all_reduce,
        "reduce_scatter": reduce_scatter,
        "gather": gather,
        "all_to_all": all_to_all,
        "all_to_all of rows": all_to_all_of_rows,
        "broadcast": broadcast,
        **(
            {} if harness.DEVICE.type == "cuda" else {"one by one": one_by_one, "batched": batched}
        ),  # NCCL knows no tags
    }


@rank_test
def test_every_function_does_in_a_sub_group_what_torchs_does() -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    members = list(range(1, ranks))
    group = dist.new_group(members)
    if len(members) > 1 and rank in members:
        for name, call in calls_in(group).items():
            expected = call(dist)
            for min_bytes in (0, 2**30):
                for one, other in zip(expected, call(comm, min_bytes=min_bytes), strict=True):
                    torch.testing.assert_close(other, one, rtol=2**-3, atol=0, msg=lambda text, name=name: name + text)
        values = torch.full((300 * len(members),), 2.0**rank, device=harness.DEVICE)
        part, own = torch.empty(300, device=harness.DEVICE), values[:5].clone()
        comm.reduce_scatter_coalesced(part, [values], group=group, min_bytes=0)
        comm.all_reduce_coalesced([own], group=group)
        for found in (part, own):
            torch.testing.assert_close(found, torch.full_like(found, sum(2.0**member for member in members)))
    dist.destroy_process_group(group)
