"""What every source of FP8 weights promises, for one weight, one that lies transposed, and several stacked."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fp8booster import FP8Config
from fp8booster.config import WeightCopies
from fp8booster.nn.weights import engine
from fp8booster.nn.weights.casting import Casts
from fp8booster.nn.weights.engine import EngineWeight
from fp8booster.nn.weights.freshness import look_again
from fp8booster.nn.weights.pinned import collected_uses, copies_are_held
from fp8booster.nn.weights.resharded import ReshardedWeight
from fp8booster.nn.weights.source import CachedWeight, WeightSource, transposed_in_backward
from fp8booster.tensor import QuantizedMatrix
from tests.nn.reference import count_calls

CONFIG = FP8Config()
CASES = {"one": (1, False), "transposed": (1, True), "stacked": (3, False)}


@pytest.fixture(params=CASES)
def case(request) -> tuple[list[nn.Parameter], bool]:
    """Weights, and whether they lie transposed."""
    count, is_transposed = CASES[request.param]
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(32, 48)) for _ in range(count)], is_transposed


def whole(weights: list[nn.Parameter], is_transposed: bool) -> QuantizedMatrix:
    matrix = torch.cat([weight.detach() for weight in weights])
    return Casts(CONFIG).quantize_weight(matrix.t() if is_transposed else matrix, transposed=True)


def provided(source: WeightSource, weights: list[nn.Parameter], is_transposed: bool) -> WeightSource:
    """The source, after an engine gave it its matrix."""
    if isinstance(source, EngineWeight):
        source.fill(weights, whole(weights, is_transposed))
    elif isinstance(source, ReshardedWeight):
        source.held = whole(weights, is_transposed)
    return source


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("by_engine", [False, True])
@pytest.mark.parametrize("kind", [CachedWeight, EngineWeight, ReshardedWeight])
def test_forward_and_backward_read_the_cast_of_the_stacked_weights(kind, by_engine, case) -> None:
    weights, is_transposed = case
    source, expected = kind(is_transposed), whole(*case)
    if by_engine:
        provided(source, *case)
    found = source.forward(weights, Casts(CONFIG), transpose=True)
    backward_weight = source.backward(weights, Casts(CONFIG))
    assert (backward_weight is not None) == source.is_transient
    transpose, scale = (found.transpose, found.scale_of_transpose()) if backward_weight is None else backward_weight()
    assert_same(found.data, expected.data)
    assert_same(transpose, expected.transpose)
    assert torch.equal(found.inverse_scale, expected.inverse_scale)
    assert torch.equal(scale, expected.scale_of_transpose())


@pytest.mark.parametrize("kind", [CachedWeight, EngineWeight])
def test_another_source_that_forgets_one_of_the_weights_makes_the_stack_stale(kind) -> None:
    weights = [nn.Parameter(torch.randn(32, 48)) for _ in range(3)]
    stack, alone = provided(kind(), weights, False), CachedWeight()
    before = stack.forward(weights, Casts(CONFIG), transpose=True)
    assert stack.forward(weights, Casts(CONFIG), transpose=True) is before
    weights[1].data.mul_(2)
    assert stack.forward(weights, Casts(CONFIG), transpose=True) is before  # nobody saw it
    alone.invalidate([weights[1]])
    assert not stack.is_provided(weights)
    assert_same(stack.forward(weights, Casts(CONFIG), transpose=True).data, whole(weights, False).data)


def test_what_an_engine_made_serves_until_someone_else_changes_a_weight(case) -> None:
    weights, is_transposed = case
    source = EngineWeight(is_transposed)
    assert not source.is_provided(weights)
    provided(source, weights, is_transposed)
    assert source.is_provided(weights)
    assert source.forward(weights, Casts(CONFIG), transpose=True) is source.held
    with torch.no_grad():
        weights[-1].mul_(3)
    assert not source.is_provided(weights)
    assert_same(source.forward(weights, Casts(CONFIG), transpose=True).data, whole(*case).data)


def test_other_weights_in_the_place_of_a_stack_are_cast_anew() -> None:
    weights = [nn.Parameter(torch.randn(32, 48)) for _ in range(2)]
    source = CachedWeight()
    source.forward(weights, Casts(CONFIG), transpose=True)
    swapped = weights[::-1]
    assert_same(source.forward(swapped, Casts(CONFIG), transpose=True).data, whole(swapped, False).data)
    fewer = weights[:1]
    assert_same(source.forward(fewer, Casts(CONFIG), transpose=True).data, whole(fewer, False).data)


def elsewhere(weights: list[nn.Parameter]) -> list[nn.Parameter]:
    """The same objects, whose values lie elsewhere, under the same version."""
    versions = [weight._version for weight in weights]
    for weight in weights:
        weight.data = weight.detach().clone()
    assert versions == [weight._version for weight in weights]
    return weights


OTHER_WEIGHTS: dict[str, Callable[[list[nn.Parameter]], list[nn.Parameter]]] = {
    "in another order": lambda weights: weights[::-1],
    "fewer": lambda weights: weights[:1],
    "one twice": lambda weights: [weights[0], weights[0]],
    "elsewhere": elsewhere,
}


@pytest.mark.parametrize("which", OTHER_WEIGHTS)
def test_what_an_engine_made_serves_no_other_weights(which: str) -> None:
    weights = [nn.Parameter(torch.randn(32, 48)) for _ in range(2)]
    source = provided(EngineWeight(), weights, False)
    other = OTHER_WEIGHTS[which](weights)
    assert not source.is_provided(other)
    assert_same(source.forward(other, Casts(CONFIG), transpose=True).data, whole(other, False).data)


def test_what_an_engine_makes_takes_the_place_of_a_copy_and_is_left_to_it() -> None:
    weights = [nn.Parameter(torch.randn(32, 48))]
    source = EngineWeight()
    copied = source.forward(weights, Casts(CONFIG), transpose=True)
    assert source.held is copied
    made = whole(weights, False)
    source.fill(weights, made)
    assert source.held is made
    assert source.inverse_scale is made.inverse_scale
    assert CachedWeight.held.fget(source) is None  # the copy's memory is free
    source.end_evaluation()
    assert source.held is made
    source.forget()
    assert source.held is source.inverse_scale is None
    assert made.data.numel()


def test_values_that_an_engine_keeps_away_are_asked_back() -> None:
    asked: list[int] = []
    source = EngineWeight(restore=lambda: asked.append(1))
    assert source.lacks_values
    source.restore_values()
    assert asked == [1]
    assert not EngineWeight().lacks_values
    EngineWeight().restore_values()


def test_who_reads_what_another_stream_fills_waits_for_it_but_in_a_capture(monkeypatch) -> None:
    weights, ready, waited = [nn.Parameter(torch.randn(32, 48))], object(), []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(wait_event=waited.append))
    source, made = EngineWeight(), whole(weights, False)
    source.fill(weights, made, ready)
    pinned = source.pin(weights, Casts(CONFIG), transpose=True, record=None)
    waited.clear()
    assert source.forward(weights, Casts(CONFIG), transpose=True) is made
    assert pinned.refresh()
    assert waited == [ready] * 2
    with copies_are_held():
        assert source.forward(weights, Casts(CONFIG), transpose=True) is made
    assert waited == [ready] * 2
    source.fill(weights, made)
    source.forward(weights, Casts(CONFIG), transpose=True)
    assert waited == [ready] * 2


def test_a_filling_stays_pinned_while_the_engine_fills_the_same_memory() -> None:
    weights = [nn.Parameter(torch.randn(32, 48))]
    source, made = provided(EngineWeight(), weights, False), whole(weights, False)
    source.fill(weights, made)
    pinned = source.pin(weights, Casts(CONFIG), transpose=True, record=None)
    before = pinned.version()
    source.fill(weights, QuantizedMatrix(*(each if each is None else each.view_as(each) for each in made)))
    assert pinned.refresh()
    assert pinned.version() == before
    source.held.data.view(torch.uint8).add_(1)
    assert pinned.version() != before
    source.fill(weights, whole(weights, False))
    assert not pinned.refresh()
    source.fill(weights, made)
    assert pinned.refresh()
    with torch.no_grad():
        weights[0].mul_(2)
    assert not pinned.refresh()


class Counting(Casts):
    """Casts of a layer in training that count."""

    count = 0

    def __init__(self, config: FP8Config = CONFIG) -> None:
        super().__init__(config, config.scaling.new_state)

    def quantize(self, *args: object, **options: object) -> QuantizedMatrix:
        self.count += 1
        return super().quantize(*args, **options)


def test_copies_serve_calls_that_ask_for_no_more_and_for_the_same() -> None:
    weights, casts, source = [nn.Parameter(torch.randn(32, 48))], Counting(), CachedWeight()

    def asked(transpose: bool = True, casts: Casts = casts) -> QuantizedMatrix:
        return source.forward(weights, casts, transpose=transpose)

    assert not asked(transpose=False).transpose.numel()
    both = asked()
    assert both.transpose.numel()
    assert casts.count == 2
    assert asked() is asked(transpose=False) is both
    assert casts.count == 2
    powers = asked(casts=Casts.of_layer(FP8Config(scaling="amax")))
    assert not torch.equal(powers.inverse_scale, both.inverse_scale)
    asked()
    assert casts.count == 3
    evaluated = asked(casts=casts.evaluation)  # whose scales may be others
    assert asked() is not evaluated
    assert casts.count == 4
    assert asked(casts=casts.evaluation) is not evaluated


class Record:
    """Does a cast again, into the same memory."""

    def __call__(self, work: Callable[[], QuantizedMatrix]) -> tuple[Callable[[], None], QuantizedMatrix]:
        made = work()

        def again() -> None:
            for place, values in zip(made[:3], work()[:3], strict=True):
                place.copy_(values)

        return again, made

    def place_like(self, tensor: torch.Tensor, number: int) -> torch.Tensor:
        return torch.zeros_like(tensor)


def test_a_pinned_copy_is_cast_again_into_its_memory_when_its_weight_has_changed() -> None:
    weights, casts, source = [nn.Parameter(torch.randn(32, 48)) for _ in range(2)], Counting(), CachedWeight()
    pinned = source.pin(weights, casts, transpose=True, record=Record())
    assert pinned.refresh()
    held, casts.count, version = source.held, 0, pinned.version()
    assert source.forward(weights, casts, transpose=True) is held
    assert pinned.refresh()
    assert casts.count == 0
    with torch.no_grad():
        weights[1].mul_(2)
    assert pinned.version() != version
    assert pinned.refresh()
    assert casts.count == 1
    assert source.held is held
    assert_same(held.data, whole(weights, False).data)
    elsewhere(weights)
    assert not pinned.refresh()


def test_graphs_of_one_weight_read_one_copy_as_long_as_it_is_the_same() -> None:
    weights, source = [nn.Parameter(torch.randn(32, 48)) for _ in range(2)], CachedWeight()

    def pin(of: list[nn.Parameter] = weights, config: FP8Config = CONFIG, transpose: bool = True) -> object:
        return source.pin(of, Casts(config), transpose=transpose, record=Record())

    for other in (
        lambda: pin(transpose=False),
        lambda: pin(config=FP8Config(scaling="amax")),
        lambda: pin(weights[::-1]),
        lambda: pin(weights[:1]),
    ):
        first = pin()
        assert pin() is first
        assert other() is not first
    again = pin()
    elsewhere(weights)
    assert pin() is not again


CAST_ALONE: dict[str, Callable[[pytest.MonkeyPatch], object]] = {
    "compiled": lambda patch: patch.setattr(torch.compiler, "is_compiling", lambda: True),
    "captured": lambda patch: patch.setattr("fp8booster.nn.weights.source.captured_without_copies", lambda _: True),
}


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("how", [*CAST_ALONE, "a weight of inference mode"])
def test_a_call_that_can_keep_none_has_a_cast_of_its_own(how: str, trained: bool, monkeypatch) -> None:
    if how in CAST_ALONE:
        CAST_ALONE[how](monkeypatch)
    with torch.inference_mode(how not in CAST_ALONE):
        weight = torch.randn(32, 48)
    source, x = CachedWeight(), torch.randn(16, 48, requires_grad=trained)
    found = source.for_call(weight, Casts.of_layer(CONFIG), x)
    assert source.held is None
    assert bool(found.transpose.numel()) is trained  # for the backward of this call alone
    assert_same(found.data, whole([weight], False).data)
    with torch.no_grad():
        assert not source.for_call(weight, Casts.of_layer(CONFIG), x).transpose.numel()


@pytest.mark.parametrize("keeps", [True, False])
def test_a_kept_copy_has_the_transpose_that_its_mode_needs(keeps: bool) -> None:
    config, weight = FP8Config(weight_copies=WeightCopies(transposes=keeps)), nn.Parameter(torch.randn(32, 48))
    x, trained = torch.randn(16, 48), torch.randn(16, 48, requires_grad=True)
    for training, input, expected in (
        (True, x, keeps),  # as a checkpointed forward without gradients
        (True, trained, keeps),
        (False, x, False),
        (False, trained, True),
    ):
        source = CachedWeight()
        found = source.for_call(weight, Casts.of_layer(config) if training else Casts(config), input)
        assert source.held is found
        assert bool(found.transpose.numel()) is expected, (training, input.requires_grad)


@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise", "blockwise"])
def test_a_transpose_that_backward_makes_is_that_of_the_values_then(granularity: str) -> None:
    config = FP8Config(scaling=granularity, emulate=True)
    made = Casts(config).quantize_weight(torch.randn(128, 256), transposed=True)
    alone = QuantizedMatrix(made.data, made.data.new_empty(0), made.inverse_scale, None)
    backward_weight = transposed_in_backward(alone)
    transpose, scale = backward_weight()
    assert_same(transpose, made.data.t())
    if granularity == "blockwise":
        assert torch.equal(scale, made.scale_of_transpose())
    elif granularity == "rowwise":
        assert scale == 1  # each row's is the output's, which who multiplies applies
    else:
        assert torch.equal(scale, made.inverse_scale)
    made.data.view(torch.uint8).zero_()
    with pytest.raises(RuntimeError, match="a weight needed for gradient computation has been modified"):
        backward_weight()


@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise"])
def test_backward_casts_weights_as_they_are_when_it_asks(granularity: str) -> None:
    """Those that an engine has gathered again, in the same memory."""
    config = FP8Config(scaling=granularity, emulate=True)
    weights = [nn.Parameter(torch.randn(32, 48)) for _ in range(2)]
    source = ReshardedWeight()
    backward_weight = source.backward(weights, Casts(config))
    with torch.no_grad():
        weights[1].mul_(torch.linspace(1, 9, 48))
    transpose, scale = backward_weight()
    matrix = torch.cat([weight.detach() for weight in weights])
    expected = Casts(config).quantize_weight(matrix, transposed=True)
    assert_same(transpose, expected.transpose)
    assert torch.equal(scale, expected.scale_of_transpose())
    assert not source.forward(weights, Casts(config), transpose=True).transpose.numel()


def test_what_was_gathered_is_forgotten_when_the_weights_were_changed_unseen() -> None:
    weights = [nn.Parameter(torch.randn(32, 48))]
    source = provided(ReshardedWeight(), weights, False)
    source.invalidate(weights)
    assert source.held is None


def test_what_inference_mode_casts_may_be_read_by_a_backward() -> None:
    weight, x = nn.Parameter(torch.randn(32, 48)), torch.randn(16, 48)
    for training in (True, False):
        source = CachedWeight()
        with torch.inference_mode():
            found = source.for_call(weight, Casts.of_layer(CONFIG) if training else Casts(CONFIG), x)
        assert not found.data.is_inference()
        assert not found.inverse_scale.is_inference()


@pytest.mark.parametrize("by_engine", [False, True])
def test_uses_are_collected_as_they_were_asked_for_and_inside_alone(by_engine: bool) -> None:
    weights, casts = [nn.Parameter(torch.randn(32, 48))], Casts(CONFIG)
    powers = Casts.of_layer(FP8Config(scaling="amax"))
    source = provided(EngineWeight(), weights, False) if by_engine else CachedWeight()
    with collected_uses() as uses:
        source.forward(weights, casts, transpose=False)
        source.forward(weights, powers, transpose=True)
    source.forward(weights, casts, transpose=False)
    assert [(use.source, use.transpose, use.casts) for use in uses] == [(source, False, casts), (source, True, powers)]
    assert all(use.weights[0] is weights[0] for use in uses)


def test_who_collects_uses_gets_those_that_others_collect_inside() -> None:
    weights, casts, source = [nn.Parameter(torch.randn(32, 48))], Casts(CONFIG), CachedWeight()
    with collected_uses() as uses:
        source.forward(weights, casts, transpose=False)
        with collected_uses() as inside:
            source.forward(weights, casts, transpose=True)
        source.forward(weights, casts, transpose=False)
    assert [use.transpose for use in uses] == [False, True, False]
    assert [use.transpose for use in inside] == [True]


def test_scales_that_do_not_come_from_what_is_cast_are_noted() -> None:
    delayed = Casts.of_layer(FP8Config(scaling="delayed", emulate=True))
    assert CachedWeight().notes_of_scaling(Casts.of_layer(CONFIG)) == []
    assert CachedWeight().notes_of_scaling(delayed) == ["delayed scales"]
    assert EngineWeight().notes_of_scaling(delayed) == [
        "delayed scales, real-time ones of a weight that an engine casts"
    ]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda source: pickle.loads(pickle.dumps(source))])
@pytest.mark.parametrize("kind", [CachedWeight, EngineWeight, ReshardedWeight])
def test_a_copy_holds_nothing_and_computes_the_same(kind, copied, case) -> None:
    weights, is_transposed = case
    source = provided(kind(is_transposed), *case)
    expected = source.forward(weights, Casts(CONFIG), transpose=True)
    other = copied(source)
    assert type(other) is (CachedWeight if kind is EngineWeight else kind)
    assert other.held is None
    assert_same(other.forward(weights, Casts(CONFIG), transpose=True).data, expected.data)


def test_forgetting_frees_what_is_held(case) -> None:
    weights, is_transposed = case
    for kind in (CachedWeight, EngineWeight, ReshardedWeight):
        source = provided(kind(is_transposed), *case)
        source.forward(weights, Casts(CONFIG), transpose=True)
        assert source.held is not None
        source.forget()
        assert source.held is None


@pytest.fixture
def decoded() -> tuple[EngineWeight, list[nn.Parameter], QuantizedMatrix]:
    """An engine's weights, whose 16-bit values are those of its FP8 bytes."""
    weights = [nn.Parameter(torch.randn(size, 48).bfloat16()) for size in (32, 16)]
    quantized = whole(weights, False)
    values = quantized.dequantize(48, 48).bfloat16()
    source = EngineWeight()
    for weight, part in zip(weights, values.split([32, 16]), strict=True):
        weight.data.copy_(part)
    source.fill(weights, quantized)
    return source, weights, quantized


