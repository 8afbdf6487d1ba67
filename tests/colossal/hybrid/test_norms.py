"""Norms of gradients under `HybridParallelPlugin` are Colossal-AI's, without the host waiting for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fp8booster import comm
from tests.colossal.hybrid.runs import MODES, batches, fp8, native, sizes, start
from tests.colossal.models import tiny_llama
from tests.distributed import ranks
from tests.plugins.norms import assert_clips_by_one_norm, steps_of

CASES: dict[str, dict[str, Any]] = {
    mode: MODES[mode]
    for mode in ("DP2 ZeRO 2", "TP2", "TP2 split_gather", "SP2 all_to_all ZeRO 1", "PP2 1f1b", "PP2 1f1b ZeRO 1")
} | {
    "TP2 split_gather ZeRO 1": MODES["TP2 split_gather"] | {"zero_stage": 1},
    "DP2 FP16": {"precision": "fp16", "initial_scale": 2.0**8},
}


@ranks(2)
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_clipped_by_the_norm_that_native_finds(case: str) -> None:
    arguments = CASES[case]
    shared = arguments.get("pp_size", 1) > 1
    run = start(fp8(arguments), tiny_llama(**sizes(tie_word_embeddings=shared)))
    assert_clips_by_one_norm(run, *(step[0] for step in batches(0, 2, 2)), scale=arguments.get("initial_scale", 1.0))


@ranks(2)
@pytest.mark.parametrize("case", ["TP2 split_gather ZeRO 1", "PP2 1f1b ZeRO 1"])
def test_the_norm_is_that_of_sums_over_ranks_which_torch_does_not_count_as_changes(case: str) -> None:
    """Kernels write them so; norms of the parts are known by then."""
    from fp8booster.colossal.hybrid import sums

    add = comm.all_reduce_coalesced
    changed = []

    def add_unseen(tensors: list[torch.Tensor], *arguments: Any) -> None:
        changed.extend(tensors)
        with torch.autograd._unsafe_preserve_version_counter(tuple(tensors)):
            add(tensors, *arguments)

    with mock.patch.object(sums.comm, "all_reduce_coalesced", add_unseen):
        run = start(fp8(CASES[case]), tiny_llama(**sizes(tie_word_embeddings=True)))
        assert_clips_by_one_norm(run, *(step[0] for step in batches(0, 2, 2)))
    assert changed


@ranks(2)
@pytest.mark.parametrize("mode", ["TP2", "TP2 ZeRO 1"])
def test_natively_the_host_reads_the_norm(mode: str) -> None:
    _, _, reads = steps_of(start(native(mode)), batches(0, 1)[0][0], limit=1.0)
    assert reads > 0


@ranks(2)
def test_without_a_limit_there_is_no_norm_and_gradients_stay() -> None:
    run = start(fp8("TP2"))
    norm, exact, reads = steps_of(run, batches(0, 1)[0][0], limit=0.0)
    assert norm is None
    assert exact > 0
    assert reads == 0


@ranks(2)
def test_a_square_counts_once_over_tensor_and_pipeline_parallel_ranks() -> None:
    """Both at once, which takes four ranks, by two groups of these two."""
    from fp8booster.colossal.hybrid.gradient_norm import SharedSquares

    groups = [dist.new_group([0, 1]) for _ in range(2)]
    lone, shared = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    norms = [(lone, torch.tensor(2.0)), (shared, torch.tensor(4.0))]
    # by whether ranks are tensor and pipeline parallel: what a rank adds (both parameters are replicated), and the sum
    expected = {(True, True): (4 / 2 + 16 / 4, 24.0), (True, False): (20 / 2, 20.0), (False, True): (4 + 16 / 2, 24.0)}
    for (tensor_parallel, pipeline), (own, total) in expected.items():
        optimizer = SimpleNamespace(
            tp_pg=groups[0] if tensor_parallel else None,
            pp_pg=groups[1] if pipeline else None,
            shared_params=[{0: shared, 1: shared}],
            stage_manager=SimpleNamespace(stage=dist.get_rank()),
        )
        squares = SharedSquares(optimizer)
        found = squares.own(norms)
        assert found.item() == own
        squares.add_over_ranks(found)
        assert found.item() == total
