"""`MoeHybridParallelPlugin` with each family of mixtures: losses of one rank, FP8, and checkpoints of all experts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from fp8booster import FP8Config, report
from fp8booster.nn.experts import fp8_experts
from fp8booster.nn.experts.grouped import GroupedExperts
from fp8booster.nn.experts.spread import spread_of
from tests.colossal.hybrid.runs import HybridRun, start
from tests.distributed import ranks, shared_folder
from tests.nn.experts.families import FAMILIES, batch_of, tiny_mixture
from tests.nn.fused.models import MAJOR, build
from tests.plugins import training

if TYPE_CHECKING:
    from fp8booster.plugins.moe_hybrid_parallel import MoeHybridParallelPlugin

STEPS = 3
RATE = 1e-2
IN_FP8 = {"use_fp8": True, "fp8_config": FP8Config(emulate=True, always=True)}


def plugin(ep_size: int, **arguments: Any) -> MoeHybridParallelPlugin:
    """Of experts on `ep_size` ranks, in BF16 unless `arguments` say otherwise."""
    from fp8booster.plugins.moe_hybrid_parallel import MoeHybridParallelPlugin

    return MoeHybridParallelPlugin(1, 1, ep_size, **{"precision": "bf16", "zero_stage": 1} | arguments)


def boosted(family: str, ep_size: int, **arguments: Any) -> HybridRun:
    """A boosted tiny model."""
    return start(plugin(ep_size, **arguments), tiny_mixture(family), lr=RATE)


def learned(run: HybridRun, steps: int = STEPS) -> list[float]:
    """The losses of a boosted model, the mean over ranks."""
    return [run.step(batch_of(dist.get_rank()))[0] for _ in range(steps)]


def learned_alone(family: str) -> list[float]:
    """Those of one process that has the batches of all ranks, in BF16 under FP32 masters."""
    model = tiny_mixture(family).bfloat16()
    working = list(model.parameters())
    masters = [each.detach().float() for each in working]
    optimizer = torch.optim.AdamW(masters, lr=RATE)
    losses = []
    for _ in range(STEPS):
        batches = [batch_of(rank) for rank in range(dist.get_world_size())]
        loss = torch.stack([model(input_ids=tokens, labels=tokens).loss for tokens in batches]).mean()
        loss.backward()
        losses.append(loss.item())
        for master, parameter in zip(masters, working, strict=True):
            # a boosted model has zeros for an expert without tokens
            master.grad = torch.zeros_like(master) if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(working, masters)
    return losses


def assert_learns_as_alone(family: str, ep_size: int) -> None:
    expected = learned_alone(family)
    assert expected[-1] < 0.95 * expected[0]
    run = boosted(family, ep_size)
    # the sum of what each rank's experts make of a token is rounded to BF16, and losses part from there
    assert learned(run) == pytest.approx(expected, rel=5e-3)
    assert not report(run.model).fp8
    run = boosted(family, ep_size, **IN_FP8)
    assert learned(run) == pytest.approx(expected, rel=3e-2)
    told = report(run.model)
    experts = [row for row in (*told.rows, *told.outside) if ".experts." in row.name]
    assert {row.precision for row in experts} == {"FP8"}
    assert {each.why_one_by_one for each in told.grouped} <= {None}


@ranks(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_are_those_of_one_rank(family: str) -> None:
    assert_learns_as_alone(family, 2)


@ranks(4)
@pytest.mark.parametrize("ep_size", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_are_those_of_one_rank_on_four(family: str, ep_size: int) -> None:
    assert_learns_as_alone(family, ep_size)


@ranks(4)
def test_ranks_send_and_reduce_gradients_in_one_order_whatever_their_rows() -> None:
    """Ranks 0 and 1 share experts, and 2 and 3; 0 and 2 reduce gradients of theirs, and 1 and 3."""
    few = dist.get_rank() in (1, 2)
    mixture = plugin(2, **IN_FP8)
    mixture.zero_config["reduce_bucket_size"] = 2000  # reduced on the way back, before the gradients of other weights
    run = start(mixture, tiny_mixture("Qwen3-MoE"), lr=1e-2)
    with (
        mock.patch.object(GroupedExperts, "_why_slower", return_value="few" if few else None),
        mock.patch.object(fp8_experts, "pays", return_value=not few),
    ):
        learned(run, 1)


def written(folder: str) -> dict[str, torch.Tensor]:
    """All that the files of a checkpoint hold."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        found |= load_file(file)
    return found


def saved(run: HybridRun, name: str) -> str:
    """The folder of a checkpoint of the model and, inside it, of the optimizer."""
    folder = str(shared_folder(name))
    run.booster.save_model(run.model, folder, shard=True, use_safetensors=True)
    run.booster.save_optimizer(run.optimizer, f"{folder}/optimizer", shard=True)
    dist.barrier()
    return folder