def test_weights_written_unseen_are_compared_when_they_are_looked_at_again(decoded) -> None:
    source, weights, quantized = decoded
    kept = weights[1].data.clone()
    weights[1].data[3, 5] += 1
    assert source.forward(weights, Casts(CONFIG), transpose=True) is quantized  # nobody saw it
    look_again(weights[1])
    assert not source.is_provided(weights)
    found = source.forward(weights, Casts(CONFIG), transpose=True)
    assert_same(found.data, whole(weights, False).data)
    assert source.held is found
    weights[1].data.copy_(kept)
    look_again(weights[0])
    assert source.forward(weights, Casts(CONFIG), transpose=True) is quantized
    with torch.no_grad():
        weights[0].mul_(2)
        assert source.forward(weights, Casts(CONFIG), transpose=True) is not quantized
        weights[0].div_(2)
    assert source.forward(weights, Casts(CONFIG), transpose=True) is quantized


def test_they_are_compared_once(decoded, monkeypatch) -> None:
    source, weights, quantized = decoded
    compared = count_calls(monkeypatch, engine, "unpack")
    for _ in range(3):
        source.forward(weights, Casts(CONFIG), transpose=True)
    assert not compared
    look_again(weights[0])
    for _ in range(3):
        assert source.forward(weights, Casts(CONFIG), transpose=True) is quantized
    assert len(compared) == 1


