"""Models of transformers 5 whose experts are two parameters, in FP8 under the plugins."""

from __future__ import annotations

from importlib import import_module
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy

from fp8booster import FP8Config, comm, convert_to_fp8, fully_shard, report
from fp8booster.comm import Encoding
from fp8booster.comm.fsdp import fsdp_units
from fp8booster.config import WeightCopies
from fp8booster.nn.convert import WHY_NOT_ROUTERS
from fp8booster.nn.experts.fp8_experts import ExpertWeight, FP8Experts
from fp8booster.nn.fsdp.bookkeeping import FP8FSDPParam
from fp8booster.nn.fsdp.units import holder_of, params_of
from fp8booster.nn.report import PASSED_OVER
from fp8booster.nn.weights.engine import EngineWeight
from fp8booster.nn.weights.holder import WeightHolder
from fp8booster.nn.weights.resharded import ReshardedWeight
from tests.distributed import ranks, run_ranks, shared_folder
from tests.nn.fused.models import MAJOR, VOCABULARY, build
from tests.plugins.training import STAGES, Boosted, assert_equal, boost, ours

pytestmark = pytest.mark.skipif(MAJOR < 5, reason="experts are modules")

FAMILIES = ("mixtral", "gpt_oss")
"""Whose experts lie as [out, in] each, and whose lie as [in, out], with biases and a gate of their own."""
GATHERED = (*FAMILIES, "llama4_text")
"""And whose block calls its experts otherwise."""
PLUGINS: dict[str, dict[str, object]] = {
    "LowLevelZeroPlugin": {"stage": 2, "precision": "bf16"},
    "TorchDDPPlugin": {},
    "TorchFSDPPlugin": {},
    "GeminiPlugin": {"precision": "bf16"},
}


def tokens(seed: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, 32), generator=torch.Generator().manual_seed(seed))


def assert_in_fp8(model: nn.Module) -> None:
    rows = [row for row in report(model).outside if row.notes != WHY_NOT_ROUTERS]
    assert len(rows) == 4
    assert {(row.precision, row.notes) for row in rows} == {("FP8", "experts in one parameter, in grouped products")}


