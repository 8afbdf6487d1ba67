from __future__ import annotations

import signal
import subprocess

import pytest
import torch

from fp8booster import fp8_linear
from fp8booster.cli import instructions
from fp8booster.cli.instructions import BEFORE_AMX, VARIABLE
from fp8booster.kernels.product import product
from tests.distributed import run_ranks


@pytest.mark.parametrize(
    ("advertised", "exit_code", "held"),
    [(True, -signal.SIGILL, True), (True, 0, False), (True, 1, False), (False, -signal.SIGILL, False)],
)
def test_products_are_held_back_only_where_amx_traps(monkeypatch, advertised, exit_code, held) -> None:
    monkeypatch.setenv(VARIABLE, "")  # so that monkeypatch puts back what was there
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(instructions, "_advertises_amx", lambda: advertised)
    ended = subprocess.CompletedProcess([], exit_code)
    monkeypatch.setattr(instructions.subprocess, "run", lambda *args, **options: ended)
    sentence = instructions.avoid_trapping_instructions.__wrapped__()
    assert instructions.os.environ.get(VARIABLE) == (BEFORE_AMX if held else None)
    assert (sentence is not None) == held
    assert sentence is None or VARIABLE in sentence


def test_what_the_user_chose_stays(monkeypatch) -> None:
    monkeypatch.setenv(VARIABLE, "AVX2")
    assert instructions.avoid_trapping_instructions.__wrapped__() is None
    assert instructions.os.environ[VARIABLE] == "AVX2"


def multiply() -> None:
    one, ones = torch.ones(()), torch.ones(32, 32, dtype=torch.bfloat16)
    assert (ones @ ones)[0, 0] == 32
    right = ones.to(torch.float8_e4m3fn)
    for left in (right, ones.to(torch.float8_e5m2)):
        assert product(left, right, one, one, out_dtype=torch.bfloat16)[0, 0] == 32


def test_the_held_instructions_multiply_in_both_precisions() -> None:
    run_ranks(multiply, 1, initialize=False, environment={VARIABLE: BEFORE_AMX})


def test_held_products_are_those_of_pytorch_itself(monkeypatch) -> None:
    monkeypatch.setenv(VARIABLE, BEFORE_AMX)
    enabled = []
    multiply = torch._scaled_mm

    def watched(*operands, **options):
        enabled.append(torch.backends.mkldnn.enabled)
        return multiply(*operands, **options)

    monkeypatch.setattr(torch, "_scaled_mm", watched)
    former = torch.backends.mkldnn.enabled
    try:
        torch.backends.mkldnn.enabled = True
        fp8_linear(torch.ones(16, 16), torch.ones(16, 16))
        assert enabled == [False]
        assert torch.backends.mkldnn.enabled
    finally:
        torch.backends.mkldnn.enabled = former
