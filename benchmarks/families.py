"""Every family of transformers' models that is fused: what of it is converted and fused, its loss, and its speed.

    python -m benchmarks.families --out results --json results/families.json
    python -m benchmarks.families --family "GPT-NeoX" --family gpt-oss --steps 0 --gpu-layers 4 --profile
    python -m benchmarks.families --family Qwen3-MoE --steps 0 --gpu-layers 48 --precision fp8 --update-in-backward

On the CPU small models of each family train as transformers writes them, in BF16, which is what plugins run without
`use_fp8`, and converted and fused. With a GPU a few layers of published size are timed too: forward, backward and plain
SGD, which keeps no states, so that all fit.
Run it with each version of transformers; a family that the installed one does not have is a row with that reason.
"""

from __future__ import annotations

import gc
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import transformers
import typer
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from benchmarks.harness import command, environment
from benchmarks.harness.environment import gpu_of
from benchmarks.harness.results import Column, Record, Result, Table, spread
from benchmarks.harness.statistics import Samples
from benchmarks.training.built_engine import OPTIMIZER_RANGE, STEP_RANGE
from benchmarks.training.trace import breakdown, profile_tables
from fp8booster import FP8Config, convert_to_fp8, fuse, report
from fp8booster.cli.train.key_values import fp8_config
from fp8booster.nn.fused.decoder import unfused_parts
from fp8booster.nn.fused.families import FAMILIES, is_attention
from fp8booster.nn.graphs import captured_layers

_EXPERTS_OF_DEEPSEEK = {"v_head_dim": 128, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "kv_lora_rank": 512}


def _sizes(hidden: int, features: int, heads: int, key_heads: int, vocabulary: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": features,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "vocab_size": vocabulary,
    } | more


PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LLaMA 3 8B", _sizes(4096, 14336, 32, 8, 128256)),
    "llama4_text": (
        "LLaMA 4 Scout",
        _sizes(5120, 8192, 40, 8, 202048, intermediate_size_mlp=16384, head_dim=128, num_local_experts=16),
    ),
    "mistral": ("Mistral 7B", _sizes(4096, 14336, 32, 8, 32768)),
    "mixtral": ("Mixtral 8x7B", _sizes(4096, 14336, 32, 8, 32000, num_local_experts=8)),
    "qwen2": ("Qwen2.5 7B", _sizes(3584, 18944, 28, 4, 152064)),
    "qwen3": ("Qwen3 8B", _sizes(4096, 12288, 32, 8, 151936, head_dim=128)),
    "qwen3_moe": (
        "Qwen3 30B-A3B",
        _sizes(
            2048, 6144, 32, 4, 151936, head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768
        ),
    ),
    "gemma2": ("Gemma 2 9B", _sizes(3584, 14336, 16, 8, 256000, head_dim=256)),
    "gemma3_text": ("Gemma 3 12B", _sizes(3840, 15360, 16, 8, 262208, head_dim=256)),
    "phi3": ("Phi-4", _sizes(5120, 17920, 40, 10, 100352)),
    "cohere": ("Command-R", _sizes(8192, 22528, 64, 64, 256000)),
    "cohere2": ("Command-R7B", _sizes(4096, 14336, 32, 8, 256000)),
    "olmo2": ("OLMo 2 7B", _sizes(4096, 11008, 32, 32, 100352)),
    "granite": ("Granite 3 8B", _sizes(4096, 12800, 32, 8, 49155)),
    "glm4": ("GLM-4 9B", _sizes(4096, 13696, 32, 2, 151552, head_dim=128)),
    "stablelm": ("StableLM 3B", _sizes(2560, 6912, 32, 32, 50304)),
    "gpt_neox": ("GPT-NeoX 20B", _sizes(6144, 24576, 64, 64, 50432)),
    "gpt2": ("GPT-2 XL", _sizes(1600, 6400, 25, 25, 50257, n_inner=6400)),
    "deepseek_v2": (
        "DeepSeek V2 Lite",
        _sizes(
            2048,
            10944,
            16,
            16,
            102400,
            q_lora_rank=None,
            n_routed_experts=64,
            n_shared_experts=2,
            num_experts_per_tok=6,
            moe_intermediate_size=1408,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            topk_method="greedy",
            **_EXPERTS_OF_DEEPSEEK,
        ),
    ),
    "deepseek_v3": (
        "DeepSeek V3",
        _sizes(
            7168,
            18432,
            128,
            128,
            129280,
            q_lora_rank=1536,
            n_routed_experts=256,
            n_shared_experts=1,
            num_experts_per_tok=8,
            moe_intermediate_size=2048,
            n_group=8,
            topk_group=4,
            first_k_dense_replace=3,
            **_EXPERTS_OF_DEEPSEEK,
        ),
    ),
    "gpt_oss": (
        "gpt-oss 20B",
        _sizes(2880, 2880, 64, 8, 201088, head_dim=64, num_local_experts=32, num_experts_per_tok=4),
    ),
}
"""A model of each family, by transformers' type of model: its name, and its sizes but for the layers."""

