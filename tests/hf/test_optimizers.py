"""Optimizers that users bring: they train FP8 weights that are never stale, evaluate, save and resume."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from transformers import Trainer, TrainingArguments, set_seed
from transformers.optimization import Adafactor

from fp8booster import data_parallel, forget_weights, fully_shard, optim
from fp8booster.hf import prepare
from fp8booster.nn.weights.freshness import note_change
from tests.colossal.models import tiny_llama
from tests.distributed import ranks, shared_folder
from tests.hf.test_fsdp import shard_on_cpus
from tests.hf.ways import (
    ALWAYS,
    EVALUATED,
    RATE,
    SAVED,
    TRAINED,
    Run,
    arguments,
    batches,
    callbacks,
    evaluate,
    of_rank,
    run_trainer,
)


class Written(torch.optim.Optimizer):
    """Writes through `.data`, as many do, or puts another tensor in its place."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, replaces: bool = False) -> None:
        super().__init__(params, {"lr": lr, "replaces": replaces})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if group["replaces"]:
                    parameter.data = parameter.data - group["lr"] * parameter.grad.data
                else:
                    parameter.data.add_(parameter.grad.data, alpha=-group["lr"])


class Own:
    """No optimizer of torch: states by the ids of parameters, writes through `.data`."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        self.params, self.lr, self.moments = list(params), lr, dict[int, torch.Tensor]()

    def step(self) -> None:
        for each in self.params:
            moment = self.moments.setdefault(id(each), torch.zeros_like(each.data))
            each.data.add_(moment.mul_(0.9).add_(each.grad.data), alpha=-self.lr)

    def zero_grad(self) -> None:
        for each in self.params:
            each.grad = None

    def state_dict(self) -> dict[int, torch.Tensor]:
        return {number: self.moments[id(each)] for number, each in enumerate(self.params)}

    def load_state_dict(self, state: dict[int, torch.Tensor]) -> None:
        self.moments = {id(each): state[number].clone() for number, each in enumerate(self.params)}


class Swapping(torch.optim.SGD):
    """As schedule-free ones: the model has an average while it is evaluated, written through `.data`."""

    def train(self) -> None:
        for parameter, state in self.state.items():
            parameter.data.copy_(state["kept"])

    def eval(self) -> None:
        for parameter, state in self.state.items():
            state["kept"] = parameter.detach().clone()
            parameter.data.mul_(0.5)


Make = Callable[[list[nn.Parameter], float], Any]


def of_colossal(name: str) -> Make:
    def make(params: list[nn.Parameter], lr: float) -> Any:
        import fp8booster.colossal  # noqa: F401  isort: skip  (patches colossalai before it is imported)
        from colossalai.nn import optimizer

        return getattr(optimizer, name)(params, lr=0.1 * lr)

    return make


def adam_of_bitsandbytes(params: list[nn.Parameter], lr: float) -> Any:
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(params, lr=lr, min_8bit_size=1)


MATRICES = {
    "AdamW": lambda params, lr: torch.optim.AdamW(params, lr=lr, fused=True),
    "SGD": lambda params, lr: torch.optim.SGD(params, lr=10 * lr, momentum=0.9),
    "8-bit moments": lambda params, lr: optim.AdamW(params, lr=lr),
    "written": lambda params, lr: Written(params, 30 * lr),
}
"""Those that train DTensors too."""

if hasattr(torch.optim, "Muon"):
    MATRICES["Muon"] = lambda params, lr: torch.optim.Muon([each for each in params if each.dim() == 2], lr=lr)

OPTIMIZERS: dict[str, Make] = MATRICES | {
    "Adafactor": lambda params, lr: Adafactor(params, lr=lr, scale_parameter=False, relative_step=False),
    "CAME": of_colossal("CAME"),
    "Lamb": of_colossal("Lamb"),
    "replaced": lambda params, lr: Written(params, 30 * lr, replaces=True),
    "own": lambda params, lr: Own(params, 10 * lr),
    "swapping": lambda params, lr: Swapping(params, lr=30 * lr),
}

if importlib.util.find_spec("bitsandbytes") is not None:
    OPTIMIZERS["bitsandbytes"] = adam_of_bitsandbytes


@contextmanager
def evaluating(optimizer: Any) -> Iterator[None]:
    """Let an optimizer that has modes be in that of evaluation."""
    if hasattr(optimizer, "eval"):
        optimizer.eval()
    yield
    if hasattr(optimizer, "train"):
        optimizer.train()


def train(model: nn.Module, name: str, data: Iterable[Any], file: Path | None = None, forget: bool = False) -> Any:
    """Return the losses, and those of evaluations after the second and the last step.

    Args:
        model: in FP8.
        name: of the optimizer.
        data: numbers of steps, and batches; where they begin after the first, model and optimizer are loaded.
        file: of the checkpoint.
        forget: cast FP8 weights anew at each forward.
    """
    optimizer = OPTIMIZERS[name](list(model.parameters()), RATE)
    losses: list[float] = []
    evaluations = []
    sharded = hasattr(model, "unshard")
    if forget:
        model.register_forward_pre_hook(lambda *_: forget_weights(model))
    model.train()
    for step, batch in data:
        if file is not None and step == SAVED + 1 and not losses:
            saved = torch.load(file, weights_only=False)
            if sharded:
                set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
            else:
                model.load_state_dict(saved["model"])
                optimizer.load_state_dict(saved["optimizer"])
        with torch.autocast("cpu", torch.bfloat16, enabled=not sharded):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if file is not None and step == SAVED:
            states = get_state_dict(model, optimizer) if sharded else (model.state_dict(), optimizer.state_dict())
            torch.save(dict(zip(("model", "optimizer"), states, strict=True)), file)
        if step == 2:
            with evaluating(optimizer):
                evaluations.append(evaluate(model))
    with evaluating(optimizer):
        evaluations.append(evaluate(model))
    return losses, evaluations


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_trains_weights_that_are_never_stale(name: str, tmp_path: Path) -> None:
    data = list(enumerate(batches(TRAINED), 1))
    losses, evaluations = train(prepare(tiny_llama(), ALWAYS), name, data, tmp_path / "saved.pt")
    assert evaluations[-1] < losses[0]
    assert (losses, evaluations) == train(prepare(tiny_llama(), ALWAYS), name, data, forget=True)
    resumed = train(prepare(tiny_llama(), ALWAYS), name, data[SAVED:], tmp_path / "saved.pt")
    assert resumed == (losses[SAVED:], evaluations[1:])


@ranks(2)
@pytest.mark.parametrize("name", MATRICES)
def test_an_optimizer_of_torch_trains_what_fsdp2_shards(name: str) -> None:
    data = list(of_rank(0))
    file = shared_folder(name) / f"rank-{dist.get_rank()}.pt"
    losses, evaluations = train(fully_shard(tiny_llama(), ALWAYS), name, data, file)
    assert evaluations[-1] < losses[0]
    assert (losses, evaluations) == train(fully_shard(tiny_llama(), ALWAYS), name, data, forget=True)
    resumed = train(fully_shard(tiny_llama(), ALWAYS), name, data[SAVED:], file)
    assert resumed == (losses[SAVED:], evaluations[1:])


@ranks(2)
@pytest.mark.parametrize("name", ["8-bit moments", "Adafactor", "own", "replaced", "swapping"])
def test_an_optimizer_trains_what_ddp_wraps(name: str) -> None:
    data = list(of_rank(0))
    losses, evaluations = train(data_parallel(tiny_llama(), ALWAYS), name, data)
    assert evaluations[-1] < losses[0]
    assert (losses, evaluations) == train(data_parallel(tiny_llama(), ALWAYS), name, data, forget=True)


OF_TRAINER: dict[str, dict[str, Any]] = {
    "adafactor": {"optim": "adafactor"},
    "adamw_torch_fused": {"optim": "adamw_torch_fused"},
    "8-bit moments": {"optimizer_cls_and_kwargs": (optim.AdamW, {"lr": RATE})},
}


def train_by_trainer(name: str, folder: Path, *, forget: bool = False, resume: bool = False) -> Run:
    AcceleratorState._reset_state(reset_partial_state=True)
    set_seed(0)
    options = dict(OF_TRAINER[name])
    named = {"optim": options.pop("optim")} if "optim" in options else {}
    model = tiny_llama()
    if forget:
        model.register_forward_pre_hook(lambda *_: note_change([]))
    made = Trainer(
        model,
        arguments(TrainingArguments, folder, **named),
        train_dataset=TRAINED,
        eval_dataset=EVALUATED,
        callbacks=callbacks(ALWAYS),
        **options,
    )
    return run_trainer(made, folder, resume)


def check_trainer(name: str, folder: Path) -> None:
    first = train_by_trainer(name, folder)
    assert first.evaluation < first.losses[0]
    recast = train_by_trainer(name, folder / "recast", forget=True)
    assert (first.losses, first.evaluation) == (recast.losses, recast.evaluation)
    resumed = train_by_trainer(name, folder, resume=True)
    assert (first.losses[SAVED:], first.evaluation) == (resumed.losses, resumed.evaluation)


@pytest.mark.parametrize("name", OF_TRAINER)
def test_an_optimizer_of_the_trainer_trains_weights_that_are_never_stale(name: str, tmp_path: Path) -> None:
    check_trainer(name, tmp_path)


@ranks(2)
@pytest.mark.parametrize("name", ["adamw_torch_fused", "8-bit moments"])
def test_an_optimizer_of_the_trainer_trains_what_fsdp2_shards(name: str) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        shard_on_cpus(monkeypatch)
        check_trainer(name, shared_folder(name))
