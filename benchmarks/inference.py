"""Time prefill and decode of a model of transformers, in BF16 and in FP8, and measure its memory.

    python -m benchmarks.inference --model 7b --out results --json results/inference.json
    python -m benchmarks.inference --model llama3-8b --prefill 1x2048 --batch 1 --batch 64 --compile

Weights and tokens are random. All models are on the GPU at once, and a call of each makes a round.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Annotated, Any

import torch
import typer
from torch import nn
from transformers import DynamicCache, StaticCache

from benchmarks.harness import command, environment
from benchmarks.harness.results import Column, Record, Result, Table, spread
from benchmarks.harness.timing import Timing, Variant, time_interleaved
from fp8booster import FP8Config, fuse, quantize
from fp8booster.serving.key_value_cache import FP8Cache
from fp8booster.training.models import MODELS, build

PREFILLS = ["1x2048", "8x2048"]
BATCHES = [1, 16, 64]
BASELINE = "bf16"


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to run the model."""

    label: str
    prepare: Callable[[nn.Module, torch.Tensor], object]
    """Changes a copy of the model in place; it may run it on token ids, [batch, sequence]."""
    needs: str | None = None
    """A package."""
    cache: Callable[[], Any] = DynamicCache
    """Keeps keys and values where the cache grows."""
    same_model_as: str | None = None


def _ours(config: FP8Config, *, calibrated: bool = False, fused: bool = False) -> Callable[..., None]:
    def prepare(model: nn.Module, tokens: torch.Tensor) -> None:
        quantize(model, config, batches=[tokens] if calibrated else None)
        if fused:
            fuse(model)

    return prepare


def _torchao(granularity: str) -> Callable[..., None]:
    def prepare(model: nn.Module, tokens: torch.Tensor) -> None:
        from torchao import quantization

        config = quantization.Float8DynamicActivationFloat8WeightConfig(
            granularity=getattr(quantization, granularity)()
        )
        quantization.quantize_(model, config, filter_fn=_but_the_head)

    return prepare


def _but_the_head(module: nn.Module, name: str) -> bool:
    """The layers that fp8booster quantizes too."""
    return isinstance(module, nn.Linear) and "lm_head" not in name


WAYS = {
    BASELINE: Way(label="BF16", prepare=lambda model, tokens: None),
    "bf16-fused": Way(label="BF16, fused blocks", prepare=lambda model, tokens: fuse(model)),
    "torchao": Way(label="torchao, tensorwise", prepare=_torchao("PerTensor"), needs="torchao"),
    "torchao-rowwise": Way(label="torchao, rowwise", prepare=_torchao("PerRow"), needs="torchao"),
    "tensorwise": Way(label="fp8booster, tensorwise", prepare=_ours(FP8Config())),
    "fp8-cache": Way(
        label="fp8booster, tensorwise, FP8 keys and values",
        prepare=_ours(FP8Config()),
        cache=FP8Cache,
        same_model_as="tensorwise",
    ),
    "fused": Way(label="fp8booster, tensorwise, fused blocks", prepare=_ours(FP8Config(), fused=True)),
    "calibrated": Way(label="fp8booster, calibrated", prepare=_ours(FP8Config(), calibrated=True)),
    "rowwise": Way(label="fp8booster, rowwise", prepare=_ours(FP8Config(scaling="rowwise"))),
}


@dataclass(frozen=True, kw_only=True)
class Work:
    """One call of a model, which is timed."""

    batch: int
    tokens: int
    """Of each sequence, that the call reads."""
    context: int = 0
    """Tokens of each sequence in the cache before it."""
    static: bool = False
    """The cache has its last size from the first, and the call is replayed from a CUDA graph."""

    @property
    def label(self) -> str:
        if not self.context:
            return f"prefill, {self.batch} x {self.tokens}"
        how = "static cache, CUDA graph" if self.static else "from Python"
        return f"decode, {self.batch} x {self.context} before, {how}"


class Call:
    """A model's call for one piece of work; each time it finds the same."""

    def __init__(self, model: Callable[..., Any], work: Work, cache: Callable[[], Any], ids: torch.Tensor) -> None:
        self._model, self._work, self._new_cache, self._ids = model, work, cache, ids
        self._cache = cache() if work.context else None
        self._position = torch.arange(work.context, work.context + work.tokens, device=ids.device)

    def fill(self, layers: int, heads: int, features: int) -> int:
        """Put random keys and values into the cache; returns its bytes."""
        if self._cache is None:
            return 0
        shape = (self._work.batch, heads, self._work.context, features)
        made = []
        for layer in range(layers):
            states = (torch.randn(shape, dtype=torch.bfloat16, device=self._ids.device) for _ in "kv")
            place = {"cache_position": torch.arange(self._work.context, device=self._ids.device)}
            self._cache.update(*states, layer, place)
            made += _states_of(self._cache, layer)
        return sum(each.nbytes for each in made)

    def __call__(self, _: int = 0) -> torch.Tensor:
        """The logits of the last tokens  [batch, 1, vocabulary]."""
        cache = self._new_cache() if self._cache is None else self._cache
        found = self._model(
            self._ids, past_key_values=cache, use_cache=True, cache_position=self._position, logits_to_keep=1
        )
        if self._cache is not None:
            self._forget_last()
        return found.logits

    def _forget_last(self) -> None:
        if not self._work.static:
            self._cache.crop(-self._work.tokens)
            return
        for layer in getattr(self._cache, "layers", ()):  # transformers 5 counts in the cache what is in it
            layer.cumulative_length.fill_(self._work.context)