SMALL = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "intermediate_size_mlp": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "head_dim": 32,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "n_inner": 256,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "v_head_dim": 32,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
}
"""What takes the place of a published size in the models of the CPU."""

LAYERS, ROWS, TOKENS, RATE = 2, 8, 64, 2e-3
"""Of the models of the CPU, and of their training."""

WARM_UP, RATE_OF_SGD = 5, 1e-4
"""Of the steps that are timed on a GPU."""

MOST_APART = 0.04
"""Of the fall of BF16's loss: how far that of FP8 may be from it to follow it."""


def sizes_of(family: str, *, small: bool) -> dict[str, Any]:
    """The sizes of a model, but for its layers."""
    sizes = PUBLISHED[family][1]
    if small:
        sizes = {name: SMALL[name] if name in SMALL and sizes[name] is not None else sizes[name] for name in sizes}
        if family.startswith("deepseek"):  # which have a head of keys for each of queries
            sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    return sizes


def model_of(
    family: str, layers: int, positions: int, device: torch.device, *, small: bool, seed: int = 0
) -> nn.Module:
    """A model in BF16 as transformers writes it, in training mode; the same at every call with a seed."""
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if family == "gpt2" else {}
    config = CONFIG_MAPPING[family](
        **sizes_of(family, small=small),
        **tokens,
        **no_dropout,
        num_hidden_layers=layers,
        max_position_embeddings=positions,
        use_cache=False,
    )
    torch.manual_seed(seed)
    with torch.device(device), _dtype(torch.bfloat16):
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
        for name, weight in model.named_parameters():
            # some versions leave the memory of routers and experts, which are no linear layers, as it was
            if weight.dim() == 3 or name.endswith(("gate.weight", "router.weight", "sinks")):
                nn.init.normal_(weight, std=0.02)
    return model.train()


@contextmanager
def _dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class LinearProducts(TorchDispatchMode):
    """Operations of the products in a forward, but those of attention with itself, by whether they are in FP8."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.operations = {"FP8": 0, "16 bits": 0}
        self._attends = 0
        self._hooks = [
            hook
            for module in model.modules()
            if is_attention(module)
            for hook in (module.register_forward_pre_hook(self._enter), module.register_forward_hook(self._leave))
        ]

    def _enter(self, *_: Any) -> None:
        self._attends += 1

    def _leave(self, *_: Any) -> None:
        self._attends -= 1

    def __exit__(self, *error: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "_scaled_mm", "_grouped_mm") or (name in ("bmm", "baddbmm") and not self._attends):
            inner = args[1 if name in ("addmm", "baddbmm") else 0].shape[-1]
            self.operations["FP8" if name == "_scaled_mm" else "16 bits"] += 2 * made.numel() * inner
        return made

    @property
    def share(self) -> float:
        """The share of the operations in FP8, from 0 to 1."""
        return self.operations["FP8"] / sum(self.operations.values())


def batches(vocabulary: int, steps: int, seed: int = 0) -> Iterator[torch.Tensor]:
    """Token ids [ROWS, TOKENS], in which each token has one of four that follow it; the same for each seed."""
    generator = torch.Generator().manual_seed(1 + seed)
    followers = torch.randint(3, vocabulary, (vocabulary, 4), generator=generator)
    for _ in range(steps):
        ids = torch.randint(3, vocabulary, (ROWS, TOKENS), generator=generator)
        choices = torch.randint(4, (ROWS, TOKENS), generator=generator)
        for place in range(1, TOKENS):
            ids[:, place] = followers[ids[:, place - 1], choices[:, place]]
        yield ids


def losses_of(model: nn.Module, steps: int, seed: int) -> list[float]:
    """Return the losses of training on new tokens at each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    losses = []
    for ids in batches(SMALL["vocab_size"], steps, seed):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def small_model(family: str, seed: int = 0, *, fp8: bool) -> nn.Module:
    """A model of the CPU, as transformers writes it or converted and fused."""
    model = model_of(family, LAYERS, TOKENS, torch.device("cpu"), small=True, seed=seed)
    if fp8:
        fuse(convert_to_fp8(model))
    return model


