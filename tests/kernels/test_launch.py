"""How `launch` finds what it compiled before; Triton's side is played here, for no GPU runs it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton

from fp8booster.kernels import launch as launching
from fp8booster.kernels.launch import launch


class Compiled:
    """Stands for what Triton compiled: keeps how it was called."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.runs: list[tuple] = []
        self.with_hooks: list[tuple] = []

    def run(self, *arguments: Any) -> None:
        self.runs.append(arguments)

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *arguments, stream: self.with_hooks.append((grid, arguments, stream))


class Kernel:
    """Stands for a kernel: keeps what it was told to compile."""

    def __init__(self) -> None:
        self.fn = object()
        self.compiled: list[tuple] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def compile_and_run(*arguments: Any, **options: Any) -> Compiled:
            self.compiled.append((grid, arguments, options))
            return Compiled()

        return compile_and_run


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_launches", {})
    monkeypatch.setattr(launching, "_variants", {})
    monkeypatch.setattr(launching, "_CALLS_COMPILED", True)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 77, raising=False)


def compiled() -> list[Compiled]:
    """All that is remembered."""
    return [made for variants in launching._variants.values() for made, *_ in variants.values()]


def test_the_second_launch_passes_raw_pointers_to_what_the_first_compiled() -> None:
    kernel, x, y = Kernel(), torch.empty(64), torch.empty(64, dtype=torch.uint8)
    for _ in range(3):
        launch(kernel, (5, 2), (x, y), (7, 0.5), num_warps=8, enable_fp_fusion=False, BLOCK=32, EVEN=True)
    ((grid, arguments, options),) = kernel.compiled
    assert grid == (5, 2, 1)
    assert arguments[0] is x
    assert arguments[1:] == (y, 7, 0.5)
    assert options == {"num_warps": 8, "enable_fp_fusion": False, "BLOCK": 32, "EVEN": True}
    (made,) = compiled()
    pointers = (x.data_ptr(), y.data_ptr())
    whole = (5, 2, 1, 77, "function", "metadata", None, None, None, *pointers, 7, 0.5, 32, True)
    assert made.runs == [whole, whole]
    assert made.with_hooks == []


def test_what_triton_compiles_apart_is_kept_apart() -> None:
    memory = torch.empty(64, dtype=torch.uint8)
    kernels = [Kernel(), Kernel()]
    calls = [
        (kernels[0], memory, (16,), {"BLOCK": 1}),
        (kernels[1], memory, (16,), {"BLOCK": 1}),
        (kernels[0], memory[1:], (16,), {"BLOCK": 1}),
        (kernels[0], memory.view(torch.int8), (16,), {"BLOCK": 1}),
        (kernels[0], memory, (1,), {"BLOCK": 1}),
        (kernels[0], memory, (2,), {"BLOCK": 1}),
        (kernels[0], memory, (2**32,), {"BLOCK": 1}),
        (kernels[0], memory, (16,), {"BLOCK": 2}),
        (kernels[0], memory, (16,), {"BLOCK": 1, "num_warps": 2}),
        (kernels[0], memory, (16,), {"BLOCK": 1, "enable_fp_fusion": False}),
    ]
    for _ in range(2):
        for kernel, tensor, numbers, options in calls:
            launch(kernel, 3, (tensor,), numbers, **options)
    assert sum(len(kernel.compiled) for kernel in kernels) == len(calls) == len(compiled())
    assert all(len(made.runs) == 1 for made in compiled())


def test_a_profiler_hears_of_every_launch() -> None:
    kernel, x = Kernel(), torch.empty(64)
    hook = lambda metadata: None  # noqa: E731
    launch(kernel, 3, (x,), (7,), BLOCK=32)
    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        launch(kernel, 3, (x,), (7,), BLOCK=32)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    (made,) = compiled()
    assert made.with_hooks == [((3, 1, 1), (x.data_ptr(), 7, 32), 77)]
    assert made.runs == []


def test_sizes_that_never_repeat_take_what_was_compiled_and_do_not_fill_the_memory(monkeypatch) -> None:
    monkeypatch.setattr(launching, "MOST_LAUNCHES", 10)
    kernel, x = Kernel(), torch.empty(64)
    for size in range(25):
        launch(kernel, size + 1, (x,), (size,), BLOCK=32)
        assert 0 < len(launching._launches) <= 10
    assert [arguments[1] for _, arguments, _ in kernel.compiled] == [0, 1, 2]
    multiples, ones, others = compiled()
    assert ones.runs == []
    assert [(run[0], run[-2]) for run in multiples.runs] == [(17, 16)]
    assert [(run[0], run[-2]) for run in others.runs] == [(n + 1, n) for n in range(3, 25) if n != 16]


@pytest.mark.parametrize(("version", "past_triton"), [("3.6.0", True), ("3.7.1+git0d1", True), ("3.8.0", False)])
def test_kernels_are_called_past_triton_where_its_version_was_tested(version: str, past_triton: bool) -> None:
    assert launching.calls_compiled(version) is past_triton


def test_other_versions_of_triton_make_every_launch(monkeypatch) -> None:
    monkeypatch.setattr(launching, "_CALLS_COMPILED", False)
    kernel, x = Kernel(), torch.empty(64)
    for _ in range(2):
        launch(kernel, (5, 2), (x,), (7,), num_warps=8, BLOCK=32)
    options = {"num_warps": 8, "enable_fp_fusion": True, "BLOCK": 32}
    assert kernel.compiled == [((5, 2, 1), (x, 7), options)] * 2
    assert compiled() == []


@pytest.mark.gpu
def test_both_ways_of_a_launch_write_the_same(monkeypatch) -> None:
    from fp8booster.kernels.cross_entropy_triton import multiply_triton

    monkeypatch.undo()  # the GPU's own streams
    monkeypatch.setattr(launching, "_variants", {})
    factor, results = torch.tensor(1.7, device="cuda"), []
    for past_triton in (True, False):
        monkeypatch.setattr(launching, "_CALLS_COMPILED", past_triton)
        torch.manual_seed(0)
        values = torch.randn(100_003, device="cuda")
        for _ in range(3):
            multiply_triton(values, factor)
        results.append(values)
    assert torch.equal(*results)
