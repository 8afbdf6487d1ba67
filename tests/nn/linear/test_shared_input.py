from __future__ import annotations

import gc
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch

from fp8booster import FP8Config, FP8Linear, formats, fp8_linear
from fp8booster.nn.linear import shared_input
from fp8booster.nn.linear.shared_input import share_input

CONFIG = FP8Config()


def input_casts(casts: list, x: torch.Tensor) -> int:
    return sum(matrix.data_ptr() == x.data_ptr() for matrix, _ in casts)


@pytest.fixture
def projections(device) -> list[FP8Linear]:
    return [FP8Linear(48, size, bias=False, device=device) for size in (48, 16, 16)]


def test_query_key_and_value_share_one_cast(projections, device, casts) -> None:
    x = torch.randn(2, 8, 48, device=device, requires_grad=True)
    outputs = [layer(x) for layer in projections]
    assert input_casts(casts, x) == 1
    for layer, output in zip(projections, outputs, strict=True):
        assert torch.equal(output, fp8_linear(x, layer.weight))


def test_an_input_changed_in_place_is_cast_anew(projections, device, casts) -> None:
    x = torch.randn(16, 48, device=device)
    projections[0](x)
    x.mul_(3)
    y = projections[1](x)
    assert input_casts(casts, x) == 2
    assert torch.equal(y, fp8_linear(x, projections[1].weight))


def test_a_view_of_the_same_memory_is_another_input(projections, device) -> None:
    x = torch.randn(16, 48, device=device)
    projections[0](x)
    y = projections[1](x[:8])
    assert torch.equal(y, fp8_linear(x[:8], projections[1].weight))


@pytest.mark.parametrize(
    ("other", "count"),
    [
        (FP8Config(power_of_two=True), 2),
        (FP8Config(input_format=formats.E5M2, gradient_format=formats.E4M3), 2),
        (FP8Config(emulate=True), 1),  # computes otherwise, from the same cast
    ],
)
def test_what_the_cast_depends_on_decides(other, count, device, casts) -> None:
    x = torch.randn(16, 48, device=device)
    share_input(x, CONFIG, transposed=True)
    shared = share_input(x, other, transposed=True)
    assert len(casts) == count
    assert shared.data.dtype is other.input_format


def test_a_transpose_that_is_missing_is_made(device, casts) -> None:
    x = torch.randn(16, 48, device=device)
    assert not share_input(x, CONFIG, transposed=False).transpose.numel()
    assert share_input(x, CONFIG, transposed=True).transpose.numel()
    share_input(x, CONFIG, transposed=False)  # what is more serves too
    assert len(casts) == 2


def test_the_death_of_the_input_frees_its_copy(device) -> None:
    x = torch.randn(16, 48, device=device)
    copy = weakref.ref(share_input(x, CONFIG, transposed=True).data)
    assert copy() is not None
    del x
    assert copy() is None


def test_the_death_of_the_input_in_another_thread_frees_its_copy(device) -> None:
    holder = [torch.randn(16, 48, device=device)]
    copy = weakref.ref(share_input(holder[0], CONFIG, transposed=True).data)
    backward = threading.Thread(target=holder.clear)
    backward.start()
    backward.join()
    assert copy() is None


def test_the_death_of_the_last_input_at_any_moment_leaves_the_new_copy(device, monkeypatch) -> None:
    last = [torch.randn(16, 48, device=device)]
    share_input(last[0], CONFIG, transposed=True)

    def ref(*of: object) -> weakref.ref:
        last.clear()
        return weakref.ref(*of)

    monkeypatch.setattr(shared_input, "weakref", SimpleNamespace(ref=ref))
    x = torch.randn(16, 48, device=device)
    made = share_input(x, CONFIG, transposed=True)
    assert made is not None
    assert not last
    assert share_input(x, CONFIG, transposed=True) is made


def test_at_most_one_copy_is_held(device) -> None:
    inputs = [torch.randn(16, 48, device=device) for _ in range(3)]
    copies = [weakref.ref(share_input(x, CONFIG, transposed=True).data) for x in inputs]
    gc.collect()
    assert [copy() is not None for copy in copies] == [False, False, True]
    del inputs[0]  # its death is no business of the newest
    assert copies[2]() is not None


def test_threads_do_not_share(device, casts) -> None:
    x = torch.randn(16, 48, device=device)
    share_input(x, CONFIG, transposed=True)
    other = threading.Thread(target=share_input, args=(x, CONFIG), kwargs={"transposed": True})
    other.start()
    other.join()
    assert len(casts) == 2


def test_an_input_that_lies_where_a_dead_one_lay_is_cast_anew(device) -> None:
    for _ in range(4):
        x = torch.randn(16, 48, device=device)
        expected = x.abs().max() / 448
        torch.testing.assert_close(share_input(x, CONFIG, transposed=False).inverse_scale, expected)
        del x
