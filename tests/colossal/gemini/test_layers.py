"""Gemini with FP8: layers and optimizers out of the ordinary, and what is refused."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from fp8booster import comm, report
from fp8booster.nn import FP8Linear
from fp8booster.optim import HybridAdam
from tests.colossal.gemini.observations import LAYERS
from tests.colossal.gemini.runs import boost, config, fp8_chunks, layers, masters, native, ours, weights, wire
from tests.colossal.models import tiny_llama
from tests.colossal.zero.runs import CLOSE, Layers, features, step
from tests.distributed import ranks
from tests.plugins.training import assert_close, train


class Penalised(Layers):
    """Adds the norm of a weight to the loss, and multiplies by it outside its layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.layers[0].weight
        return super().forward(x) + weight.square().mean() + F.linear(x, weight).float().square().mean()


@ranks(2)
def test_a_weight_that_is_read_outside_its_layer_has_its_values() -> None:
    for options in ({}, {"min_chunk_size_m": 32}, {"shard_param_frac": 0.0}):
        runs = [boost(plugin, Penalised(64, 64, 64)) for plugin in (wire(**options), native(**options))]
        losses = [[step(run, features()) for _ in range(4)] for run in runs]
        assert_close(losses[1], losses[0], 2 * CLOSE)
        with torch._C.DisableTorchFunction():  # the values of before the step are gone
            assert torch.Tensor(runs[0].model.unwrap().layers[0].weight.detach()).isnan().all()
        moments = [run.optimizer.state_dict(False)["state"][0]["exp_avg"] for run in runs]
        assert (moments[0] - moments[1]).norm() < 0.1 * moments[1].norm()


@ranks(2)
def test_a_weight_read_where_gemini_does_not_see_it_is_nan() -> None:
    run = boost(wire(), Layers(64, 64))
    layer = run.model.unwrap().layers[0]
    with torch._C.DisableTorchFunction():
        assert torch.Tensor(layer.weight.detach()).isnan().all()


@ranks(2)
def test_backward_through_a_graph_from_before_a_step_is_refused() -> None:
    run = boost(wire(), Layers(64, 64, 64))
    stale = run.model(features())
    run.model.chunk_manager.accessed_chunks.clear()
    run.model.publish_masters()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run.booster.backward(stale, run.optimizer)


@ranks(2)
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_master_that_is_not_finite_makes_its_weight_nan_on_every_rank(value: str) -> None:
    for spoiled_rank in range(dist.get_world_size()):
        run = boost(wire(), Layers(64, 64, 64))
        step(run, features())
        chunk = fp8_chunks(run)[0]
        if dist.get_rank() == spoiled_rank:
            chunk.paired_chunk.payload[3] = float(value)
        run.model.publish_masters()
        scales = [layer.fp8_weight.inverse_scale for _, layer in layers(run)]
        assert sum(bool(scale.isnan()) for scale in scales) == 1
        assert run.model(features()).isnan()


@ranks(2)
def test_a_nan_gradient_of_one_rank_reaches_the_norm_of_all() -> None:
    run = boost(wire(max_norm=1.0), Layers(64, 64, 64))
    loss = run.model(features())
    run.booster.backward(loss * (torch.nan if dist.get_rank() == 1 else 1.0), run.optimizer)
    run.optimizer.step()
    assert torch.tensor(run.optimizer.get_grad_norm()).isnan()


@ranks(2)
def test_a_frozen_layer_stays_in_fp8_and_needs_no_gather() -> None:
    model = Layers(64, 64, 64)
    model.layers[0].requires_grad_(False)
    frozen = model.layers[0].weight.detach().bfloat16()
    run = boost(wire(), model)
    losses = [step(run, features()) for _ in range(4)]
    assert losses[-1] < losses[0]
    assert len(report(run.model).fp8) == 2
    assert torch.equal(frozen, weights(run)["layers.0.weight"])
    assert len(fp8_chunks(run)[0].tensors_info) == 1


NOT_GATHERED = {
    "size no multiple of 16": lambda: (wire(), Layers(64, 72, 64)),
    "rowwise scales": lambda: (wire(fp8_config=config(scaling="rowwise")), Layers(64, 64, 64)),
    "blockwise scales": lambda: (wire(fp8_config=config(scaling="blockwise")), Layers(128, 256, 128)),
    "no master weights": lambda: (wire(master_weights=False), Layers(64, 64, 64)),
}


@ranks(2)
@pytest.mark.parametrize("reason", NOT_GATHERED)
def test_weights_that_are_not_sent_in_fp8_train_and_are_counted_with_the_reason(reason: str) -> None:
    plugin, model = NOT_GATHERED[reason]()
    width = model.layers[0].in_features
    reference = boost(native(master_weights=reason != "no master weights"), copy.deepcopy(model))
    run = boost(plugin, model)
    assert len(report(run.model).fp8) == 2
    assert not fp8_chunks(run)
    comm.reset_statistics()
    losses = [step(run, features(width)) for _ in range(3)]
    assert_close([step(reference, features(width)) for _ in range(3)], losses, 2 * CLOSE)
    row = comm.statistics()["chunk gather"]
    assert set(row.uncompressed) == {reason}
    assert row.wire_bytes == row.raw_bytes
    # no FP8 copy of the model outlives its use
    assert all(layer.fp8_weight.held is None for _, layer in layers(run))