def _states_of(cache: Any, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    if hasattr(cache, "layers"):
        return cache.layers[layer].keys, cache.layers[layer].values
    return cache.key_cache[layer], cache.value_cache[layer]


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of parameters and buffers; a tensor subclass counts as the tensors in it."""
    return sum(_bytes(tensor) for tensor in [*model.parameters(), *model.buffers()])


def _bytes(tensor: Any) -> int:
    if hasattr(tensor, "__tensor_flatten__"):
        return sum(_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    return tensor.nbytes


def prepared(
    base: nn.Module, ways: Mapping[str, Way], tokens: torch.Tensor
) -> tuple[dict[str, nn.Module], list[Record], dict[str, str]]:
    """The models by way, a record for each that has one of its own, and by labels why others failed."""
    models: dict[str, nn.Module] = {}
    records, failed = [], {}
    exact = base(tokens, logits_to_keep=1).logits.float()
    for name, way in ways.items():
        if way.same_model_as in models:
            models[name] = models[way.same_model_as]
            continue
        try:
            if way.needs is not None and find_spec(way.needs) is None:
                raise ImportError(f"{way.needs} is not installed")
            model = base if name == BASELINE else copy.deepcopy(base)
            way.prepare(model, tokens)
            logits = model(tokens, logits_to_keep=1).logits.float()
        except Exception as error:  # a package that lacks the function, memory, a kernel
            failed[way.label] = reason_of(error)
            continue
        models[name] = model
        error = ((logits - exact).norm() / exact.norm()).item()
        records.append({"way": name, "label": way.label, "bytes": weight_bytes(model), "error": error})
    return models, records, failed


def reason_of(error: Exception) -> str:
    """An error as one short line."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0][:160]}"


def measure(
    work: Work,
    models: Mapping[str, nn.Module],
    forwards: Mapping[str, Callable[..., Any]],
    *,
    device: torch.device,
    rounds: int,
    sample_ms: float,
) -> list[Record]:
    """A record for each way; where the cache is static, those with a cache of their own kind are left out."""
    records, variants = {}, []
    config: Any = next(iter(models.values())).config
    shape = (config.num_hidden_layers, config.num_key_value_heads, config.hidden_size // config.num_attention_heads)
    ids = torch.randint(config.vocab_size, (work.batch, work.tokens), device=device)
    static = partial(
        StaticCache,
        config=config,
        max_batch_size=work.batch,
        max_cache_len=work.context + work.tokens,
        device=device,
        dtype=torch.bfloat16,
    )
    shared: dict[Any, tuple[Any, int]] = {}  # a filled cache for all ways that keep it so
    for name, model in models.items():
        kind = WAYS[name].cache
        if work.static and kind is not DynamicCache:
            continue
        call = Call(forwards[name], work, static if work.static else kind, ids)
        if kind in shared:
            call._cache, size = shared[kind]
        else:
            size = call.fill(*shape)
            shared[kind] = call._cache, size
        records[name] = {
            "work": work.label,
            "tokens": work.batch * work.tokens,
            "way": name,
            "label": WAYS[name].label,
            "cache_bytes": size,
            "failed": None,
        }
        variant = Variant(name, call, graph=work.static)
        try:
            time_interleaved([variant], device=device, rounds=1, sample_ms=0)  # whether it runs; compiles
            records[name]["peak_bytes"] = _peak(call, weight_bytes(model) + size, device)
        except Exception as error:
            records[name]["failed"] = reason_of(error)
            continue
        variants.append(variant)
    timings = time_interleaved(variants, device=device, rounds=rounds, sample_ms=sample_ms)
    for name, timing in timings.items():
        records[name] |= _rates(timing, timings.get(BASELINE), work.batch * work.tokens)
    return list(records.values())


def _peak(call: Call, kept: int, device: torch.device) -> int | None:
    """Return the bytes that are kept, and the most that the call takes in addition; None on the CPU, which counts
    nothing.
    """
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return kept + torch.cuda.max_memory_allocated() - before


def _rates(timing: Timing, baseline: Timing | None, tokens: int) -> Record:
    return {
        "ms": timing.ms.as_record(),
        "host_ms": timing.host_ms.as_record(),
        "tokens_per_second": 1e3 * tokens / timing.ms.median,
        "speed": None if baseline is None else baseline.ms.over(timing.ms).as_record(),
    }


def _gib(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**30:.2f}"


COLUMNS = [
    Column("work", lambda r: r["work"]),
    Column("way", lambda r: r["label"]),
    Column("ms", lambda r: f"failed: {r['failed']}" if r["failed"] else spread(r["ms"], 3)),
    Column("host ms", lambda r: f"{r['host_ms']['median']:.3f}" if "ms" in r else "-"),
    Column("tokens/s", lambda r: f"{r['tokens_per_second']:,.0f}" if "ms" in r else "-"),
    Column("speed over BF16", lambda r: spread(r["speed"], 2) if r.get("speed") else "-"),
    Column("cache GiB", lambda r: _gib(r["cache_bytes"])),
    Column("peak GiB", lambda r: _gib(r.get("peak_bytes"))),
]
NOTE = (
    "One call of the model, from token ids to the logits of each sequence's last token: median [10th-90th percentile] "
    "of the rounds. A prefill fills a new cache. A decode reads one token of each sequence behind those that the cache "
    "holds, which grows as transformers' own does, or as `FP8Cache`; or is static, and the call a CUDA graph, so that "
    "the GPU waits for no Python. Peak: weights, the cache before the call, and what the call takes beyond them."
)
MODELS_TABLE = [
    Column("way", lambda r: r["label"]),
    Column("weights GiB", lambda r: _gib(r["bytes"])),
    Column("error of logits", lambda r: f"{r['error']:.1e}"),
]
MODELS_NOTE = "Heads and embeddings are in BF16 everywhere. Error: the norm of the difference from BF16 over the norm."


def main(
    model: Annotated[str, typer.Option(help=f"{', '.join(MODELS)}.")] = "7b",
    layers: Annotated[int | None, typer.Option(help="Layers, where not as many as the model has.")] = None,
    prefill: Annotated[list[str], typer.Option(help="BATCHxTOKENS of a prompt; repeat the option.")] = PREFILLS,
    batch: Annotated[list[int], typer.Option(min=1, help="Sequences of a decode; repeat the option.")] = BATCHES,
    context: Annotated[int, typer.Option(min=1, help="Tokens before a decode.")] = 1024,
    way: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(WAYS)}; repeat the option.", show_default="all")
    ] = None,
    compiled: Annotated[bool, typer.Option("--compile", help="Every model under torch.compile.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each way.")] = 7,
    sample_ms: Annotated[float, typer.Option(help="Milliseconds a sample lasts at least.")] = 100.0,
    quick: command.Quick = False,
    json: command.JsonFile = None,
    out: command.Folder = None,
    commit: command.Commit = None,
    device: command.DeviceName = "cuda",
) -> None:
    """Time prefill and decode of one model in BF16 and in FP8."""
    for given, known, flag in (([model], MODELS, "--model"), (way or [], WAYS, "--way")):
        if unknown := sorted(set(given) - set(known)):
            command.refuse(f"{flag} is {unknown[0]!r}; use one of {', '.join(known)}")
    shapes = [_shape(text) for text in prefill]
    target, gpu = command.measured_device(device)
    if quick:
        shapes, batch, rounds = shapes[:1], batch[:1], min(rounds, 3)
    architecture = MODELS[model].shortened(layers)
    works = [Work(batch=count, tokens=tokens) for count, tokens in shapes]
    works += [
        Work(batch=count, tokens=1, context=context, static=static) for static in (False, True) for count in batch
    ]
    torch.manual_seed(0)
    longest = max([context + 1, *(tokens for _, tokens in shapes)])
    ways = {name: each for name, each in WAYS.items() if way is None or name in (BASELINE, *way)}
    with torch.no_grad():
        base = build(architecture.config(longest), device=target).eval()
        base.config.use_cache = True
        tokens = torch.randint(base.config.vocab_size, (1, min(longest, 512)), device=target)
        models, made, failed = prepared(base, ways, tokens)
        forwards = {name: torch.compile(each, dynamic=False) if compiled else each for name, each in models.items()}
        records = []
        for work in command.progress(works):
            records += measure(work, models, forwards, device=target, rounds=rounds, sample_ms=sample_ms)
            gc.collect()  # caches
    title = f"Inference with {architecture.label}, {architecture.layers} layers"
    title += ", compiled" if compiled else ""
    result = Result(
        "inference",
        title,
        environment.head(gpu, commit=commit) | {"transformers": environment.version_of("transformers")},
        [Table("calls", "Calls", COLUMNS, records, NOTE), Table("models", "Models", MODELS_TABLE, made, MODELS_NOTE)],
        failed,
    )
    command.deliver(result, folder=out, json_file=json)


def _shape(text: str) -> tuple[int, int]:
    batch, _, tokens = text.partition("x")
    if not (batch.isdecimal() and tokens.isdecimal() and int(batch) and int(tokens)):
        command.refuse(f"--prefill is {text!r}; give sequences x tokens, as 8x2048")
    return int(batch), int(tokens)


if __name__ == "__main__":
    command.run_command(main)