def small_record(family: str, steps: int, seeds: int) -> Record:
    """Record what is converted and fused of a small model, and its losses in BF16 and in FP8."""
    model = small_model(family, fp8=True)
    with torch.no_grad(), LinearProducts(model.eval()) as products:
        model(input_ids=next(batches(SMALL["vocab_size"], 1)))
    found = report(model)
    record: Record = {
        "converted": len(found.fp8),
        "layers": len(found.rows),
        "outside": len(found.outside),
        "outside_in_fp8": sum(row.precision == "FP8" for row in found.outside),
        "unfused": dict(unfused_parts(model)),
        "share": products.share,
    }
    if steps:
        last = slice(-max(1, steps // 5), None)
        losses = {
            fp8: np.array([losses_of(small_model(family, seed, fp8=fp8), steps, seed) for seed in range(seeds)])
            for fp8 in (False, True)
        }
        begin, right, ends = losses[False][:, 0], *(each[:, last].mean(1) for each in losses.values())
        apart = (ends - right) / (begin - right)
        record |= {"begin": begin.mean(), "bf16": right.mean(), "fp8": ends.mean()}
        record |= {"apart": apart.mean(), "apart_of_seeds": apart.tolist()}
    return record


@dataclass(frozen=True)
class Steps:
    """How steps of a model of published size are timed."""

    layers: int
    rows: int
    tokens: int
    rounds: int
    """Steps that count, after `WARM_UP` that do not."""
    config: FP8Config = field(default_factory=FP8Config)
    in_backward: bool = False
    """SGD updates each weight when backward has its gradient, and frees that."""
    profiled: bool = False
    """Profile one more step."""

    def timed(self, family: str, device: torch.device, *, fp8: bool) -> Record:
        """Milliseconds of steps, the host's of them, and what memory they take."""
        model = model_of(family, self.layers, self.tokens, device, small=False)
        if fp8:
            convert_to_fp8(model, self.config)
            fuse(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE_OF_SGD, fused=True)
        if self.in_backward:
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(_update)
        seed = torch.Generator(device).manual_seed(1)
        ids = torch.randint(3, 32000, (self.rows, self.tokens), device=device, generator=seed)

        def step() -> None:
            model(input_ids=ids, labels=ids).loss.backward()
            with record_function(OPTIMIZER_RANGE):
                optimizer.step()
                optimizer.zero_grad()

        times, host = [], []
        for number in range(WARM_UP + self.rounds):
            if number == WARM_UP:
                torch.cuda.reset_peak_memory_stats(device)
                allocated = torch.cuda.memory_stats(device)["num_device_alloc"]
            torch.cuda.synchronize(device)
            begin = time.perf_counter()
            step()
            host.append(1e3 * (time.perf_counter() - begin))
            torch.cuda.synchronize(device)
            times.append(1e3 * (time.perf_counter() - begin))
        samples, found = Samples.of(times[WARM_UP:]), torch.cuda.memory_stats(device)
        return {
            "median": samples.median,
            "p10": samples.low,
            "p90": samples.high,
            "host": median(host[WARM_UP:]),
            "peak": found["allocated_bytes.all.peak"] / 2**30,
            "reserved": found["reserved_bytes.all.peak"] / 2**30,
            "allocations": found["num_device_alloc"] - allocated,
            "graphs": {str(why): count for why, count in captured_layers(model).items()},
            "profile": _profile(step, device) if self.profiled else None,
        }


def _profile(step: Callable[[], None], device: torch.device) -> Record:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler, record_function(STEP_RANGE):
        step()
        torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json.gz")
        profiler.export_chrome_trace(str(trace))
        return breakdown(trace)


@torch.no_grad()
def _update(parameter: torch.Tensor) -> None:
    if parameter.grad is not None:
        parameter.add_(parameter.grad, alpha=-RATE_OF_SGD)
        parameter.grad = None


def timed(family: str, steps: Steps, device: torch.device, precisions: Iterable[str] = ("bf16", "fp8")) -> Record:
    """Milliseconds of a step in BF16 and in FP8; or why there are none."""
    record: Record = {}
    for precision in precisions:
        name = f"{precision}_ms"
        try:
            record[name] = steps.timed(family, device, fp8=precision == "fp8")
        except torch.cuda.OutOfMemoryError:
            record[f"{name}_failed"] = "out of memory"
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            record[f"{name}_failed"] = str(error).splitlines()[0]
        gc.collect()
        torch.cuda.empty_cache()
    return record


def show_converted(record: Record) -> str:
    """Show the number of linear layers in FP8, and of other weights of products in FP8."""
    of_all, others = f"{record['converted']} of {record['layers']}", record["outside"]
    return of_all + (f"; {record['outside_in_fp8']} of {others} weights of routers and experts" if others else "")


def show_unfused(record: Record) -> str:
    """Name what is not fused of a model."""
    left = [f"{count} not: {part}" for part, count in record["unfused"].items()]
    return "; ".join(left) or "all parts"


def show_loss(record: Record) -> str:
    """Tell whether FP8's loss follows that of BF16, and by how much it differs."""
    if "apart" not in record:
        return "left out (--steps 0)"
    verdict = "yes" if abs(record["apart"]) <= MOST_APART else "no"
    seeds = record["apart_of_seeds"]
    error = f" ± {100 * np.std(seeds, ddof=1) / math.sqrt(len(seeds)):.1f}" if len(seeds) > 1 else ""
    return (
        f"{verdict}, {100 * record['apart']:+.1f}{error} % "
        f"({record['begin']:.2f} to {record['bf16']:.3f}; {record['fp8']:.3f})"
    )


def show_ms(record: Record, name: str) -> str:
    """Milliseconds of a step, or why there are none."""
    if name in record:
        return spread(record[name], 1)
    return record.get(f"{name}_failed", record.get("why_no_time", ""))


def show_memory(record: Record, name: str) -> str:
    """What a step takes of the host's time, and of the GPU's memory."""
    if "peak" not in record.get(name, {}):  # no time, or of a result from before these were recorded
        return show_ms(record, name) if name not in record else "not recorded"
    of = record[name]
    again = f", {of['allocations']} times from the device" if of["allocations"] else ""
    return f"{of['host']:.1f} ms; {of['peak']:.1f}, {of['reserved']:.1f} GiB{again}"


def show_graphs(record: Record) -> str:
    """The layers that were replayed as CUDA graphs, and why others were not."""
    graphs = record.get("fp8_ms", {}).get("graphs")
    if not graphs:
        return "none"
    return "; ".join(f"{count} {'replayed' if why == 'None' else 'not: ' + why}" for why, count in graphs.items())


def show_speedup(record: Record) -> str:
    """BF16's time over FP8's."""
    if "bf16_ms" in record and "fp8_ms" in record:
        return f"{record['bf16_ms']['median'] / record['fp8_ms']['median']:.2f}"
    return record.get("why_no_time", "no time of one of them")


def show(what: Any) -> Any:
    """Show a column's value of a record, or the reason why the family has none."""
    return lambda record: record["absent"] if "absent" in record else what(record)


COLUMNS = (
    Column("family", lambda r: r["family"]),
    Column("linear layers converted", show(show_converted)),
    Column("fused", show(show_unfused)),
    Column("linear FLOPs in FP8", show(lambda r: f"{100 * r['share']:.0f} %")),
    Column("loss follows BF16 (BF16's first, and last; FP8's last)", show(show_loss)),
    Column("published size", lambda r: r["model"]),
    Column("BF16, ms", show(lambda r: show_ms(r, "bf16_ms"))),
    Column("FP8, ms", show(lambda r: show_ms(r, "fp8_ms"))),
    Column("speedup", show(show_speedup)),
    Column("BF16: host; GPU memory in use, reserved", show(lambda r: show_memory(r, "bf16_ms"))),
    Column("FP8: host; GPU memory in use, reserved", show(lambda r: show_memory(r, "fp8_ms"))),
    Column("FP8: layers as CUDA graphs", show(show_graphs)),
)
PRECISIONS = ("bf16", "fp8")
ALL: list[str] = []
OTHERS: list[Path] = []


def main(
    family: Annotated[list[str], typer.Option(help="As the table calls it; repeat the option (default: all).")] = ALL,
    steps: Annotated[int, typer.Option(min=0, help="Of the small models on the CPU; 0 leaves training out.")] = 50,
    seeds: Annotated[int, typer.Option(min=1, help="Initial weights and tokens of the small models.")] = 4,
    gpu_layers: Annotated[int, typer.Option(min=0, help="Of the models timed on a GPU; 0 leaves them out.")] = 4,
    rows: Annotated[int, typer.Option(help="Sequences of a step on the GPU.")] = 2,
    tokens: Annotated[int, typer.Option(help="Of each of them.")] = 4096,
    rounds: Annotated[int, typer.Option(min=1, help="Steps that are timed, after 5 that are not.")] = 15,
    precision: Annotated[list[str], typer.Option(help="bf16, fp8 (default: both); of the timed steps.")] = ALL,
    fp8_option: Annotated[list[str], typer.Option(help="key=value for FP8Config of the timed; repeat it.")] = ALL,
    profiled: Annotated[bool, typer.Option("--profile", help="Profile a step of the timed, part by part.")] = False,
    update_in_backward: Annotated[
        bool, typer.Option("--update-in-backward", help="Update and free each gradient in backward; of the timed.")
    ] = False,
    times: Annotated[
        list[Path], typer.Option(help="Show the times of another run, of this JSON, on a GPU; repeat the option.")
    ] = OTHERS,
    folder: command.Folder = None,
    json_file: command.JsonFile = None,
    commit: command.Commit = None,
) -> None:
    """Convert, fuse and train a model of each family, and time one of published size where there is a GPU."""
    labels = {each: FAMILIES[each.removesuffix("_text")] for each in PUBLISHED}
    unknown = set(family) - set(labels.values())
    if unknown:
        command.refuse(f"unknown families: {', '.join(sorted(unknown))}; there are {', '.join(labels.values())}")
    if wrong := set(precision) - set(PRECISIONS):
        command.refuse(f"--precision is {', '.join(sorted(wrong))}; use {' or '.join(PRECISIONS)}")
    try:
        config = fp8_config(tuple(fp8_option))
    except (TypeError, ValueError) as error:
        command.refuse(str(error))
    timing = Steps(gpu_layers, rows, tokens, rounds, config, update_in_backward, profiled)
    others = [json.loads(file.read_text()) for file in times]
    times_of = {each["family"]: each for other in others for each in other["tables"]["families"]}
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")
    head = environment.head(gpu_of(device), commit=commit) | {
        "transformers": transformers.__version__,
        "small models": f"{LAYERS} layers, hidden size {SMALL['hidden_size']}, {ROWS} x {TOKENS} tokens",
        "their training": f"{steps} steps, {seeds} seeds",
        "published sizes": f"{gpu_layers} layers, {rows} x {tokens} tokens, BF16 as transformers writes it; "
        f"{'SGD in backward' if update_in_backward else 'fused SGD'}, FP8Config({', '.join(fp8_option)})",
    }
    if others:
        lines = ("GPU", "torch", "transformers", "date", "commit", "command")
        head["times of"] = "; ".join(", ".join(other["head"][line] for line in lines) for other in others)
    records: list[Record] = []
    for each in command.progress([each for each in PUBLISHED if not family or labels[each] in family]):
        record: Record = {"family": labels[each], "model": PUBLISHED[each][0]}
        if each not in CONFIG_MAPPING:
            record["absent"] = f"not in transformers {transformers.__version__}"
        else:
            record |= small_record(each, steps, seeds)
            if record["family"] in times_of:
                record |= {key: value for key, value in times_of[record["family"]].items() if "_ms" in key}
            elif has_gpu and gpu_layers:
                record |= timed(each, timing, device, precision or PRECISIONS)
            else:
                record["why_no_time"] = "left out (--gpu-layers 0)" if has_gpu else "no GPU"
        records.append(record)
        result_of(records, head).write(folder=folder, json_file=json_file)  # what there is, should a later one fail
    command.deliver(result_of(records, head), folder=folder, json_file=json_file)


def result_of(records: list[Record], head: dict[str, str]) -> Result:
    """The table of some families."""
    note = (
        "Operations are those of a forward's products but attention's with itself, the vocabulary head's included. "
        "A loss is the mean of the last fifth of the steps. FP8's follows BF16's where it is at most "
        f"{100 * MOST_APART:.0f} % of the fall of BF16's away from it in the mean over seeds, of which the standard "
        "error is given."
    )
    failed = [record["family"] for record in records if not math.isfinite(record.get("apart", 0.0))]
    profiles = {
        f"{record['family']}, {label}": found
        for record in records
        for name, label in (("bf16_ms", "BF16"), ("fp8_ms", "FP8"))
        if (found := record.get(name, {}).get("profile"))
    }
    return Result(
        "families",
        f"Families of transformers {head['transformers']}",
        head,
        [Table("families", "Families", COLUMNS, records, note), *profile_tables(profiles)],
        dict.fromkeys(failed, "its loss is not finite"),
    )


if __name__ == "__main__":
    command.run_command(main)
