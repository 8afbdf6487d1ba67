"""Five steps, evaluation, save and resume in FP8 on two ranks: by FSDP2 and by ZeRO, as `test_ways` has it on one."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from fp8booster import report
from tests.distributed import ranks, shared_folder
from tests.hf.ways import ALWAYS, ON_RANKS, SAVED, STEPS, evaluate, run, whole_state

CLOSE = 0.01


@ranks(2)
@pytest.mark.parametrize("way", ON_RANKS)
def test_a_way_on_ranks_trains_evaluates_saves_and_resumes(way: str) -> None:
    folder = shared_folder(way)
    native = run(way, folder / "bf16", None)
    ours = run(way, folder / "fp8", ALWAYS)
    assert len(ours.losses) == STEPS
    assert ours.losses[-1] < 0.97 * ours.losses[0]
    assert ours.losses == pytest.approx(native.losses, rel=CLOSE)
    assert ours.losses != native.losses
    told = report(ours.model)
    assert {row.name for row in told.other} == {"lm_head"}
    assert "10 of them merged to 4 products" in told.summary()

    loaded, loading = AutoModelForCausalLM.from_pretrained(ours.last, output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert ours.evaluation == pytest.approx(evaluate(loaded), rel=CLOSE)
    assert ours.evaluation < ours.losses[0]

    resumed = run(way, folder / "fp8", ALWAYS, resume=True)
    crossed = run(way, folder / "bf16", ALWAYS, resume=True)
    assert len(crossed.losses) == STEPS - SAVED
    assert crossed.losses == pytest.approx(native.losses[SAVED:], rel=CLOSE)
    if way == "ZeRO":  # a Booster checkpoint has the masters in 16 bits
        assert resumed.losses == pytest.approx(ours.losses[SAVED:], rel=CLOSE)
        return
    assert resumed.losses == ours.losses[SAVED:]
    weights, others = (whole_state(model) for model in (ours.model, resumed.model))
    assert weights.keys() == loaded.state_dict().keys()
    for name, weight in loaded.state_dict().items():
        assert torch.equal(weights[name], weight)
        assert torch.equal(weights[name], others[name])
