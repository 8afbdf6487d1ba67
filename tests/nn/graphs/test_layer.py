from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

from fp8booster import FP8Config, convert_to_fp8, fuse, report
from fp8booster.config import GRADIENT_ACCUMULATIONS, Activations
from fp8booster.kernels.device import current_stream
from fp8booster.nn.graphs import capture_layers, captured_layers, free_graphs, recorder
from fp8booster.nn.graphs.layer import MOST_KINDS, TOO_EARLY, WARM_UP, LayerGraphs, Shared
from fp8booster.nn.weights.source import CachedWeight
from fp8booster.optim import AdamW
from tests.nn.fsdp.resharding import follow_resharding
from tests.nn.fused.models import VOCABULARY, build
from tests.nn.graphs.rerun import Rerun

LAYERS = 2


def pair_of_models(device: torch.device, family: str = "llama", **options: object) -> tuple[nn.Module, nn.Module]:
    """The same small model twice, in FP8 and fused, of which the second's layers are captured."""
    eager = build(family, torch.bfloat16).to(device).train()
    convert_to_fp8(eager, FP8Config(always=True, cuda_graphs=False, **options))
    fuse(eager)
    captured = copy.deepcopy(eager)
    assert capture_layers(captured) == LAYERS
    return eager, captured


def tokens(step: int, device: torch.device, length: int = 32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, VOCABULARY, (2, length), generator=generator).to(device)


def forward(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=ids).loss


Batches = Callable[[int, torch.device], list[torch.Tensor]]


@pytest.mark.usefixtures("record")
@pytest.mark.parametrize(
    "batches",
    [
        lambda step, device: [tokens(step, device)],
        lambda step, device: [tokens(10 * step + micro, device) for micro in range(3)],
        lambda step, device: [tokens(10 * step + micro, device, (32, 48)[micro]) for micro in range(2)],
    ],
    ids=["one", "three micro-batches", "two lengths"],
)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_captured_layers_compute_the_bits_of_eager_ones(
    device: torch.device, batches: Batches, set_to_none: bool
) -> None:
    models = pair_of_models(device)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    for step in range(8):
        losses = []
        for model, optimizer in zip(models, optimizers, strict=True):
            of_model = []
            for ids in batches(step, device):
                loss = forward(model, ids)
                loss.backward()
                of_model.append(loss.item())
            losses.append(of_model)
            gradients = [parameter.grad.clone() for parameter in model.parameters()]
            if model is models[0]:
                right = gradients
            else:
                assert all(map(torch.equal, gradients, right))
            optimizer.step()
            optimizer.zero_grad(set_to_none)
        assert losses[0] == losses[1]
    assert captured_layers(models[1]) == {None: LAYERS}
    assert f", {LAYERS} layers replayed as CUDA graphs" in report(models[1]).summary()
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


@pytest.mark.usefixtures("record")
@pytest.mark.parametrize(
    "options",
    [
        {"activations": Activations(recompute="both")},
        {"activations": Activations(saved="8-bit")},
        {"activations": Activations(saved="8-bit", recompute="norms")},
    ],
)
def test_what_backward_computes_again_has_the_same_bits_in_captured_layers(
    device: torch.device, options: dict[str, str]
) -> None:
    models = pair_of_models(device, **options)
    for step in range(WARM_UP + 3):
        ids = tokens(step, device)
        losses = [forward(model, ids) for model in models]
        for loss in losses:
            loss.backward()
        assert torch.equal(*losses)
        right, found = ([parameter.grad for parameter in model.parameters()] for model in models)
        assert all(map(torch.equal, found, right))
        for model in models:
            model.zero_grad()
    assert captured_layers(models[1]) == {None: LAYERS}


def test_a_layer_is_captured_once_and_each_weight_cast_once_a_step(record: Rerun | None, device: torch.device) -> None:
    if record is None:
        pytest.skip("counts what stands in for graphs")
    model = pair_of_models(device)[1]
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(WARM_UP):
        forward(model, tokens(0, device)).backward()
    assert captured_layers(model) == {TOO_EARLY: LAYERS}
    forward(model, tokens(0, device)).backward()
    assert captured_layers(model) == {None: LAYERS}
    sources = 4  # q, k and v; o; gate and up; down
    assert record.captured == LAYERS * (2 + sources)
    optimizer.step()
    before = record.replayed
    for _ in range(3):
        forward(model, tokens(0, device)).backward()
    assert record.replayed - before == LAYERS * (3 * 2 + sources)
    assert record.captured == LAYERS * (2 + sources)