def test_other_values_that_the_engine_wrote_itself_are_of_the_same_weights(decoded) -> None:
    source, weights, quantized = decoded
    for weight in weights:
        weight.data.add_(0.01 * torch.randn_like(weight))  # as a checkpoint's values are
    source.note_values(weights)
    look_again(weights[0])
    assert source.forward(weights, Casts(CONFIG), transpose=True) is quantized
    first, second = weights[0].data[0, :2].tolist()
    weights[0].data[0, :2] = torch.tensor([second, first], dtype=torch.bfloat16)  # the same values elsewhere
    look_again(weights[0])
    assert not source.is_provided(weights)
    weights[0].data[:2, :2] = torch.tensor([[1, 2], [2, 1]], dtype=torch.bfloat16)
    source.note_values(weights)
    look_again(weights[0])
    assert source.is_provided(weights)
    weights[0].data[:2, :2] = torch.tensor([[2, 1], [1, 2]], dtype=torch.bfloat16)  # of the same sums
    look_again(weights[0])
    assert not source.is_provided(weights)
    source.fill(weights, quantized)
    look_again(weights[0])
    assert not source.is_provided(weights)  # what was written before is no value of what is made now


def test_weights_without_values_are_what_the_engine_made(decoded) -> None:
    _, weights, quantized = decoded
    source = EngineWeight(restore=lambda: None)
    for weight in weights:
        weight.data = weight.new_full((), torch.nan).expand(weight.shape)
    source.fill(weights, quantized)
    look_again(weights[0])
    assert source.forward(weights, Casts(CONFIG), transpose=True) is quantized
    weights[0].data, weights[1].data = torch.ones(32, 48).bfloat16(), torch.ones(16, 48).bfloat16()
    assert source.forward(weights, Casts(CONFIG), transpose=True).inverse_scale.item() == pytest.approx(1 / 448)