@ranks(2)
@pytest.mark.parametrize("family", GATHERED)
@pytest.mark.parametrize("plugin", PLUGINS)
def test_experts_train_in_fp8_as_in_bf16(plugin: str, family: str) -> None:
    import fp8booster.plugins

    made = getattr(fp8booster.plugins, plugin)(use_fp8=True, **PLUGINS[plugin])
    boosted, plain = boost(made, build(family)), build(family)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    losses: list[list[float]] = [[], []]
    for _ in range(4):
        losses[0] += boosted.step(tokens(dist.get_rank()))
        of_ranks = [plain(input_ids=each, labels=each).loss for each in map(tokens, range(2))]
        (sum(of_ranks) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[1].append(of_ranks[dist.get_rank()].item())
    assert_in_fp8(boosted.model)
    assert losses[0][0] == pytest.approx(losses[1][0], rel=2e-3)
    assert losses[0] == pytest.approx(losses[1], rel=4e-2)
    assert losses[0][-1] < losses[0][0] - 0.1


def steps_on_one_batch(stage: int, family: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    run = boost(ours(use_fp8=True, fp8_communication=False, stage=stage), build(family))
    losses = [run.step(tokens(0))[0] for _ in range(3)]
    assert_in_fp8(run.model)
    return losses, run.parameters()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_train_on_one_batch_as_one_does(stage: int, family: str) -> None:
    (losses, parameters), (others, found) = (run_ranks(steps_on_one_batch, size, stage, family)[0] for size in (1, 2))
    assert losses == others
    assert_equal(parameters, found)


@ranks(2)
@pytest.mark.parametrize("high_precision", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_zero_gathers_the_bytes_that_experts_multiply_by(family: str, high_precision: bool) -> None:
    config = FP8Config(weight_copies=WeightCopies(high_precision=high_precision))
    run = boost(ours(use_fp8=True, stage=1, fp8_config=config), build(family))
    for _ in range(2):
        comm.reset_statistics()
        run.step(tokens(dist.get_rank()))
    counted = comm.statistics()["weight gather"]
    experts = [module for module in run.model.modules() if isinstance(module, FP8Experts)]
    # two parameters a layer, of two layers; and the layers' weights
    assert counted.calls - sum(counted.uncompressed.values()) > 4
    assert counted.wire_bytes < 0.6 * counted.raw_bytes
    for module in experts:
        for name, source in module.fp8_weights.items():
            weight, held = getattr(module, name), source.held
            assert isinstance(source, EngineWeight)
            assert source.is_provided([weight])
            # the values in 16 bits, which the module's own forward reads, are those of the bytes
            data = held.transpose if module.is_transposed else held.data
            assert torch.equal(weight, (data.float() * held.inverse_scale).to(weight.dtype).view(weight.shape))
            others = [torch.empty_like(data.view(torch.uint8)) for _ in range(2)]
            dist.all_gather(others, data.view(torch.uint8))
            assert torch.equal(*others)
    assert_in_fp8(run.model)


@ranks(2)
def test_experts_read_otherwise_run_on_the_values_of_what_was_gathered() -> None:
    """Transformers' own forward, as for calls that are not in FP8."""
    run = boost(ours(use_fp8=True, stage=1), build("mixtral"))
    run.step(tokens(dist.get_rank()))
    network = run.model.unwrap()
    before = network(input_ids=tokens(0)).logits
    for module in network.modules():
        if isinstance(module, FP8Experts):
            module.revert()
    torch.testing.assert_close(network(input_ids=tokens(0)).logits, before, rtol=0.1, atol=0.1)


@ranks(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_has_the_names_and_values_of_a_model_without_fp8(family: str) -> None:
    run = boost(ours(use_fp8=True, stage=1), build(family))
    run.step(tokens(dist.get_rank()))
    folder = shared_folder("model")
    run.booster.save_model(run.model, str(folder), shard=True, use_safetensors=True)
    dist.barrier()
    other = boost(ours(use_fp8=False, stage=1), build(family))
    other.booster.load_model(other.model, str(folder))
    plain = build(family)
    assert other.parameters().keys() == {name for name, _ in plain.named_parameters()}
    assert moved(other, plain) > 0.9
    again = boost(ours(use_fp8=True, stage=1), build(family))
    again.booster.load_model(again.model, str(folder))
    losses = [each.loss(tokens(0)).item() for each in (run, again, other)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[0] == pytest.approx(losses[2], rel=1e-2)


def moved(run: Boosted, plain: nn.Module) -> float:
    """How many of the experts' values differ."""
    found, before = run.parameters(), dict(plain.named_parameters())
    names = [name for name in before if "experts" in name and name.endswith("proj")]
    return min((found[name] != before[name]).float().mean().item() for name in names)


def gathered_in_fp8(run: Boosted) -> list[WeightHolder]:
    """Who multiplies by what FSDP or Gemini gathers in FP8."""
    found: list[WeightHolder] = []
    for module in run.model.modules():
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            found += [place.layer for place in module._handle.fp8_weights._fp8]
    return found or list(run.model._plan.layers.values())


@ranks(2)
@pytest.mark.parametrize("family", GATHERED)
@pytest.mark.parametrize("plugin", ["TorchFSDPPlugin", "GeminiPlugin"])
def test_engines_gather_experts_in_fp8(plugin: str, family: str) -> None:
    import fp8booster.plugins

    made = getattr(fp8booster.plugins, plugin)(use_fp8=True, **PLUGINS[plugin])
    run = boost(made, build(family))
    losses = [run.step(tokens(dist.get_rank()))[0] for _ in range(3)]
    assert losses[-1] < losses[0]
    from fp8booster.colossal.gemini.chunks import ChunkWeight

    of_experts = [each for each in gathered_in_fp8(run) if isinstance(each, ExpertWeight)]
    assert len(of_experts) == 4  # two parameters a layer, of two layers
    sources = {type(each.fp8_weight) for each in of_experts}
    assert sources == {ChunkWeight if plugin == "GeminiPlugin" else ReshardedWeight}
    assert_in_fp8(run.model)


def sharded_by_fsdp2(family: str, config: FP8Config, **options: object) -> nn.Module:
    return fully_shard(build(family).bfloat16(), config, **options)


@ranks(2)
@pytest.mark.parametrize("family", GATHERED)
def test_fsdp2_gathers_the_bytes_that_a_rank_would_cast(family: str) -> None:
    results = []
    for messages in (Encoding(), None):
        model = sharded_by_fsdp2(family, FP8Config(messages=messages))
        gathered = [param for unit in fsdp_units(model) for param in params_of(unit) if isinstance(param, FP8FSDPParam)]
        of_experts = [param for param in gathered if isinstance(holder_of(param), ExpertWeight)]
        assert len(of_experts) == (0 if messages is None else 4)
        losses = []
        for _ in range(2):  # the second of weights that were gathered, freed and gathered again
            loss = model(input_ids=tokens(0), labels=tokens(0)).loss
            loss.backward()
            losses.append(loss.item())
        results.append((losses, {name: each.grad.full_tensor() for name, each in model.named_parameters()}))
        assert_in_fp8(model)
    (losses, gradients), (others, expected) = results
    assert losses == others
    for name, gradient in gradients.items():  # which are reduced in FP8, or in 16 bits
        assert (gradient - expected[name]).norm() <= 0.06 * expected[name].norm(), name


@ranks(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_code_reads_what_fsdp2_gathered(family: str) -> None:
    """For calls that are not in FP8."""
    model = sharded_by_fsdp2(family, FP8Config())
    expected = model(input_ids=tokens(0), labels=tokens(0)).loss.item()
    with mock.patch.object(FP8Experts, "_why_not_called_so", return_value="a test"):
        loss = model(input_ids=tokens(0), labels=tokens(0)).loss
        loss.backward()
    assert loss.item() == pytest.approx(expected, rel=5e-3)
    assert all(each.grad.full_tensor().isfinite().all() for each in model.parameters())
    notes = [row.notes for row in report(model).outside if "experts" in row.name and row.precision == "FP8"]
    assert len(notes) == 4
    assert all(each.endswith("not in FP8 for some calls: a test") for each in notes)


@ranks(2)
def test_experts_that_compute_in_fp16_are_gathered_so() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.float16)
    model = sharded_by_fsdp2("mixtral", FP8Config(), mp_policy=policy)
    comm.reset_statistics()
    assert model(input_ids=tokens(0), labels=tokens(0)).loss.isfinite()
    assert any("BF16 alone" in reason for reason in comm.statistics()["parameter gather"].uncompressed)


@ranks(2)
def test_gemini_has_no_16_bit_weights_for_transformers_code() -> None:
    from fp8booster.plugins import GeminiPlugin

    run = boost(GeminiPlugin(use_fp8=True, precision="bf16"), build("mixtral"))
    told = pytest.raises(RuntimeError, match="lie in FP8 alone under Gemini")
    with mock.patch.object(FP8Experts, "_why_not_called_so", return_value="a test"), told:
        run.loss(tokens(0))


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_in_fp8_are_the_same_by_whatever_implementation(family: str) -> None:
    ids, gradients = tokens(0), []
    for implementation in ("eager", "batched_mm", "grouped_mm"):
        model = build(family)
        model.set_experts_implementation(implementation)
        plain = model(input_ids=ids, labels=ids).loss
        convert_to_fp8(model)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        assert loss.item() == pytest.approx(plain.item(), rel=2e-3)
        assert loss.item() != plain.item()
        assert_in_fp8(model)
        gradients.append({name: each.grad for name, each in model.named_parameters()})
    assert_equal(gradients[0], gradients[1])
    assert_equal(gradients[0], gradients[2])


@pytest.mark.parametrize("before", [True, False])
def test_an_implementation_of_the_programs_own_runs(before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    functions = import_module("transformers.integrations.moe").ALL_EXPERTS_FUNCTIONS
    monkeypatch.setitem(functions, "own", lambda experts, x, chosen, weights: 3 * x)
    ids, model, plain = tokens(0), build("mixtral"), build("mixtral")
    plain.set_experts_implementation("own")
    config = FP8Config(layers=lambda name, _: name.endswith(("experts", "lm_head")))
    # the head is in FP8 all the time, so that a model is converted where the experts are not
    convert_to_fp8(plain, config)
    if not before:
        convert_to_fp8(model, config)
        model(input_ids=ids)
        assert_in_fp8(model)
    model.set_experts_implementation("own")
    if before:
        convert_to_fp8(model, config)
    assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)
    assert all("which must run" in row.notes for row in report(model).outside if ".experts." in row.name)


def test_experts_that_the_code_of_their_block_passes_over_are_reported_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = convert_to_fp8(build("mixtral")), tokens(0)
    assert_in_fp8(model)  # nothing has run yet
    experts = [module for module in model.modules() if isinstance(module, FP8Experts)]
    block = next(module for module in model.modules() if "experts" in module._modules)
    monkeypatch.setattr(type(block), "forward", lambda self, x: x @ self.experts.down_proj.mean(0).mean(1, True))
    model(input_ids=ids)
    rows = [row for row in report(model).outside if row.name.endswith("_proj")]
    assert {(row.precision, row.notes) for row in rows} == {("BF16", PASSED_OVER)}
    monkeypatch.undo()
    model(input_ids=ids)
    assert_in_fp8(model)
    assert all(each.has_run for each in experts)


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpointing_and_evaluation_give_the_same_bits(family: str) -> None:
    ids, gradients = tokens(0), []
    for checkpointing in (False, True):
        model = convert_to_fp8(build(family), FP8Config(emulate=True))
        if checkpointing:
            model.gradient_checkpointing_enable()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        gradients.append({name: each.grad for name, each in model.named_parameters()})
        with torch.no_grad():
            assert model.eval()(input_ids=ids, labels=ids).loss == loss
    assert_equal(*gradients)


def test_transformers_saves_and_loads_a_model_in_fp8(tmp_path) -> None:
    model = convert_to_fp8(build("mixtral"))
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert_equal(dict(model.named_parameters()), dict(loaded.named_parameters()))


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_of_experts_train_and_merge(family: str) -> None:
    peft = pytest.importorskip("peft")
    ids, results = tokens(0), []
    for in_fp8 in (True, False):
        adapters = peft.LoraConfig(
            r=4, target_modules=[], target_parameters=["mlp.experts.gate_up_proj"], init_lora_weights=False
        )
        model = peft.get_peft_model(build(family), adapters).bfloat16().train()
        torch.manual_seed(1)
        for name, each in model.named_parameters():
            if "lora" in name:
                nn.init.normal_(each, std=0.05)
        if in_fp8:
            convert_to_fp8(model, FP8Config(emulate=True))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        results.append({name: each.grad for name, each in model.named_parameters() if each.grad is not None})
        before, after = logits_around_merge(model, ids)
        assert (after - before).norm() < 0.05 * before.norm()
    assert results[0].keys() == results[1].keys()
    assert len(results[0]) == 4
    for name, gradient in results[0].items():
        assert (gradient - results[1][name]).norm() < 0.3 * results[1][name].norm(), name


def logits_around_merge(model: nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In training, where FP8 copies are kept; before adapters are merged, and after."""
    found = []
    with torch.no_grad():
        found.append(model(input_ids=ids).logits.float())
        with model.disable_adapter():
            model(input_ids=ids)  # keeps copies of the weights alone
        model.merge_adapter()
        found.append(model(input_ids=ids).logits.float())
    return found[0], found[1]
