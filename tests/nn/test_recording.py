"""What is recorded of a model's tensors is what a plain count of them finds; faults are named exactly."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from fp8booster import FP8Config, FP8Linear, convert_to_fp8, fuse, record
from fp8booster.config import Activations
from fp8booster.kernels import code_statistics
from fp8booster.monitor.scales import ScaleRow
from fp8booster.monitor.sinks import JsonLines, read_scales
from fp8booster.monitor.watchdog import Watchdog
from fp8booster.nn.fused.merged_layers import MergedLayers
from fp8booster.nn.held_casts import joined, plain_name
from fp8booster.optim import AdamW
from fp8booster.optim.gradient_sums import value_of
from tests.colossal.moe.models import tiny_mixtral
from tests.kernels.matrices import quantize
from tests.nn.models import tiny_llama

CONFIG = FP8Config(always=True)


class Kept:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.rows: list[ScaleRow] = []

    def begin(self, header, done) -> None:
        self.header, self.done = header, done

    def write(self, rows) -> None:
        self.rows += rows

    def close(self) -> None:
        self.closed = True


class Blocks(nn.Module):
    """Linear layers one after the other."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False, dtype=torch.bfloat16) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def blocks(config: FP8Config = CONFIG) -> Blocks:
    torch.manual_seed(0)
    return convert_to_fp8(Blocks(), config)