def load(run: HybridRun, folder: str) -> HybridRun:
    """Load what `saved` wrote."""
    run.booster.load_model(run.model, folder)
    run.booster.load_optimizer(run.optimizer, f"{folder}/optimizer")
    return run


@ranks(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_holds_what_that_of_the_whole_model_does(family: str) -> None:
    run = boosted(family, 2)
    folder = saved(run, f"whole {family}")
    expected = {name: value.bfloat16() for name, value in tiny_mixture(family).state_dict().items()}
    found = written(folder)
    assert found.keys() == expected.keys()
    every = [each.numel() for file in Path(folder).glob("*.safetensors") for each in load_file(file).values()]
    # once, but for buffers; Colossal-AI's own blocks leave it to Colossal-AI
    if any(spread_of(parameter) is not None for parameter in run.model.parameters()):
        assert sum(every) < 1.01 * sum(value.numel() for value in expected.values())
    for name, value in expected.items():
        assert torch.equal(found[name].to(value.dtype), value), name


@ranks(2)
@pytest.mark.parametrize("arguments", [{}, IN_FP8], ids=["BF16", "FP8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_training_goes_on_from_a_checkpoint(family: str, arguments: dict[str, Any]) -> None:
    run = boosted(family, 2, **arguments)
    learned(run, 2)
    folder = saved(run, f"resumed {family} {len(arguments)}")
    expected = learned(run, 2)
    other = boosted(family, 2, **arguments)
    learned(other, 1)
    # the files hold 16-bit weights, whose rounding sends some tokens to other experts
    assert learned(load(other, folder), 2) == pytest.approx(expected, rel=2e-2 if arguments else 4e-3)


@ranks(4)
@pytest.mark.parametrize("sizes", [(4, 2), (2, 4), (2, 1)])
@pytest.mark.parametrize("family", FAMILIES)
def test_training_goes_on_with_another_number_of_ranks(family: str, sizes: tuple[int, int]) -> None:
    run, other = (boosted(family, ep_size) for ep_size in sizes)
    learned(run, 2)
    folder = saved(run, f"over others {family} {sizes}")
    expected = learned(run, 2)
    learned(other, 1)
    assert learned(load(other, folder), 2) == pytest.approx(expected, rel=4e-3)


@ranks(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_other_plugins_load_a_checkpoint(family: str) -> None:
    run = boosted(family, 2)
    learned(run, 1)
    folder = saved(run, f"crossing {family}")
    other = training.boost(training.ours(), tiny_mixture(family))
    other.booster.load_model(other.model, folder)
    values = dict(other.model.unwrap().named_parameters())
    for name, parameter in run.model.unwrap().named_parameters():
        spread, value = spread_of(parameter), values[name]
        own = value if spread is None or value.shape == parameter.shape else spread.own(value)
        assert torch.equal(own, parameter), name


@ranks(2)
def test_what_would_shard_the_rest_of_the_model_is_refused() -> None:
    from fp8booster.plugins.moe_hybrid_parallel import MoeHybridParallelPlugin

    for arguments, what in (
        ({"tp_size": 2, "pp_size": 1}, r"tensor parallelism \(tp_size above 1\)"),
        ({"tp_size": 1, "pp_size": 2, "num_microbatches": 2}, r"pipelines \(pp_size above 1\)"),
    ):
        refused = MoeHybridParallelPlugin(ep_size=1, precision="bf16", zero_stage=1, **arguments)
        with pytest.raises(ValueError, match=f"by its experts alone, without {what}"):
            start(refused, tiny_mixture("Qwen3-MoE"))


@ranks(2)
def test_a_mixture_whose_experts_cannot_be_spread_is_refused() -> None:
    says = "shards no Llama4ForCausalLM, with any transformers; use LowLevelZeroPlugin" if MAJOR > 4 else "Auto policy"
    with pytest.raises(ImportError if MAJOR > 4 else NotImplementedError, match=says):
        start(plugin(2), build("llama4_text"))


@pytest.mark.skipif(MAJOR < 5, reason="experts are modules, with adapters of their own")
@pytest.mark.parametrize(
    ("family", "tp_size", "ep_size"), [("Qwen3-MoE", 1, 1), ("Qwen3-MoE", 1, 2), ("Mixtral", 2, 1)]
)
@ranks(2)
def test_adapters_of_experts_in_one_parameter_are_refused_where_experts_are_divided(
    family: str, tp_size: int, ep_size: int
) -> None:
    from fp8booster.plugins.moe_hybrid_parallel import MoeHybridParallelPlugin

    peft = pytest.importorskip("peft")
    adapters = peft.LoraConfig(r=4, target_modules=[], target_parameters=["experts.gate_up_proj"])
    model = peft.get_peft_model(tiny_mixture(family), adapters)
    divided = MoeHybridParallelPlugin(tp_size, 1, ep_size, precision="bf16", zero_stage=1)
    if tp_size * ep_size == 1:
        assert learned(start(divided, model, lr=RATE), 1)
        return
    with pytest.raises(ValueError, match="hold those of all experts, which sharding divides; use ep_size=1"):
        start(divided, model)


@pytest.mark.parametrize("given", [{}, IN_FP8], ids=["bf16", "fp8"])
@ranks(2)
def test_adapters_are_added_before_experts_are_spread(given: dict[str, Any]) -> None:
    peft = pytest.importorskip("peft")
    of_experts = {"target_parameters": ["experts.gate_up_proj"]} if MAJOR > 4 else {}
    run = start(plugin(2, **given), tiny_mixture("Qwen3-MoE"))
    adapters = peft.LoraConfig(r=4, target_modules=[] if of_experts else "all-linear", **of_experts)
    with pytest.raises(ValueError, match="experts that are spread over ranks; add them before the plugin boosts"):
        peft.get_peft_model(run.model.unwrap(), adapters)


@pytest.mark.parametrize("ep_size", [1, 2])
@ranks(2)
def test_adapters_are_saved_and_loaded(ep_size: int) -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> HybridRun:
        targets = ["q_proj"] if MAJOR > 4 else ["q_proj", "up_proj"]  # of experts too, where they are modules
        config = peft.LoraConfig(r=16, target_modules=targets, init_lora_weights=False)
        return start(plugin(ep_size, **IN_FP8), peft.get_peft_model(tiny_mixture("Qwen3-MoE"), config), lr=RATE)

    run = adapted()
    learned(run, 1)
    folder = saved(run, f"adapted {ep_size}")
    run.booster.save_lora_as_pretrained(run.model, f"{folder}/adapters", use_safetensors=True)
    dist.barrier()
    expected = learned(run, 2)
    other = adapted()
    learned(other, 1)
    assert learned(load(other, folder), 2) == pytest.approx(expected, rel=2e-2)
    values, files = (
        dict(peft.PeftModel.from_pretrained(tiny_mixture("Qwen3-MoE"), f"{folder}/adapters").named_parameters()),
        written(folder),
    )
    of_adapters = {name.removeprefix("base_model.model."): each for name, each in values.items() if "lora_" in name}
    assert of_adapters
    for name, value in of_adapters.items():
        assert torch.equal(files[name].to(value), value), name


@pytest.mark.parametrize("family", FAMILIES)
@ranks(2)
def test_a_part_is_not_saved_for_the_whole(family: str) -> None:
    model = boosted(family, 2, **IN_FP8).model
    folder = str(shared_folder(f"parts {family}"))
    with pytest.raises(ValueError, match=r"a part of the model \(ep_size=2\).*call booster\.save_model"):
        model.unwrap().save_pretrained(folder)
    if any(spread_of(parameter) is not None for parameter in model.parameters()):
        with pytest.raises(TypeError, match=r"cannot be pickled.*call booster\.save_model"):
            torch.save(model.unwrap(), f"{folder}/model.pt")
    whole = tiny_mixture(family).state_dict()
    if dist.get_rank() == 0:
        model.unwrap().save_pretrained(folder, state_dict=whole)
        assert written(folder)  # by names of its own, in transformers 5


@pytest.mark.parametrize("family", FAMILIES)
@ranks(2)
def test_experts_that_one_rank_has_all_of_are_saved_as_others(family: str) -> None:
    model = boosted(family, 1, **IN_FP8).model
    folder = shared_folder(f"one part {family}")
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), folder / "model.pt")
        model.unwrap().save_pretrained(str(folder))
        assert written(str(folder))


@pytest.mark.parametrize("family", FAMILIES)
@ranks(2)
def test_ranks_generate_until_the_last_one_has_ended(family: str) -> None:
    run = boosted(family, 2, **IN_FP8)
    network = run.model.eval().unwrap()
    network.generation_config.eos_token_id = None
    tokens, length = batch_of(dist.get_rank())[:1, :4], 2 + 4 * dist.get_rank()
    asked = {"attention_mask": torch.ones_like(tokens), "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        made = network.generate(tokens, max_new_tokens=length, **asked)
    assert made.shape == (1, 4 + length)
    run.model.train()
    learned(run, 1)


@ranks(2)
@pytest.mark.parametrize(
    ("sizes", "says"), [({"ep_size": 3}, "dp_size should be divisible by ep_size"), ({"tp_size": 4}, "tp_size 4")]
)
def test_sizes_that_do_not_divide_the_ranks_are_told(sizes: dict[str, int], says: str) -> None:
    from fp8booster.plugins import MoeHybridParallelPlugin

    whole = {"tp_size": 1, "pp_size": 1, "ep_size": 1, "zero_stage": 1, "precision": "bf16"}
    with pytest.raises(ValueError, match=f"on 2 ranks, .*{says}.* give others"):
        MoeHybridParallelPlugin(**{**whole, **sizes}, use_fp8=True)
