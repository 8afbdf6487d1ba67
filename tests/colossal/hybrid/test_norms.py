"""Norms of gradients under `HybridParallelPlugin` are Colossal-AI's, without the host waiting for them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fp8booster import comm
from tests.colossal.hybrid.runs import MODES, HybridRun, batches, fp8, native, sizes, start
from tests.colossal.hybrid.test_sharded_models import MODELS, VOCABULARY
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
    from fp8booster.colossal.zero import buckets

    add = comm.all_reduce_coalesced
    changed = []

    def add_unseen(tensors: list[torch.Tensor], *arguments: Any, **named: Any) -> None:
        changed.extend(tensors)
        with torch.autograd._unsafe_preserve_version_counter(tuple(tensors)):
            add(tensors, *arguments, **named)

    # of so few gradients they would be found in the step
    noted = mock.patch.object(buckets, "NORM_BYTES", 0)
    with noted, mock.patch.object(sums.comm, "all_reduce_coalesced", add_unseen):
        run = start(fp8(CASES[case]), tiny_llama(**sizes(tie_word_embeddings=True)))
        assert_clips_by_one_norm(run, *(step[0] for step in batches(0, 2, 2)))
    assert changed


def norm_by_sizes(run: HybridRun, whole: dict[str, int]) -> Callable[[Any], float]:
    """Of its masters' gradients, where those of parameters that are smaller than a whole model's are shards.

    Args:
        whole: the elements of each parameter of a whole model.
    """
    names = {id(value): name for name, value in run.model.unwrap().named_parameters()}

    def norm(optimizer: Any) -> float:
        working = optimizer.get_master_to_working_map()
        squares = torch.zeros(2, dtype=torch.float64)
        for group in optimizer.param_groups:
            for master in group["params"]:
                parameter = working[id(master)]
                is_shard = parameter.numel() < whole[names[id(parameter)]]
                squares[int(is_shard)] += master.grad.double().square().sum()
        dist.all_reduce(squares[1:])
        return squares.sum().sqrt().item()

    return norm


@pytest.mark.skipif("GPT-2" not in MODELS, reason="the installed transformers' GPT-2 is not sharded")
@ranks(2)
@pytest.mark.parametrize("make", [fp8, native])
@pytest.mark.parametrize("mode", ["TP2", "TP2 ZeRO 1"])
def test_the_norm_of_fused_layers_has_each_shard_once(make: Callable, mode: str) -> None:
    model = MODELS["GPT-2"][0]()
    whole = {name: value.numel() for name, value in model.named_parameters()}
    run = start(make(mode), model)
    norm, exact, _ = steps_of(run, batches(0, 1)[0][0] % VOCABULARY, limit=1e6, norm_of=norm_by_sizes(run, whole))
    assert norm == pytest.approx(exact, rel=1e-5)


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
    from fp8booster.colossal.hybrid.gradients import SharedSquares

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