def steps(model: nn.Module, count: int, before: Callable[[int], object] = lambda step: None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(1, count + 1):
        torch.manual_seed(step)
        before(step)
        model(torch.randn(16, 32, dtype=torch.bfloat16)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def plain(values: torch.Tensor, dtype: torch.dtype) -> dict[str, float]:
    """The figures of one tensor by their definitions, in FP64."""
    exact = values.detach().double()
    limit = torch.finfo(dtype).max
    scale = float(torch.tensor(limit / float(exact.abs().max()), dtype=torch.float32))
    rounded = (values.detach().float() * scale).clamp(-limit, limit).to(dtype).double() / scale
    nonzero = exact != 0
    return {
        "amax": float(exact.abs().max()),
        "scale": scale,
        "flushed": float((nonzero & (rounded == 0)).sum() / nonzero.sum()),
        "snr_db": float(10 * torch.log10(exact.square().sum() / (exact - rounded).square().sum())),
        "outlier": float(exact.abs().max() / exact.square().mean().sqrt()),
        "kurtosis": float(exact.pow(4).mean() / exact.square().mean() ** 2),
    }


def test_figures_are_those_of_their_definitions() -> None:
    model, sink = blocks(), Kept()
    given: dict[tuple[str, str], torch.Tensor] = {}

    def keep(name: str, args: tuple[torch.Tensor], output: torch.Tensor) -> None:
        given[name, "input"] = args[0].detach()
        output.register_hook(lambda gradient: given.update({(name, "output gradient"): gradient.clone()}))

    for number, layer in enumerate(model.layers):
        name = f"layers.{number}"
        given[name, "weight"] = layer.weight.detach().clone()
        layer.register_forward_hook(lambda _, args, output, name=name: keep(name, args, output))
    with record(model, every=50, sink=sink):
        steps(model, 1)
    assert {(row.layer, row.role) for row in sink.rows} == given.keys()
    for row in sink.rows:
        dtype = torch.float8_e5m2 if row.role == "output gradient" else torch.float8_e4m3fn
        assert (row.step, row.saturated, row.non_finite, row.ranks) == (1, 0.0, 0, 1)
        assert row.format == {torch.float8_e5m2: "e5m2", torch.float8_e4m3fn: "e4m3"}[dtype]
        for figure, expected in plain(given[row.layer, row.role], dtype).items():
            assert getattr(row, figure) == pytest.approx(expected, rel=1e-6), (row, figure)


def test_the_first_step_and_each_nth_are_sampled() -> None:
    model, sink = blocks(), Kept()
    with record(model, every=3, sink=sink):
        steps(model, 7)
    assert sorted({row.step for row in sink.rows}) == [1, 3, 6]
    assert all(sum(row.step == step for row in sink.rows) == 9 for step in (1, 3, 6))
    assert sink.header["every"] == 3
    assert sink.header["layers"] == {"fp8": 3, "16-bit": 0}
    assert sink.header["config"]["formats"]["gradient"] == "float8_e5m2"
    assert sink.header["config"]["scaling"] == "tensorwise"
    assert sink.closed


def test_recording_changes_no_bits_and_leaves_no_trace() -> None:
    plain_model, recorded = blocks(), blocks()
    casts = [layer.fp8_casts for layer in recorded.layers]
    with record(recorded, every=2):
        copied = copy.deepcopy(recorded)
        steps(recorded, 4)
    steps(plain_model, 4)
    assert all(map(torch.equal, plain_model.parameters(), recorded.parameters()))
    assert [layer.fp8_casts for layer in recorded.layers] == casts
    assert type(copied.layers[0].fp8_casts) is type(casts[0])


def test_micro_batches_and_rowwise_scales_add_up() -> None:
    model, sink = blocks(FP8Config(always=True, scaling="rowwise")), Kept()
    inputs = [torch.randn(16, 32, dtype=torch.bfloat16), 4 * torch.randn(24, 32, dtype=torch.bfloat16)]
    with record(model, sink=sink) as recording:
        for each in inputs:
            model(each).float().sum().backward()
        recording.end_step()
    (row,) = [row for row in sink.rows if (row.layer, row.role) == ("layers.0", "input")]
    exact = torch.cat(inputs).double()
    assert row.amax == float(exact.abs().max())
    assert row.outlier == pytest.approx(float(exact.abs().max() / exact.square().mean().sqrt()))
    assert row.kurtosis == pytest.approx(float(exact.pow(4).mean() / exact.square().mean() ** 2))
    assert row.snr_db is not None


def test_blockwise_scales_are_those_of_their_values() -> None:
    torch.manual_seed(0)
    config = FP8Config(always=True, scaling="blockwise")
    layers = [FP8Linear(200, 140, bias=False, dtype=torch.bfloat16, config=config) for _ in range(2)]
    model, sink = nn.ModuleList(layers), Kept()
    x = torch.randn(20, 200, dtype=torch.bfloat16)
    x[:, 128:] *= 2.0**20  # of which one scale would leave nothing of the others
    merged = MergedLayers(layers)
    merged_holder = nn.Module()
    merged_holder.merged = merged
    model.append(merged_holder)
    with record(model, sink=sink) as recording:
        layers[0](x).float().sum().backward()
        merged(x).float().sum().backward()
        recording.end_step()
    rows = {(row.layer, row.role): row for row in sink.rows}
    assert {role for _, role in rows} == {"input", "weight", "output gradient"}
    assert all(row.flushed == 0 and row.saturated == 0 and (row.snr_db or 40) > 28 for row in rows.values())
    scales = quantize(x, torch.float8_e4m3fn, scale_for="group", power_of_two=True).inverse_scale
    assert rows["0", "input"].scale == 1 / float(scales[:, :20].max())


def test_checkpointing_counts_an_input_once() -> None:
    model, sinks = blocks(), (Kept(), Kept())
    for reentrant, sink in zip((False, True), sinks, strict=True):
        x = torch.randn(16, 32, dtype=torch.bfloat16, requires_grad=True)
        with record(model, sink=sink) as recording:
            torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant).float().sum().backward()
            recording.end_step()
        assert sum(row.role == "input" for row in sink.rows) == 3
    assert {row.layer for row in sinks[0].rows} == {"layers.0", "layers.1", "layers.2"}


def record_a_fused_step(model: torch.nn.Module, sink: Kept) -> None:
    fuse(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 128, (2, 32))
    with record(model, sink=sink):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()


def test_merged_layers_share_the_line_of_their_input_and_have_one_each_for_weights() -> None:
    model, sink = convert_to_fp8(tiny_llama().bfloat16(), CONFIG), Kept()
    record_a_fused_step(model, sink)
    names = {(row.layer, row.role) for row in sink.rows}
    attention = "model.layers.1.self_attn."
    assert (attention + "q_proj+k_proj+v_proj", "input") in names
    assert (attention + "q_proj+k_proj+v_proj", "output gradient") in names
    for part in "qkv":
        weight = model.get_submodule(f"{attention}{part}_proj").weight
        (row,) = [row for row in sink.rows if (row.layer, row.role) == (f"{attention}{part}_proj", "weight")]
        assert row.amax == pytest.approx(float(weight.detach().abs().max()), rel=0.01)
    assert ("model.layers.0.mlp.gate_proj+up_proj", "input") in names
    assert ("model.layers.0.mlp.down_proj", "input") in names


def test_moments_in_8_bits_are_recorded_as_they_decode() -> None:
    model, sink = blocks(), Kept()
    optimizer = AdamW(model.parameters(), betas=(0.9, 0.99))
    with record(model, sink=sink):
        model(torch.randn(16, 32, dtype=torch.bfloat16)).float().square().mean().backward()
        optimizer.step()
    for number, layer in enumerate(model.layers):
        gradient, state = layer.weight.grad.double(), optimizer.state[layer.weight]
        for role, exact, name in (
            ("first moment", 0.1 * gradient, "exp_avg"),
            ("second moment", 0.01 * gradient.square(), "exp_avg_sq"),
        ):
            decoded = state[name].double()
            (row,) = [row for row in sink.rows if (row.layer, row.role) == (f"layers.{number}", role)]
            noise = (exact - decoded).square().sum()
            assert row.snr_db == pytest.approx(float(10 * torch.log10(exact.square().sum() / noise)), abs=0.01)
            assert row.flushed == float(((exact != 0) & (decoded == 0)).sum() / (exact != 0).sum())
            assert row.amax == pytest.approx(float(exact.abs().max()), rel=1e-5)
            assert (row.scale, row.saturated, row.non_finite) == (None, 0, 0)


@pytest.mark.parametrize("features", [32, 4])
def test_sums_of_gradients_in_8_bits_are_recorded_as_they_decode(features: int) -> None:
    torch.manual_seed(0)
    layer = FP8Linear(16, features, bias=False, dtype=torch.bfloat16, config=CONFIG)
    options = {"update_in_backward": True, "micro_batches": 3, "gradient_accumulation": "8-bit"}
    optimizer, sink = AdamW(layer.parameters(), **options), Kept()
    given, decoded = [torch.randn(features, 16, dtype=torch.bfloat16) for _ in range(2)], [torch.zeros(features, 16)]
    with record(layer, sink=sink) as recording:
        for gradient in given:
            (layer.weight * gradient).sum().backward()
            decoded.append(value_of(optimizer.gradient_sums[layer.weight][1]).view(features, 16))
        recording.end_step()
    exact = torch.stack([before + gradient.float() for before, gradient in zip(decoded, given, strict=False)]).double()
    noise = (exact - torch.stack(decoded[1:]).double()).square().sum()
    (row,) = [row for row in sink.rows if row.role == "gradient sum"]
    assert (row.layer, row.format, row.scale) == ("weight", "int8", None)
    assert row.snr_db == pytest.approx(float(10 * torch.log10(exact.square().sum() / noise)), abs=1e-3)
    assert row.amax == float(exact.abs().max())


def test_moments_of_less_than_a_block_are_counted_alone() -> None:
    layer = FP8Linear(16, 4, bias=False, dtype=torch.bfloat16, config=CONFIG)
    optimizer, sink = AdamW(layer.parameters()), Kept()
    with record(layer, every=1, sink=sink, on_warning=lambda _: None):
        for bad in (1.0, math.nan):
            layer.weight.grad = torch.full_like(layer.weight, bad)
            optimizer.step()
    rows = [row for row in sink.rows if row.role == "first moment"]
    assert rows[0].outlier == pytest.approx(1)
    assert rows[1].non_finite == 64


def test_moments_that_become_zero_and_gradients_that_are_not_finite_are_counted() -> None:
    model, sink = blocks(), Kept()
    optimizer = AdamW(model.parameters())
    weights = [layer.weight for layer in model.layers]
    for weight in weights:
        weight.grad = torch.full_like(weight, 1e-7)
        weight.grad[:, 0] = 1.0
    weights[1].grad[0, 0] = math.nan
    with record(model, sink=sink, on_warning=(said := []).append):
        optimizer.step()
    assert said[0].startswith("Step 1, first moment of layers.0: 97% of its nonzero values become zero in int8; take")
    rows = {row.layer: row for row in sink.rows if row.role == "first moment"}
    assert rows["layers.0"].flushed == pytest.approx(31 / 32)
    assert (rows["layers.0"].non_finite, rows["layers.1"].non_finite) == (0, 256)
    assert rows["layers.1"].snr_db == pytest.approx(rows["layers.0"].snr_db, abs=0.1)


def test_of_large_tensors_some_blocks_are_looked_at(monkeypatch) -> None:
    torch.manual_seed(0)
    gradient = torch.randn(40, 256) * torch.arange(1, 41)[:, None]
    snr = {}
    for most in (2**20, 10 * 256):
        monkeypatch.setattr(code_statistics, "MOST", most)
        layer = FP8Linear(256, 40, bias=False, dtype=torch.bfloat16, config=CONFIG)
        layer.weight.grad = gradient.bfloat16()
        with record(layer, sink=(sink := Kept())):
            AdamW(layer.parameters()).step()
        snr[most] = {row.role: (row.snr_db, row.amax) for row in sink.rows}
    (whole, some) = snr.values()
    for role in ("first moment", "second moment"):
        assert some[role][0] == pytest.approx(whole[role][0], abs=1.0)
        assert some[role][1] <= whole[role][1]
    assert some != whole


def test_saved_activations_in_8_bits_are_named_by_the_layer_that_reads_them() -> None:
    rows, losses = {}, {}
    for saved in ("16-bit", "8-bit"):
        model, sink = (
            convert_to_fp8(tiny_llama().bfloat16(), FP8Config(always=True, activations=Activations(saved=saved))),
            Kept(),
        )
        fuse(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        torch.manual_seed(1)
        tokens = torch.randint(0, 128, (2, 32))
        with record(model, sink=sink):
            losses[saved] = model(input_ids=tokens, labels=tokens).loss
            losses[saved].backward()
            optimizer.step()
        rows[saved] = {row.layer: row for row in sink.rows if row.role == "saved activation"}
    assert rows["16-bit"] == {}
    assert rows["8-bit"].keys() == {
        f"model.layers.{number}.{part}"
        for number in (0, 1)
        for part in ("self_attn.q_proj+k_proj+v_proj", "mlp.gate_proj+up_proj", "mlp.down_proj")
    }
    assert all(row.snr_db > 40 and row.format == "int8" for row in rows["8-bit"].values())
    assert torch.equal(*losses.values())


def test_products_of_experts_are_recorded_by_their_names() -> None:
    model, sink = convert_to_fp8(tiny_mixtral().bfloat16(), CONFIG), Kept()
    record_a_fused_step(model, sink)
    rows = {(row.layer, row.role): row for row in sink.rows}
    assert len(rows) == len(sink.rows)
    assert all(row.non_finite == 0 and row.saturated == 0 and row.snr_db > 20 for row in sink.rows)
    of_experts = {key for key in rows if re.search(r"block_sparse_moe|\.mlp\.", key[0])}
    assert {role for _, role in of_experts} == {"weight", "input", "output gradient"}
    products = {
        role: {
            f"{layer.rpartition('.')[0]}.{part}" for layer, of in of_experts if of == role for part in parts_of(layer)
        }
        for role in ("weight", "input", "output gradient")
    }
    assert products["weight"] == products["input"] == products["output gradient"]
    assert {name.split(".")[2] for name in products["weight"]} == {"0", "1"}
    one_by_one = {name.split(".experts.")[1].split(".")[0] for name in products["weight"]} & set("0123")
    assert len(products["weight"]) == (24 if one_by_one else 4)  # two layers of four experts


def parts_of(layer: str) -> list[str]:
    return layer.rpartition(".")[2].split("+")


def test_nothing_waits_for_the_device_within_a_step(monkeypatch) -> None:
    model, sink = blocks(), Kept()
    read = []
    for name in ("item", "tolist", "__float__", "__bool__", "__int__", "numpy", "cpu"):
        original = getattr(torch.Tensor, name)

        def counted(self, *args, original=original, name=name, **kwargs):
            read.append(name)
            return original(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, counted)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with record(model, every=1, sink=sink):
        for _ in range(2):
            loss = model(torch.randn(16, 32, dtype=torch.bfloat16)).float().square().mean()
            loss.backward()
            assert read == []
            optimizer.step()
            # what the host has by then: the sample of the step before
            assert set(read) <= {"numpy"}
            read.clear()


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer_type", [torch.optim.SGD, AdamW])
def test_no_sampled_step_waits_for_the_gpu(optimizer_type) -> None:
    model, sink = blocks().cuda(), Kept()
    optimizer = optimizer_type(model.parameters(), lr=1e-3)
    x = torch.randn(64, 32, dtype=torch.bfloat16, device="cuda")
    with record(model, every=1, sink=sink):
        for step in range(6):
            torch.cuda.set_sync_debug_mode("error" if step > 2 else "default")
            try:
                model(x).float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            finally:
                torch.cuda.set_sync_debug_mode("default")
    assert sorted({row.step for row in sink.rows}) == [1, 2, 3, 4, 5, 6]


def test_a_file_goes_on_where_a_run_does(tmp_path) -> None:
    path = tmp_path / "scales.jsonl"
    with record(blocks(), every=2, sink=path):
        steps(blocks(), 6)
    with record(model := blocks(), every=2, sink=path, done=3) as recording:
        assert recording.step == 4
        steps(model, 2)
    assert sorted({row.step for row in read_scales(path)[1]}) == [4]


def test_numbers_of_numpy_are_written_as_json(tmp_path) -> None:
    path = tmp_path / "scales.jsonl"
    with record(model := blocks(), every=np.int64(2), done=np.int64(1), sink=path):
        steps(model, 1)
    assert {row.step for row in read_scales(path)[1]} == {2}


def test_a_sample_is_written_before_a_checkpoint_and_once(tmp_path) -> None:
    path = tmp_path / "scales.jsonl"
    with record(model := blocks(), every=2, sink=path) as recording:
        for count, written in ((1, {1}), (1, {1, 2}), (1, {1, 2}), (1, {1, 2, 4})):
            steps(model, count)
            recording.flush()
            assert {row.step for row in read_scales(path)[1]} == written
    rows = [(row.step, row.layer, row.role) for row in read_scales(path)[1]]
    assert len(rows) == len({*rows})


def test_recordings_may_end_in_any_order() -> None:
    model, sinks = blocks(), (Kept(), Kept())
    before = [layer.fp8_casts for layer in model.layers]
    first, second = (record(model, every=1, sink=sink) for sink in sinks)
    steps(model, 1)
    first.close()
    steps(model, 1)
    second.close()
    assert [layer.fp8_casts for layer in model.layers] == before
    assert [{row.step for row in sink.rows} for sink in sinks] == [{1}, {1, 2}]


def grow_a_channel(model: Blocks, step: int) -> None:
    if step > 10:
        with torch.no_grad():
            model.layers[1].weight[:, 7] *= 1.5


def test_a_weight_that_grows_is_named_once() -> None:
    model, said = blocks(), []
    with record(model, every=2, on_warning=said.append):
        steps(model, 30, lambda step: grow_a_channel(model, step))
    assert [sentence.partition(":")[0] for sentence in said] == ["Step 16, weight of layers.1"]
    assert "times as large as its course so far leads to" in said[0]


def test_a_resumed_recording_goes_on_with_the_courses_of_weights_and_what_was_warned_of(tmp_path) -> None:
    said: list[str] = []
    model, path = blocks(), tmp_path / "scales.jsonl"
    with record(model, every=2, sink=path, on_warning=said.append):
        steps(model, 13, lambda step: grow_a_channel(model, step))
    assert said == []
    for done in (13, 18):
        # sinks without lines, as one that only sends them, do not hide those of the file
        sink = [Kept(), JsonLines(path)]
        with record(model, every=2, sink=sink, done=done, on_warning=said.append):
            steps(model, 5, lambda step, done=done: grow_a_channel(model, step + done))
        assert [sentence.partition(":")[0] for sentence in said] == ["Step 16, weight of layers.1"]


def test_a_resumed_recording_has_warned_of_nothing_by_other_thresholds(tmp_path) -> None:
    model, path = blocks(), tmp_path / "scales.jsonl"

    def shrink(_: int) -> None:
        """Let half of the values of one weight become zero in each sample."""
        with torch.no_grad():
            model.layers[1].weight[::2] *= 1e-9

    given = []
    for number, flushed in enumerate((0.9, 0.25, 0.25, 0.2)):
        said: list[str] = []
        rules = Watchdog(flushed=flushed)
        with record(model, every=1, sink=path, watchdog=rules, done=2 * number, on_warning=said.append):
            steps(model, 2, shrink)
        given.append([sentence.partition(":")[0] for sentence in said])
    assert given == [[], ["Step 3, weight of layers.1"], [], ["Step 7, weight of layers.1"]]


def test_what_is_no_model_in_fp8_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to record"):
        record(nn.Linear(16, 16))
    with pytest.raises(ValueError, match="every is 0; give the number of steps from a sample to the next, at least 1"):
        record(blocks(), every=0)
    with pytest.raises(ValueError, match="done is -1; give the number of steps that the run has taken, 0 for a new"):
        record(blocks(), done=-1)
    for wrong in ({"every": 1.5}, {"every": True}, {"done": "3"}):
        with pytest.raises(TypeError, match=f"{next(iter(wrong))} is .*; it must be a whole number"):
            record(blocks(), **wrong)


def test_names_are_those_of_the_model() -> None:
    assert plain_name("module._fsdp_wrapped_module.layers.0._checkpoint_wrapped_module.mlp") == "layers.0.mlp"
    assert plain_name("modules.0.module_list") == "modules.0.module_list"
    assert joined(["a.q", "a.k"]) == "a.q+k"
    assert joined(["a.q", "b.k"]) == "a.q+b.k"