def load_other_parameters(model: nn.Module) -> None:
    model.load_state_dict({name: 1.5 * each for name, each in model.state_dict().items()}, assign=True)


@pytest.mark.usefixtures("record")
@pytest.mark.parametrize(
    ("frozen", "change"), [(True, lambda model: model.requires_grad_(True)), (False, load_other_parameters)]
)
def test_layers_whose_parameters_change_are_captured_anew(
    device: torch.device, frozen: bool, change: Callable[[nn.Module], object]
) -> None:
    found = []
    for model in pair_of_models(device):
        model.model.layers[0].requires_grad_(not frozen)
        for step in range(WARM_UP + 2):
            forward(model, tokens(step, device)).backward()
        change(model)
        model.zero_grad()
        for step in range(WARM_UP + 2):
            loss = forward(model, tokens(step, device))
            loss.backward()
        found.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
        assert all(each is not None for each in found[-1])
    assert captured_layers(model) == {None: LAYERS}
    assert all(map(torch.equal, *found))


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "a number": lambda layer: setattr(layer.input_layernorm, "variance_epsilon", 0.5),
    "the mode of a part": lambda layer: layer.mlp.eval(),
    "another part": lambda layer: setattr(layer.mlp, "act_fn", nn.ReLU()),
    "a forward": lambda layer: setattr(layer.mlp, "forward", type(layer.mlp).forward.__get__(layer.mlp)),
    "a buffer": lambda layer: layer.mlp._buffers.update(offset=torch.ones(1)),
    "a tensor": lambda layer: setattr(layer.mlp, "offset", torch.ones(1)),
    "a number that a mixin names": lambda layer: setattr(layer.self_attn, "layer_idx", 5),
    "scales": lambda layer: convert_to_fp8(layer, FP8Config(always=True, cuda_graphs=False, scaling="rowwise")),
    "options of casts": lambda layer: layer.mlp.down_proj.fp8_casts.under(FP8Config(cuda_graphs=False)),
    "the weight of merged layers": lambda layer: setattr(layer.mlp.fp8_merged, "fp8_weight", CachedWeight()),
    "nothing": lambda layer: setattr(layer.input_layernorm, "variance_epsilon", 1e-6),
}


def look_at_weights(model: nn.Module) -> None:
    for layer in model.model.layers:
        assert layer.mlp.down_proj.weight is not None


