"""The doctor's judgement of environments that this machine does not have."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest

from fp8booster.cli.doctor.problems import GPU, Colossal, Environment, find_problems
from fp8booster.cli.doctor.products import Check

VERSIONS = {
    "python": "3.11.7",
    "fp8booster": "0.1.0",
    "torch": "2.13.0+cu130",
    "triton": "3.7.1",
    "transformers": "4.51.3",
    "tokenizers": "0.21.4",
    "peft": "0.13.2",
    "colossalai": "0.5.0",
    "datasets": "4.8.5",
    "torchao": None,
}
HEALTHY = Environment(
    versions=VERSIONS,
    cuda="13.0",
    driver="580.1",
    nccl="2.28.9",
    gpus=[GPU(0, "NVIDIA H200", "9.0", 150 * 10**9, "cuDNN")],
    backends=["nccl", "gloo"],
)
RUNS = [
    Check(device, formats, 0.002, None) for device in ("cpu", "cuda:0") for formats in ("E4M3 x E4M3", "E5M2 x E4M3")
]
IMPORTS = Colossal(error=None, missing=None, patches=[])


def only_problem(environment=HEALTHY, checks=RUNS, colossal=IMPORTS):
    (problem,) = find_problems(environment, checks, colossal)
    return problem


def with_versions(**versions):
    return replace(HEALTHY, versions=VERSIONS | versions)


def test_a_healthy_machine_has_no_problem():
    assert find_problems(HEALTHY, RUNS, IMPORTS) == []


def test_a_cpu_that_traps_is_a_note_with_its_variable():
    problem = only_problem(replace(HEALTHY, instructions="This CPU traps."))
    assert problem.remedy == "export ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16"
    assert not problem.stops_training


def test_a_cpu_without_bf16_is_a_note_with_the_function_to_call():
    problem = only_problem(replace(HEALTHY, bf16="This CPU multiplies in FP32."))
    assert problem.sentence.startswith("This CPU multiplies in FP32. ")
    module, _, function = problem.sentence.rpartition(" ")[2].removesuffix("().").rpartition(".")
    assert callable(getattr(importlib.import_module(module), function))
    assert not problem.stops_training


@pytest.mark.parametrize(
    ("versions", "remedy", "stops"),
    [
        ({"torch": "2.10.1"}, "pip install --upgrade 'torch>=2.11'", True),
        ({"colossalai": None}, "pip install --no-deps colossalai==0.5.0", True),
        ({"colossalai": "0.4.9"}, "pip install --no-deps colossalai==0.5.0", False),
        ({"transformers": "5.1.0"}, "pip install transformers==4.51.3", False),
        ({"triton": None}, "pip install triton", False),
        ({"datasets": None}, "pip install 'fp8booster[data]'", False),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_versions(versions, remedy, stops):
    problem = only_problem(with_versions(**versions))
    assert (problem.remedy, problem.stops_training) == (remedy, stops)
    assert next(iter(versions)).lower() in problem.sentence.lower()


@pytest.mark.parametrize("version", ["2.11.0", "2.12.0a0+git1234", "3.0.0"])
def test_new_enough_versions_of_pytorch(version):
    assert find_problems(with_versions(torch=version), RUNS, IMPORTS) == []


def test_a_package_that_colossalai_asks_for():
    asks = Colossal(error="ModuleNotFoundError: No module named 'einops'", missing="einops", patches=[])
    problem = only_problem(colossal=asks)
    assert problem.remedy == "pip install einops"
    assert problem.stops_training


def test_fp8_that_fails_where_training_happens_stops_it_and_elsewhere_does_not():
    fails = [replace(check, error=None, reason="too old") for check in RUNS]
    on_cpu, on_gpu = fails[:2] + RUNS[2:], RUNS[:2] + fails[2:]
    assert not only_problem(checks=on_cpu).stops_training
    problem = only_problem(checks=on_gpu)
    assert problem.stops_training
    assert "cuda:0: too old" in problem.sentence
    without_gpu = replace(HEALTHY, gpus=[], driver=None)
    assert only_problem(without_gpu, fails[:2]).stops_training


def test_a_driver_without_a_pytorch_for_it():
    problem = only_problem(replace(HEALTHY, gpus=[], cuda=None), RUNS[:2])
    assert "CPU alone" in problem.sentence
    assert "pip install torch==2.13.0" in problem.remedy


def test_a_driver_whose_gpus_are_hidden():
    assert "CUDA_VISIBLE_DEVICES" in only_problem(replace(HEALTHY, gpus=[]), RUNS[:2]).sentence


def test_missing_backends():
    assert only_problem(replace(HEALTHY, backends=["gloo"])).stops_training
    assert only_problem(replace(HEALTHY, gpus=[], driver=None, backends=["nccl"]), RUNS[:2]).stops_training


def test_what_stops_training_comes_first():
    worst = find_problems(with_versions(triton=None, colossalai=None), RUNS, IMPORTS)
    assert [problem.stops_training for problem in worst] == [True, False]
