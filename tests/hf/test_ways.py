"""Five steps, evaluation, save and resume in FP8: by a plain loop, the Trainer, Accelerate, and TRL's SFTTrainer."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from transformers import AutoModelForCausalLM

from fp8booster import report
from fp8booster.nn import FP8Layer
from tests.hf.ways import ALWAYS, SAVED, STEPS, WAYS, WITH_TRL, Run, evaluate, run

CLOSE = 0.01
"""How far a loss in FP8 may lie from that in BF16."""


@dataclass
class Runs:
    """Of one way."""

    bf16: Run
    fp8: Run
    resumed: Run
    crossed: Run  # in FP8, from the checkpoint of that in BF16


@pytest.fixture(
    scope="module", params=[pytest.param(way, marks=WITH_TRL if way == "SFTTrainer" else ()) for way in WAYS]
)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp(request.param)
    bf16 = run(request.param, folder / "bf16", None)
    fp8 = run(request.param, folder / "fp8", ALWAYS)
    resumed, crossed = (run(request.param, folder / name, ALWAYS, resume=True) for name in ("fp8", "bf16"))
    return Runs(bf16, fp8, resumed, crossed)


def test_losses_in_fp8_are_near_those_in_bf16(runs: Runs) -> None:
    assert len(runs.fp8.losses) == STEPS
    assert runs.fp8.losses[-1] < 0.97 * runs.fp8.losses[0]
    assert runs.fp8.losses == pytest.approx(runs.bf16.losses, rel=CLOSE)
    assert runs.fp8.losses != runs.bf16.losses


def test_all_layers_but_the_vocabulary_head_ran_in_fp8(runs: Runs) -> None:
    assert not any(isinstance(each, FP8Layer) for each in runs.bf16.model.modules())
    told = report(runs.fp8.model)
    assert {row.name for row in told.other} == {"lm_head"}
    # q, k and v, and gate and up, also under autocast
    assert "10 of them merged to 4 products" in told.summary()
    # a layer notes it when it runs
    assert any(each.in_fp8 for each in runs.fp8.model.modules() if isinstance(each, FP8Layer))


def test_it_evaluates_with_the_weights_of_the_last_step(runs: Runs) -> None:
    native = AutoModelForCausalLM.from_pretrained(runs.fp8.last)
    assert runs.fp8.evaluation == pytest.approx(evaluate(native), rel=CLOSE)
    assert runs.fp8.evaluation < runs.fp8.losses[0]


def test_transformers_loads_what_it_saves(runs: Runs) -> None:
    native, loading = AutoModelForCausalLM.from_pretrained(runs.fp8.last, output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    trained = dict(runs.fp8.model.named_parameters())
    assert trained.keys() == dict(native.named_parameters()).keys()
    assert all(torch.equal(trained[name], each) for name, each in native.named_parameters())


def test_it_generates_what_the_saved_model_does(runs: Runs) -> None:
    native = AutoModelForCausalLM.from_pretrained(runs.fp8.last)
    start = torch.arange(8)[None]
    generated, expected = (
        model.eval().generate(start, attention_mask=torch.ones_like(start), max_new_tokens=4, do_sample=False)
        for model in (runs.fp8.model, native)
    )
    assert torch.equal(generated, expected)


def test_a_resumed_run_has_equal_losses_and_weights(runs: Runs) -> None:
    assert runs.resumed.losses == runs.fp8.losses[SAVED:]
    assert runs.resumed.evaluation == runs.fp8.evaluation
    weights = runs.fp8.model.state_dict()
    assert all(torch.equal(weights[name], each) for name, each in runs.resumed.model.state_dict().items())


def test_a_run_in_bf16_resumes_in_fp8(runs: Runs) -> None:
    assert len(runs.crossed.losses) == STEPS - SAVED
    assert runs.crossed.losses == pytest.approx(runs.bf16.losses[SAVED:], rel=CLOSE)