def evaluate(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        forward(model, tokens(0, model.device, 48))
    model.train()


@pytest.mark.usefixtures("record")
@pytest.mark.parametrize("use", [look_at_weights, evaluate])
def test_notes_of_how_a_layer_is_used_leave_its_graphs(device: torch.device, use: Callable[[nn.Module], None]) -> None:
    model = pair_of_models(device)[1]
    for _ in range(WARM_UP + 1):
        forward(model, tokens(0, device)).backward()
    use(model)
    forward(model, tokens(0, device)).backward()
    assert captured_layers(model) == {None: LAYERS}


@pytest.mark.parametrize("change", CHANGES)
def test_layers_whose_attributes_change_are_captured_anew(
    record: Rerun | None, device: torch.device, change: str
) -> None:
    if record is None:
        pytest.skip("counts what stands in for graphs")
    _, model = pair_of_models(device)
    for step in range(WARM_UP + 1):
        forward(model, tokens(step, device)).backward()
    before = record.captured
    CHANGES[change](model.model.layers[0])
    for step in range(WARM_UP + 1):
        forward(model, tokens(step, device)).backward()
        anew = change != "nothing" and step == WARM_UP
        assert captured_layers(model) == ({None: LAYERS} if anew or change == "nothing" else {None: 1, TOO_EARLY: 1})
    assert (record.captured > before) == (change != "nothing")


def test_freed_graphs_are_captured_anew(record: Rerun | None, device: torch.device) -> None:
    models = pair_of_models(device)
    for step in range(WARM_UP + 6):
        if step > WARM_UP:
            free_graphs()
            if record is not None:
                gc.collect()  # what stands in for a graph holds the work, which holds it
                assert not record.graphs
        losses = [forward(model, tokens(step, device)) for model in models]
        for loss in losses:
            loss.backward()
        assert torch.equal(*losses)
        assert all(map(torch.equal, *([each.grad for each in model.parameters()] for model in models)))
    assert captured_layers(models[1]) == {None: LAYERS}


@pytest.mark.usefixtures("record")
def test_a_backward_without_its_graphs_says_why(device: torch.device) -> None:
    model = pair_of_models(device)[1]
    for step in range(WARM_UP + 1):
        loss = forward(model, tokens(step, device))
        if step < WARM_UP:
            loss.backward()
    free_graphs()
    with pytest.raises(RuntimeError, match="a process group was destroyed; run backward first"):
        loss.backward()


@pytest.mark.usefixtures("record")
@pytest.mark.parametrize("kind", GRADIENT_ACCUMULATIONS)
def test_gradients_of_captured_layers_add_up_in_backward(device: torch.device, kind: str) -> None:
    models = pair_of_models(device)
    for model in models:
        optimizer = AdamW(
            model.parameters(), lr=1e-2, update_in_backward=True, micro_batches=3, gradient_accumulation=kind
        )
        for micro in range(3 * (WARM_UP + 2)):
            forward(model, tokens(micro, device)).backward()
        optimizer.step()
    assert captured_layers(models[1]) == {None: LAYERS}
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


@pytest.mark.usefixtures("record")
def test_forwards_wait_for_their_backwards_as_in_a_pipeline(device: torch.device) -> None:
    models = pair_of_models(device)
    for step in range(3):
        for model in models:
            model.zero_grad()
            losses = [forward(model, tokens(10 * step + micro, device)) for micro in range(4)]
            for loss in losses:
                loss.backward()
        assert all(
            torch.equal(one.grad, other.grad)
            for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True)
        )
    assert captured_layers(models[1]) == {None: LAYERS}


@pytest.mark.usefixtures("record")
def test_evaluation_and_a_forward_without_backward_change_nothing(device: torch.device) -> None:
    models = pair_of_models(device)
    for step in range(6):
        gradients = []
        for model in models:
            model.zero_grad()
            model.eval()
            with torch.no_grad():
                evaluated = forward(model, tokens(50, device)).item()
            model.train()
            forward(model, tokens(60 + step, device))
            forward(model, tokens(step, device)).backward()
            gradients.append([evaluated, *(parameter.grad.sum().item() for parameter in model.parameters())])
        assert gradients[0] == gradients[1]


@pytest.mark.usefixtures("record")
def test_hooks_of_weights_run_once_on_the_stream_of_backward(device: torch.device) -> None:
    models = pair_of_models(device)
    seen: list[list[torch.Tensor]] = [[], []]
    streams = set()
    for model, gradients in zip(models, seen, strict=True):
        weight = model.model.layers[0].mlp.down_proj.weight
        # as DDP does: it holds what accumulates the gradient, from before the first forward
        model.accumulates = weight.expand_as(weight).grad_fn.next_functions[0][0]
        model.accumulates.register_prehook(lambda grads, kept=gradients: kept.append(grads[0].clone()))
        weight.register_hook(lambda gradient, kept=gradients: kept.append(gradient.clone()))
        weight.register_post_accumulate_grad_hook(lambda weight: streams.add(current_stream(weight)))
        for step in range(WARM_UP + 2):
            model.zero_grad()
            losses = [forward(model, tokens(10 * step + micro, device)) for micro in range(2)]
            for loss in losses:
                loss.backward()
    assert captured_layers(models[1]) == {None: LAYERS}
    assert len(seen[0]) == len(seen[1]) == (WARM_UP + 2) * 2 * 2
    assert all(map(torch.equal, *seen))
    assert streams == {current_stream(weight)}


