from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fp8booster.kernels import instructions
from fp8booster.kernels.instructions import BEFORE_AMX, VARIABLE
from fp8booster.kernels.product import product
from tests.distributed import TEST_SECONDS, run_ranks


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


def show_bf16_products() -> None:
    """Compare products of a process whose CPU has no BF16 with FP32 ones, in bits and in time."""
    import time

    def seconds(multiply) -> float:
        multiply()
        began = time.process_time()
        for _ in range(5):
            multiply()
        return time.process_time() - began

    torch.set_num_threads(1)
    a, b = torch.randn(2, 256, 256).bfloat16()
    bias, stack = torch.randn(256).bfloat16(), torch.randn(4, 256, 256).bfloat16()
    slow = seconds(lambda: a @ b)
    sentence = instructions.multiply_bf16_in_fp32()
    assert sentence == instructions.multiply_bf16_in_fp32()
    assert "no instructions for BF16" in sentence
    exact = a.float() @ b.float()
    assert torch.equal(a @ b, exact.bfloat16())
    assert torch.equal(torch.mm(a, b, out=torch.empty(0, dtype=torch.bfloat16)), exact.bfloat16())
    # one call adds the bias to its sums in an order of its own, which differs between processors
    added = torch.addmm(bias.float(), a.float(), b.float())
    assert torch.equal(torch.nn.functional.linear(a, b.t(), bias), added.bfloat16())
    assert torch.equal(stack @ b, (stack.float() @ b.float()).bfloat16())
    assert torch.equal(torch.bmm(stack, stack), torch.bmm(stack.float(), stack.float()).bfloat16())
    added = torch.baddbmm(stack, stack, stack, beta=0.5)
    assert torch.equal(added, torch.baddbmm(stack.float(), stack.float(), stack.float(), beta=0.5).bfloat16())
    assert torch.equal(a.float() @ b.float(), exact)
    assert ((a[:1] @ b).float() - exact[:1]).norm() < 0.01 * exact[:1].norm()
    assert torch.equal(torch.compile(torch.mm)(a, b), exact.bfloat16())
    fast = seconds(lambda: a @ b)
    assert fast < slow / 2, (fast, slow)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the variable holds back instructions of x86-64")
def test_bf16_products_without_instructions_are_fp32_products_rounded_once() -> None:
    # a process of its own, for oneDNN reads the variable once
    script = "from tests.kernels.test_instructions import show_bf16_products as show; show()"
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        env=os.environ | {VARIABLE: "AVX2"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=TEST_SECONDS,
    )
    assert result.returncode == 0, result.stderr


def test_who_has_amx_is_not_asked_by_onednn_before_its_variable_is_set(monkeypatch) -> None:
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(instructions, "_advertises_amx", lambda: True)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: pytest.fail("oneDNN is asked"))
    assert instructions.multiply_bf16_in_fp32.__wrapped__() is None