@ranks(2)
def test_a_head_in_fp8_that_an_embedding_shares_is_gathered_in_16_bits() -> None:
    everything = config(layers=lambda name, module: True)
    run = boost(wire(fp8_config=everything), tiny_llama(tie_word_embeddings=True))
    comm.reset_statistics()
    losses = train(run)
    assert set(comm.statistics()["chunk gather"].uncompressed) == {"shared with another module"}
    assert sum(len(chunk.tensors_info) for chunk in fp8_chunks(run)) == LAYERS
    assert len(report(run.model).fp8) == LAYERS + 1
    assert_close(train(boost(native(), tiny_llama(tie_word_embeddings=True))), losses, 3 * CLOSE)


@ranks(2)
def test_a_weight_that_is_computed_for_each_forward_trains_near_native() -> None:
    losses = []
    for make in (native, wire, functools.partial(wire, fp8_communication=False)):
        torch.manual_seed(0)
        network = Layers(64, 64, 64, 64)
        nn.utils.spectral_norm(network.layers[0])
        parametrizations.weight_norm(network.layers[1])
        run = boost(make(), network, lr=1e-3)
        losses.append([step(run, features()) for _ in range(3)])
    for found in losses[1:]:
        assert_close(losses[0], found, 3 * CLOSE)


@ranks(2)
def test_biases_and_empty_batches_are_taken() -> None:
    run = boost(wire(), Layers(64, 64, 64))
    assert all(type(layer).__mro__[2] is FP8Linear for _, layer in layers(run))
    assert run.model.unwrap().layers[0](torch.zeros(0, 64, dtype=torch.bfloat16)).shape == (0, 64)
    before = masters(run)
    step(run, features())
    after = masters(run)
    assert not any(torch.equal(before[name], after[name]) for name in before)


@ranks(2)
def test_torchs_adamw_turns_into_ours_and_other_optimizers_are_refused() -> None:
    from colossalai.booster import Booster

    losses = []
    for make in (
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        lambda parameters: HybridAdam(parameters, lr=1e-2, weight_decay=0.01),
    ):
        for plugin in (wire(), ours()):
            model = Layers(64, 64, 64)
            optimizer = make(model.parameters())
            booster = Booster(plugin=plugin)
            model, wrapped, *_ = booster.boost(model, optimizer)
            assert type(optimizer) is HybridAdam
            for _ in range(2):
                loss = model(features())
                booster.backward(loss, wrapped)
                wrapped.step()
            losses.append(loss.item())
    assert losses[:2] == losses[2:]
    model = Layers(64, 64)
    with pytest.raises(TypeError, match=r"SGD cannot train shards .* give torch.optim.AdamW"):
        Booster(plugin=wire()).boost(model, torch.optim.SGD(model.parameters(), lr=0.1))


class Spare(nn.Module):
    """A layer that only some steps use; without biases the weight is alone in its chunk."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.first, self.spare = nn.Linear(64, 128, bias=bias), nn.Linear(128, 128, bias=bias)
        self.last, self.used = nn.Linear(128, 1, bias=bias), True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The mean of what the layers make of the features."""
        x = self.first(x)
        return self.last(self.spare(x) if self.used else x).float().mean()


@ranks(2)
@pytest.mark.parametrize("kind", ["with bias", "without", "without, accumulating", "16-bit weights, without"])
def test_a_trained_layer_that_a_step_does_not_use_is_named(kind: str) -> None:
    options = {"enable_gradient_accumulation": True} if "accumulating" in kind else {}
    if "16-bit" in kind:
        options["fp8_config"] = config(layers=lambda name, layer: name != "spare")
    run = boost(wire(**options), Spare(bias="with bias" in kind))

    def step(*uses: bool) -> None:
        for used in uses:
            run.model.unwrap().used = used
            run.booster.backward(run.model(features()), run.optimizer)
        run.optimizer.step()

    step(True)
    if "accumulating" in kind:
        step(True, False)
    with pytest.raises(RuntimeError, match=r"no gradient for `spare.weight`.*: .*requires_grad_\(False\) on layers"):
        step(False)


@ranks(2)
def test_wrong_values_are_refused_with_what_to_give() -> None:
    with pytest.raises(TypeError, match=r"'max_prefetchs'; did you mean max_prefetch"):
        ours(max_prefetchs=2)
    with pytest.raises(TypeError, match=r"give an fp8booster.FP8Config"):
        wire(fp8_config={"scaling": "amax"})
    with pytest.raises(ValueError, match=r"'bf16' or 'fp16', not 'fp32'"):
        wire(precision="fp32")
    with pytest.raises(ValueError, match=r"no layer of the model would compute in FP8"):
        boost(wire(), nn.Sequential(nn.LayerNorm(64)))


@ranks(2)
def test_other_data_of_a_weight_is_refused() -> None:
    run = boost(wire(), Layers(64, 64, 64))
    step(run, features())
    (_, layer), *_ = layers(run)
    layer._parameters["weight"].data = torch.ones(64, 64, dtype=torch.bfloat16)
    run.model.eval()
    with pytest.raises(RuntimeError, match=r"booster\.load_model"):
        run.model(features())