@pytest.mark.usefixtures("record")
def test_a_captured_backward_reaches_nothing_from_outside(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = pair_of_models(device)[1]
    real, others, kept = torch.autograd.grad, [], []

    def grad(roots: tuple[torch.Tensor, ...], leaves: list[torch.Tensor], *args: object, **options: object) -> object:
        waiting, wanted = [root.grad_fn for root in roots], set(map(id, leaves))
        others.append(0)
        while waiting:
            node = waiting.pop()
            others[-1] += hasattr(node, "variable") and id(node.variable) not in wanted
            waiting += [each for each, _ in node.next_functions if each is not None]
        kept.append(options["retain_graph"])
        return real(roots, leaves, *args, **options)

    monkeypatch.setattr(torch.autograd, "grad", grad)
    for step in range(WARM_UP + 1):
        forward(model, tokens(step, device)).backward()
    assert len(others) >= LAYERS
    assert not any(others)
    assert all(kept)  # else the memory of what forward saved would be another's at the next replay


@pytest.mark.usefixtures("record")
def test_a_capture_that_breaks_off_is_the_last(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    models = pair_of_models(device)
    tries = []

    def record_nothing(self: object, work: object, *, passing: bool = False) -> None:
        tries.append(passing)
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    monkeypatch.setattr(Rerun if device.type == "cpu" else recorder.Recorder, "__call__", record_nothing)
    for step in range(WARM_UP + 2):
        gradients = []
        for model in models:
            model.zero_grad()
            forward(model, tokens(step, device)).backward()
            gradients.append([parameter.grad for parameter in model.parameters()])
        assert all(map(torch.equal, *gradients))
    assert captured_layers(models[1]) == {"it cannot be captured (operation not permitted)": LAYERS}
    assert len(tries) == 1


@pytest.mark.usefixtures("record")
def test_under_autocast_layers_compute_the_bits_of_eager_ones(device: torch.device) -> None:
    models = pair_of_models(device)
    models = tuple(model.float() for model in models)
    for checkpointed in (False, True):
        for step in range(WARM_UP + 2):
            gradients = []
            for model in models:
                model.zero_grad()
                if checkpointed:
                    model.gradient_checkpointing_enable({"use_reentrant": False})
                with torch.autocast(device.type, torch.bfloat16):
                    loss = forward(model, tokens(step, device))
                loss.backward()
                gradients.append([parameter.grad for parameter in model.parameters()])
            assert all(map(torch.equal, *gradients))
        assert captured_layers(models[1]) == {None: LAYERS}


@pytest.mark.usefixtures("record")
def test_a_step_between_forward_and_backward_is_noticed(device: torch.device) -> None:
    model = pair_of_models(device)[1]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(WARM_UP + 1):
        forward(model, tokens(0, device)).backward()
    loss = forward(model, tokens(0, device))
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.usefixtures("record")
@pytest.mark.parametrize("steps", [False, True])
def test_an_eager_backward_notices_that_a_replay_has_cast_its_weights_again(device: torch.device, steps: bool) -> None:
    model = pair_of_models(device)[1]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(WARM_UP + 1):
        forward(model, tokens(0, device)).backward()
    waits = forward(model, tokens(0, device, length=16))  # of a kind that was not captured
    forward(model, tokens(1, device)).backward()
    if steps:
        optimizer.step()
    forward(model, tokens(1, device)).backward()
    if steps:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            waits.backward()
    else:
        waits.backward()


@pytest.mark.usefixtures("record")
def test_a_second_backward_needs_a_graph_that_is_kept(device: torch.device) -> None:
    model = pair_of_models(device)[1]
    layer = model.model.layers[0]
    for _ in range(WARM_UP + 1):
        forward(model, tokens(0, device)).backward()
    given: list = []
    handle = layer.register_forward_hook(lambda _, args, output: given.append(output))
    forward(model, tokens(0, device))
    handle.remove()
    hidden = given[0][0] if isinstance(given[0], tuple) else given[0]
    hidden.sum().backward()
    with pytest.raises(RuntimeError, match="run the first backward with retain_graph=True"):
        hidden.sum().backward()


def reasons(model: nn.Module, device: torch.device) -> list[str]:
    for _ in range(WARM_UP + 1):
        forward(model, tokens(0, device)).backward()
    return [str(reason) for reason in captured_layers(model)]


@pytest.mark.usefixtures("record")
def test_what_is_not_captured_is_named(device: torch.device) -> None:
    model = pair_of_models(device)[1]
    seen = []
    handle = model.model.layers[0].mlp.register_forward_hook(lambda *_: seen.append(1))
    assert reasons(model, device) == ["hooks of a module inside must run", "None"]
    assert len(seen) == WARM_UP + 1
    handle.remove()
    assert reasons(model, device) == ["None"]
    follow_resharding(model)  # as FSDP2 asks for, which may shard the model later
    assert reasons(model, device) == ["its weights are gathered elsewhere"]
    convert_to_fp8(model, FP8Config(always=True, cuda_graphs=False))
    assert reasons(model, device) == ["None"]
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    assert reasons(model, device) == ["checkpointing computes it again within backward; use use_reentrant=False"]
    model.gradient_checkpointing_disable()
    model.disable_input_require_grads()
    with torch.autograd.graph.save_on_cpu():
        assert reasons(model, device) == ["what it saves for backward is stored elsewhere"]
    for length in range(MOST_KINDS):
        forward(model, tokens(0, device, 32 + length)).backward()
    assert list(captured_layers(model)) == [TOO_EARLY]
    forward(model, tokens(0, device, 64)).backward()
    assert list(captured_layers(model)) == [f"{MOST_KINDS} calls with other shapes were captured before"]


@pytest.mark.usefixtures("record")
def test_checkpointed_layers_are_captured_with_their_second_forward(device: torch.device) -> None:
    models = pair_of_models(device)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-2) for model in models]
    for model in models:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for step in range(6):
        losses = []
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            waiting = [forward(model, tokens(10 * step + micro, device)) for micro in range(2)]
            for loss in waiting:
                loss.backward()
            losses.append([loss.item() for loss in waiting])
            optimizer.step()
        assert losses[0] == losses[1]
    assert captured_layers(models[1]) == {None: LAYERS}
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


