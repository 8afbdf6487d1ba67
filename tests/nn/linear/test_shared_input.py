from __future__ import annotations

import copy
import gc
import pickle
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from types import FrameType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8booster import FP8Config, convert_to_fp8, forget_weights, formats, fp8_linear
from fp8booster.config import Formats
from fp8booster.nn.linear import shared_input
from fp8booster.nn.linear.shared_input import begin_forward, end_forward, share_input
from fp8booster.nn.modules import has_hooks, is_looked_at
from fp8booster.nn.weights.casting import Casts
from tests.nn.models import tiny_llama

CONFIG = FP8Config()


def input_casts(casts: list, x: torch.Tensor) -> int:
    return sum(matrix.data_ptr() == x.data_ptr() for matrix, _ in casts)


class Projections(nn.Module):
    """Layers of one input; `between` is called after each."""

    def __init__(self, between: Callable[[torch.Tensor], object] = lambda x: None) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(48, size, bias=False) for size in (48, 16, 16))
        self.between = between

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = []
        for layer in (self.q, self.k, self.v):
            outputs.append(layer(x))
            self.between(x)
        return tuple(outputs)


def outermost() -> FrameType:
    """The frame that everything runs in."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    return frame


@pytest.fixture
def projections(device) -> Projections:
    return convert_to_fp8(Projections(), FP8Config(always=True)).to(device)


@pytest.fixture(autouse=True)
def forward() -> Iterator[None]:
    """A forward in which tests of `share_input` itself share."""
    module = nn.Module()
    begin_forward(module)
    shared_input.opened.forwards[-1].caller = outermost()
    yield
    end_forward(module)
    assert not shared_input.opened.forwards


def rights(module: Projections, x: torch.Tensor) -> list[torch.Tensor]:
    return [fp8_linear(x, layer.weight) for layer in (module.q, module.k, module.v)]


def assert_right(found: Sequence[torch.Tensor], module: Projections, x: torch.Tensor) -> None:
    assert all(map(torch.equal, found, rights(module, x)))


@pytest.mark.parametrize("training", [True, False])
def test_query_key_and_value_share_one_cast(training, projections, device, casts) -> None:
    x = torch.randn(2, 8, 48, device=device, requires_grad=True)
    outputs = projections.train(training)(x)
    assert input_casts(casts, x) == 1
    assert_right(outputs, projections, x)


def test_an_input_changed_in_place_is_cast_anew(device, casts) -> None:
    projections = convert_to_fp8(Projections(lambda x: x.mul_(3)), FP8Config(always=True)).to(device)
    x = torch.randn(16, 48, device=device)
    outputs = projections(x)
    assert input_casts(casts, x) == 3
    assert torch.equal(outputs[2], fp8_linear(x / 3, projections.v.weight))


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "its data": lambda x: x.data.copy_(3 * x.data.flip(0)),
    "other data": lambda x: setattr(x, "data", 3 * x.data.flip(0)),
    "a NumPy view": lambda x: np.copyto(x.detach().numpy(), 3 * x.detach().flip(0).numpy()),
    "DLPack": lambda x: torch.from_dlpack(x.detach()).copy_(3 * x.detach().flip(0)),
}


def writable(how: str, device: torch.device) -> torch.Tensor:
    if how == "a NumPy view" and device.type != "cpu":
        pytest.skip("NumPy has views of the CPU's tensors alone")
    return torch.randn(16, 48, device=device)


@pytest.mark.parametrize("how", WRITES)
def test_a_buffer_written_unseen_between_two_forwards_is_cast_anew(how, projections, device, casts) -> None:
    x = writable(how, device)
    for _ in range(2):
        assert_right(projections(x), projections, x)
        WRITES[how](x)


@pytest.mark.parametrize("how", WRITES)
def test_so_it_is_between_layers_that_are_called_by_hand(how, projections, device) -> None:
    x = writable(how, device)
    end_forward(shared_input.opened.forwards[-1].module)
    for layer in (projections.q, projections.k, projections.v, projections.q):
        assert torch.equal(layer(x), fp8_linear(x, layer.weight))
        WRITES[how](x)
    forget_weights(projections)
    assert torch.equal(projections.k(x), fp8_linear(x, projections.k.weight))
    begin_forward(nn.Module())


def test_a_layer_that_reads_a_tensor_again_in_one_forward_casts_it_again(device) -> None:
    def write(x: torch.Tensor) -> None:
        x.data.mul_(-2)
        again.append((projections.q(x), fp8_linear(x, projections.q.weight)))

    again: list[tuple[torch.Tensor, torch.Tensor]] = []
    projections = convert_to_fp8(Projections(), FP8Config(always=True)).to(device)
    projections.between = write
    projections(torch.randn(16, 48, device=device))
    assert len(again) == 3
    assert all(torch.equal(found, right) for found, right in again)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_forward_and_its_recomputation_read_the_tensor_as_it_is(
    reentrant, projections, device, casts
) -> None:
    x = torch.randn(16, 48, device=device)
    for scale in (1, -3, 2):
        x.data.mul_(scale)
        given = x.clone().requires_grad_() if reentrant else x
        outputs = checkpoint(projections, given, use_reentrant=reentrant)
        assert_right(outputs, projections, x)
        projections.zero_grad()
        casts.clear()
        sum(output.sum() for output in outputs).backward()
        assert input_casts(casts, given.detach() if reentrant else x) <= 1  # of the recomputation
        for layer in (projections.q, projections.k, projections.v):
            weight = layer.weight.detach().clone().requires_grad_()
            fp8_linear(x, weight).sum().backward()
            assert torch.equal(layer.weight.grad, weight.grad)


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_a_forward_that_raises_ends_the_sharing(error: type[BaseException], device) -> None:
    def stop(_: torch.Tensor) -> None:
        raise error

    projections = convert_to_fp8(Projections(stop), FP8Config(always=True)).to(device)
    x = torch.randn(16, 48, device=device)
    shared_input.opened.forwards.clear()  # no forward is around
    with pytest.raises(error):
        projections(x)
    x.data.copy_(3 * x.flip(0))
    assert torch.equal(projections.k(x), fp8_linear(x, projections.k.weight))
    assert not shared_input.opened.forwards


@pytest.mark.parametrize("error", [None, KeyError])
def test_nothing_of_a_forward_is_kept_when_it_has_ended(error: type[Exception] | None, device) -> None:
    """Until the garbage collector comes by it would be memory of a GPU."""

    def look(x: torch.Tensor) -> None:
        kept.extend(map(weakref.ref, (x, shared_input.opened.forwards[-1])))
        if error is not None:
            raise error

    kept: list[weakref.ref] = []
    projections = convert_to_fp8(Projections(look), FP8Config(always=True)).to(device)
    gc.disable()
    try:
        with suppress(KeyError):
            projections(torch.randn(16, 48, device=device))
        assert kept
        assert all(each() is None for each in kept)
    finally:
        gc.enable()


def test_a_forward_inside_another_has_its_own_casts_and_leaves_the_outer_ones(device, casts) -> None:
    inner = convert_to_fp8(Projections(), FP8Config(always=True)).to(device)
    outer = convert_to_fp8(Projections(), FP8Config(always=True)).to(device)
    outer.between = inner
    x = torch.randn(16, 48, device=device)
    assert_right(outer(x), outer, x)
    assert input_casts(casts, x) == 1 + 3 + 3  # of the outer one, of the three inner ones, of `assert_right`


def test_hooks_are_put_once_and_count_as_none(projections) -> None:
    convert_to_fp8(projections, FP8Config(always=True))
    assert list(projections._forward_pre_hooks.values()) == [begin_forward]
    assert list(projections._forward_hooks.values()) == [end_forward]
    assert not has_hooks(projections)
    assert not is_looked_at(projections)
    projections.register_forward_hook(print)
    assert has_hooks(projections)
    assert is_looked_at(projections)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_of_a_module_share_too(copied, casts) -> None:
    module = copied(convert_to_fp8(Projections(nn.Identity()), FP8Config(always=True)))
    x = torch.randn(16, 48)
    module(x)
    assert input_casts(casts, x) == 1


def test_the_fast_path_of_torch_s_encoder_layers_stays() -> None:
    model = convert_to_fp8(nn.TransformerEncoder(nn.TransformerEncoderLayer(48, 2, 96), 2), FP8Config(always=True))
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_decoder_layers_bound_what_attention_and_feed_forward_read() -> None:
    model = convert_to_fp8(tiny_llama(), FP8Config(always=True))
    bounds = {name for name, module in model.named_modules() if begin_forward in module._forward_pre_hooks.values()}
    assert bounds == {"model.layers.0", "model.layers.1"}


def test_a_view_of_the_same_memory_is_another_input(projections, device) -> None:
    x = torch.randn(16, 48, device=device)
    projections.q(x)
    y = projections.k(x[:8])
    assert torch.equal(y, fp8_linear(x[:8], projections.k.weight))


@pytest.mark.parametrize(
    ("other", "count"),
    [
        (FP8Config(scaling="amax"), 2),
        (FP8Config(formats=Formats(input=formats.E5M2, gradient=formats.E4M3)), 2),
        (FP8Config(emulate=True), 1),  # computes otherwise, from the same cast
    ],
)
def test_what_the_cast_depends_on_decides(other, count, device, casts) -> None:
    x = torch.randn(16, 48, device=device)
    share_input(x, Casts(CONFIG), reader=object(), transposed=True)
    shared = share_input(x, Casts(other), reader=object(), transposed=True)
    assert len(casts) == count
    assert shared.data.dtype is other.input_format


def test_a_transpose_that_is_missing_is_made(device, casts) -> None:
    x = torch.randn(16, 48, device=device)
    assert not share_input(x, Casts(CONFIG), reader=object(), transposed=False).transpose.numel()
    assert share_input(x, Casts(CONFIG), reader=object(), transposed=True).transpose.numel()
    share_input(x, Casts(CONFIG), reader=object(), transposed=False)  # what is more serves too
    assert len(casts) == 2


def test_the_death_of_the_input_frees_its_copy(device) -> None:
    x = torch.randn(16, 48, device=device)
    copy = weakref.ref(share_input(x, Casts(CONFIG), reader=object(), transposed=True).data)
    assert copy() is not None
    del x
    assert copy() is None


def test_the_death_of_the_input_in_another_thread_frees_its_copy(device) -> None:
    holder = [torch.randn(16, 48, device=device)]
    copy = weakref.ref(share_input(holder[0], Casts(CONFIG), reader=object(), transposed=True).data)
    backward = threading.Thread(target=holder.clear)
    backward.start()
    backward.join()
    assert copy() is None


def test_the_death_of_the_last_input_at_any_moment_leaves_the_new_copy(device, monkeypatch) -> None:
    last = [torch.randn(16, 48, device=device)]
    share_input(last[0], Casts(CONFIG), reader=object(), transposed=True)

    def ref(*of: object) -> weakref.ref:
        last.clear()
        return weakref.ref(*of)

    monkeypatch.setattr(shared_input, "weakref", SimpleNamespace(ref=ref))
    x = torch.randn(16, 48, device=device)
    made = share_input(x, Casts(CONFIG), reader=object(), transposed=True)
    assert made is not None
    assert not last
    assert share_input(x, Casts(CONFIG), reader=object(), transposed=True) is made


def test_at_most_one_copy_is_held(device) -> None:
    inputs = [torch.randn(16, 48, device=device) for _ in range(3)]
    copies = [weakref.ref(share_input(x, Casts(CONFIG), reader=object(), transposed=True).data) for x in inputs]
    gc.collect()
    assert [copy() is not None for copy in copies] == [False, False, True]
    del inputs[0]  # its death is no business of the newest
    assert copies[2]() is not None


def test_threads_do_not_share(device, casts) -> None:
    x = torch.randn(16, 48, device=device)
    share_input(x, Casts(CONFIG), reader=object(), transposed=True)
    other = threading.Thread(
        target=share_input, args=(x, Casts(CONFIG)), kwargs={"reader": object(), "transposed": True}
    )
    other.start()
    other.join()
    assert len(casts) == 2


def test_an_input_that_lies_where_a_dead_one_lay_is_cast_anew(device) -> None:
    for _ in range(4):
        x = torch.randn(16, 48, device=device)
        expected = x.abs().max() / 448
        torch.testing.assert_close(
            share_input(x, Casts(CONFIG), reader=object(), transposed=False).inverse_scale, expected
        )
        del x
