"""Sums of gradients by their kind: what is kept, what is read, and whose it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from colossalai.zero.low_level.bookkeeping import GradientStore

from fp8booster.colossal.zero.gradient_store import AccumulatedGradients
from fp8booster.config import GRADIENT_ACCUMULATIONS
from fp8booster.kernels.group_codes import GROUP, GroupCodes

GROUP_ID, PARAMETER = 1, 77


def store_of(kind: str, widens: bool = True) -> AccumulatedGradients:
    store = object.__new__(GradientStore)
    store._grads_of_params, store.grad_to_param_mapping, store._working_index = {}, {}, 3
    AccumulatedGradients.convert_in_place(store, kind, widens=widens)
    return store


def of(value: float, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.full((GROUP,), value, dtype=dtype)


def add(store: AccumulatedGradients, gradient: torch.Tensor) -> torch.Tensor | GroupCodes:
    """Add a gradient of the parameter; its sum."""
    (total,) = store.add([gradient], [(GROUP_ID, PARAMETER)])
    return total


READERS: dict[str, Callable[[AccumulatedGradients], torch.Tensor | None]] = {
    "gradients": lambda store: store.gradients(GROUP_ID)[PARAMETER][0],
    "partitioned": lambda store: store.get_partitioned_gradients_by_param_id(GROUP_ID, PARAMETER)[0],
    "of a group": lambda store: store.get_working_grads_by_group_id(GROUP_ID)[0],
    "of a parameter": lambda store: store.get_working_grad_by_param_id(PARAMETER),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", GRADIENT_ACCUMULATIONS)
def test_whoever_reads_has_the_sum_as_a_tensor_and_may_change_it(kind: str, reader: str) -> None:
    store = store_of(kind)
    for value in (1.0, 2.0):
        add(store, of(value))
    found = READERS[reader](store)
    assert isinstance(found, torch.Tensor)
    assert found.dtype is (torch.float32 if kind == "32-bit" else torch.bfloat16)
    torch.testing.assert_close(found.float(), of(3.0).float(), rtol=0.02, atol=0)
    found.mul_(4)
    for other in READERS.values():
        assert other(store) is found
    add(store, of(2.0))
    torch.testing.assert_close(READERS[reader](store).float(), of(14.0).float(), rtol=0.02, atol=0)


@pytest.mark.parametrize("kind", GRADIENT_ACCUMULATIONS)
def test_each_sum_knows_its_parameter_and_no_former_one_stays(kind: str) -> None:
    store = store_of(kind)
    for _ in range(3):
        total = add(store, of(1.0))
        assert store.grad_to_param_mapping == {id(total): PARAMETER}
        assert store._grads_of_params == {GROUP_ID: {PARAMETER: [total]}}
        assert isinstance(total, GroupCodes) is (kind == "8-bit")
    (found,) = store.gradients(GROUP_ID)[PARAMETER]
    assert store.grad_to_param_mapping == {id(found): PARAMETER}


def test_sums_of_16_bits_have_the_bits_of_bf16_and_of_32_of_fp32() -> None:
    expected = {("32-bit", True): (torch.float32, 257.0), ("32-bit", False): (torch.bfloat16, 256.0)}
    expected[("16-bit", True)] = torch.bfloat16, 256.0
    for (kind, widens), (dtype, value) in expected.items():
        store = store_of(kind, widens)
        first = of(256.0)
        add(store, first)
        total = add(store, of(1.0))
        assert total.dtype is dtype
        assert total.unique().tolist() == [value]
        assert (total is first) is (dtype is torch.bfloat16)  # changed in place
    narrow = add(store_of("32-bit"), of(1.0))
    assert narrow.dtype is torch.bfloat16  # one alone stays as it is
    assert add(store_of("16-bit"), of(1.0, torch.float32)).dtype is torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_are_read_in_the_dtype_of_one_micro_batch(dtype: torch.dtype) -> None:
    store = store_of("8-bit")
    add(store, of(2.0, dtype))
    assert store.gradients(GROUP_ID)[PARAMETER][0].dtype is dtype


def test_where_there_is_no_gradient_none_is_told() -> None:
    store = store_of("8-bit")
    assert store._working_index == 0
    assert store.gradients(GROUP_ID) == {}
    assert not store.holds(GROUP_ID, PARAMETER)
    assert store.get_working_grads_by_group_id(GROUP_ID) == []
    add(store, of(1.0))
    assert store.holds(GROUP_ID, PARAMETER) is True
    assert not store.holds(GROUP_ID, PARAMETER + 1)
    assert not store.holds(GROUP_ID + 1, PARAMETER)
    store._grads_of_params[GROUP_ID][PARAMETER].clear()
    assert not store.holds(GROUP_ID, PARAMETER)


@pytest.mark.parametrize("kind", GRADIENT_ACCUMULATIONS)
def test_a_second_gradient_of_a_parameter_is_noted_for_good(kind: str) -> None:
    store = store_of(kind)
    store.add([torch.ones(256, dtype=torch.bfloat16)], [(0, 1)])
    store.add([torch.ones(256, dtype=torch.bfloat16)], [(0, 2)])
    assert not store.adds_up
    store.add([torch.ones(256, dtype=torch.bfloat16)], [(0, 1)])
    store.reset_all_gradients()
    store.add([torch.ones(256, dtype=torch.bfloat16)], [(0, 1)])
    assert store.adds_up