@pytest.mark.usefixtures("record")
def test_dropout_is_not_captured_with_checkpointing(device: torch.device) -> None:
    model = pair_of_models(device)[1]
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    assert reasons(model, device) == ["None"]
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert reasons(model, device) == ["it draws random numbers, which checkpointing must draw again"]


@pytest.mark.usefixtures("record")
def test_a_packed_batch_runs_eagerly(device: torch.device) -> None:
    model = pair_of_models(device)[1]
    ids = tokens(0, device).reshape(1, -1)
    places = torch.arange(32, device=device).repeat(2)[None]
    for _ in range(WARM_UP + 1):
        model(input_ids=ids, labels=ids, position_ids=places).loss.backward()
    assert list(captured_layers(model)) == ["it is given a PackedEmbeddings"]


def test_without_a_gpu_nothing_is_captured() -> None:
    model = pair_of_models(torch.device("cpu"))[1]
    assert reasons(model, torch.device("cpu")) == ["CUDA graphs take a GPU"]
    assert f", {LAYERS} layers not (CUDA graphs take a GPU) replayed" in report(model).summary()


@pytest.mark.usefixtures("record")
def test_copies_and_pickles_are_captured_anew(device: torch.device) -> None:
    model = pair_of_models(device)[1]
    right = reasons(model, device)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert list(captured_layers(other)) == [TOO_EARLY]
        assert reasons(other, device) == right == ["None"]


@pytest.mark.gpu
def test_a_layer_that_moves_to_a_gpu_may_be_captured_there() -> None:
    """`nn.Module.to` keeps the parameters, and moves their data."""
    layer, graphs = nn.Linear(16, 16), LayerGraphs(Shared(only_where_host_limits=False))
    assert graphs._why_never(graphs._look(layer)) == "CUDA graphs take a GPU"
    assert graphs._why_never(graphs._look(layer.cuda())) is None


def test_a_parameter_that_changes_its_class_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(nn.Parameter):
        """Whatever a library makes of it."""

    monkeypatch.setattr(recorder, "recorder_for", lambda _: Rerun())
    layer, graphs = nn.Linear(16, 16), LayerGraphs(Shared(only_where_host_limits=False))
    assert graphs._why_never(graphs._look(layer)) is None
    layer.weight.__class__ = Other
    assert graphs._why_never(graphs._look(layer)) == "a weight is a Other"
