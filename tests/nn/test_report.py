from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from fp8booster import FP8Config, FP8Linear, convert_to_fp8, report
from fp8booster.nn.fused import fuse_blocks
from fp8booster.nn.quantize import quantize
from tests.nn.fused.models import batch, build
from tests.nn.models import tiny_llama


def test_one_row_for_every_linear_layer() -> None:
    result = report(convert_to_fp8(tiny_llama()))
    assert len(result.rows) == 15
    assert len(result.fp8) == 14
    (head,) = result.other
    assert (head.name, head.shape, head.precision) == ("lm_head", (64, 128), "FP32")
    assert head.passes == ("FP32", "FP32", "FP32")
    assert {row.passes for row in result.fp8} == {("FP8", "FP8", "FP8")}
    assert head.notes == "FP8Config.layers leaves it out"
    assert result.summary() == (
        "FP8: 14 of 15 linear layers (91 % of the weights of matrix products); 1 in FP32 (FP8Config.layers leaves it "
        "out)"
    )


def test_a_model_that_was_not_converted_says_so() -> None:
    result = report(nn.Sequential(nn.Linear(16, 16, dtype=torch.bfloat16), nn.Linear(16, 16, dtype=torch.float64)))
    assert [(row.precision, row.notes) for row in result.rows] == [
        ("BF16", "use_fp8 is off"),
        ("float64", "use_fp8 is off"),
    ]
    assert (
        result.summary()
        == "FP8: 0 of 2 linear layers (0 % of the weights of matrix products); 1 in BF16 (use_fp8 is off); 1 in "
        "float64 (use_fp8 is off)"
    )


def test_padded_sizes_are_listed_and_so_are_token_counts_once_seen() -> None:
    model = convert_to_fp8(nn.Sequential(nn.Linear(250, 256), nn.Linear(256, 256)))
    assert [row.notes for row in report(model).rows] == ["padded: in 250->256", ""]
    for rows in (32, 17, 5, 17):
        model(torch.randn(rows, 250))
    assert [row.notes for row in report(model).rows] == [
        "padded: in 250->256, tokens 5->16, tokens 17->32",
        "padded: tokens 5->16, tokens 17->32",
    ]
    assert report(model).summary() == "FP8: 2 of 2 linear layers, 2 padded to multiples of 16"


def test_token_counts_of_three_dimensions_are_rows_of_the_product() -> None:
    model = convert_to_fp8(nn.Sequential(nn.Linear(32, 32)))
    model(torch.randn(2, 8, 32))
    assert report(model).rows[0].notes == ""
    model(torch.randn(3, 5, 32))
    model(torch.randn(32))
    assert report(model).rows[0].notes == "padded: tokens 1->16, tokens 15->16"


def test_a_weight_that_is_not_trained_has_no_gradient_to_compute() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)).requires_grad_(False)
    (one, other) = report(convert_to_fp8(model, FP8Config(layers=lambda name, _: name == "0"))).rows
    assert (one.passes, other.passes) == (("FP8", "FP8", "none"), ("FP32", "FP32", "none"))
    assert "none" in str(report(model))


def test_notes_name_a_few_of_many_sizes() -> None:
    layer = FP8Linear(32, 32)
    for tokens in range(1, 101):
        layer(torch.zeros(tokens, 32))
    assert layer.fp8_notes().endswith("tokens 8->16 and 86 more")


def test_emulation_is_not_silent() -> None:
    model = convert_to_fp8(nn.Sequential(nn.Linear(32, 32)), FP8Config(emulate=True))
    assert report(model).rows[0].notes == "emulated in FP32"
    assert report(model).summary() == "FP8: 1 of 1 linear layers, 1 emulated in FP32"


def test_the_table_holds_every_row() -> None:
    result = report(convert_to_fp8(tiny_llama()))
    table = str(result)
    assert result.summary() in " ".join(table.split())
    for row in result.rows:
        assert row.name in table
    assert "64 x 160" in table


def test_what_is_merged_and_what_is_not_is_shown() -> None:
    model = build()
    convert_to_fp8(model)
    fuse_blocks(model)
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    assert (
        report(model)
        .summary()
        .startswith(
            "FP8: 14 of 15 linear layers (88 % of the weights of matrix products), 10 of them merged to 4 products; "
            "1 in"
        )
    )
    mlp.up_proj.register_forward_hook(lambda module, args, output: None)
    attention.fp8_merged.fp8_weight.refusal = "in different chunks"
    result = report(model)
    assert result.summary().startswith(
        "FP8: 14 of 15 linear layers (88 % of the weights of matrix products), 5 of them merged to 2 products, "
        "1 group of layers not merged "
        "(in different chunks), 1 group of layers not merged "
        "(a layer has hooks or a forward of its own, which must run); 1 in"
    )
    apart = {row.name: row.notes for row in result.rows if "not merged" in row.notes}
    assert apart["model.layers.0.self_attn.k_proj"] == "not merged: in different chunks"
    assert len(apart) == 5


def test_what_only_a_batch_shows_to_be_not_merged_is_shown_after_it() -> None:
    model = build(dtype=torch.float32)
    convert_to_fp8(model)
    fuse_blocks(model)
    ids = batch()
    model.eval()
    model(input_ids=ids)
    assert "not merged" not in report(model).summary()
    model.train()
    merged = model.model.layers[0].self_attn.fp8_merged
    assert merged(torch.ones(16, 64, dtype=torch.bfloat16)) is None
    assert "1 group of layers not merged (the input's dtype is not the weight's)" in report(model).summary()


def test_to_report_a_parametrized_weight_is_not_to_compute_it() -> None:
    """Spectral norm improves its vectors whenever the weight is read."""
    model = nn.Sequential(
        nn.Linear(64, 64),
        parametrizations.spectral_norm(nn.Linear(64, 64)),
        parametrizations.weight_norm(nn.Linear(64, 64, dtype=torch.bfloat16)),
    )
    model[1].requires_grad_(False)
    convert_to_fp8(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rows = report(model).rows
    assert [row.precision for row in rows] == ["FP8", "FP32", "BF16"]
    assert [row.passes[2] for row in rows] == ["FP8", "none", "BF16"]
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


class Experts(nn.Module):
    """As transformers 5 holds them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 64, 32))
        self.down_proj = nn.Parameter(torch.randn(4, 32, 32))
        self.bias = nn.Parameter(torch.randn(32))


class Block(nn.Module):
    """Layers before experts that are no layers."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(32, 32)
        self.gate = nn.Bilinear(1, 32, 4)
        self.experts = Experts()


def test_experts_in_one_parameter_parameter_are_named_and_counted() -> None:
    result = report(convert_to_fp8(Block()))
    assert [(row.name, row.shape, row.weights) for row in result.outside] == [
        ("gate.weight", (4, 1, 32), 128),
        ("experts.gate_up_proj", (4, 64, 32), 8192),
        ("experts.down_proj", (4, 32, 32), 4096),
    ]
    assert result.share == 1024 / (1024 + 128 + 8192 + 4096)
    assert result.summary() == (
        "FP8: 1 of 1 linear layers (8 % of the weights of matrix products); 1 parameter of no linear layer in FP32, "
        "less than 1 % of the weights (a router, where rounding would send tokens to other experts); 2 parameters of "
        "no linear layer in FP32, 91 % of the weights (Experts has no FP8 form)"
    )
    assert "experts.gate_up_proj" in str(result)
    assert {row.notes for row in report(Block()).outside} == {"use_fp8 is off"}


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: nn.TransformerEncoderLayer(32, 4, 64), {"self_attn.in_proj_weight": "MultiheadAttention"}),
        (lambda: nn.Sequential(nn.Linear(16, 16), nn.Bilinear(16, 16, 16)), {"1.weight": "Bilinear"}),
        (lambda: nn.Sequential(nn.Linear(16, 16), nn.Conv2d(3, 16, 3)), {"1.weight": "a convolution"}),
        (lambda: nn.Sequential(nn.Linear(16, 16), nn.Embedding(8, 16), nn.LayerNorm([4, 16])), {}),
        (lambda: parametrizations.weight_norm(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))[0]), None),
    ],
)
def test_what_no_linear_layer_owns_is_named(make, expected) -> None:
    model = nn.Sequential(nn.Linear(16, 16), make())
    found = {row.name.removeprefix("1."): row.notes for row in report(convert_to_fp8(model)).outside}
    assert found.keys() == (expected or {}).keys()
    assert all(found[name].startswith(reason) for name, reason in (expected or {}).items())


def test_all_of_a_model_is_told_from_nearly_all() -> None:
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(16, 17))
    assert "(99 % of the weights" in report(convert_to_fp8(model)).summary()
    assert report(convert_to_fp8(nn.Sequential(nn.Linear(16, 16)))).summary() == "FP8: 1 of 1 linear layers"


def test_the_shape_is_that_before_an_engine_flattened_a_parameter() -> None:
    model = convert_to_fp8(Block())
    model.experts.down_proj.data = model.experts.down_proj.data.flatten()[:7]
    assert report(model).outside[2].weights == 4096


class Around(nn.Module):
    """Holds an FP8 layer that runs, one whose weight alone is read, one whose dtype is read, and one that waits."""

    def __init__(self) -> None:
        super().__init__()
        self.runs, self.read, self.asked, self.waits = (nn.Linear(32, 32) for _ in range(4))
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.projection = nn.ModuleDict({"inside": nn.Linear(32, 32)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.runs(x).to(self.asked.weight.dtype)
        x = F.linear(self.asked(x), self.read.weight)
        return F.linear(x, self.projection["inside"].weight)


@pytest.mark.parametrize("training", [True, False])
def test_what_is_shown_in_fp8_has_run_once_the_model_did(training) -> None:
    model = convert_to_fp8(Around()).train(training)
    assert len(report(model).fp8) == 7
    with torch.set_grad_enabled(training):
        model(torch.randn(16, 32))
    rows = {row.name: row for row in report(model).rows}
    assert {name: row.precision for name, row in rows.items()} == {
        "runs": "FP8",
        "read": "FP32",
        "asked": "FP8",
        "waits": "none",
        "experts.0": "FP8",  # may run with the next batch
        "experts.1": "FP8",
        "projection.inside": "FP32",
    }
    alone = "its weight is read without the layer, which has not run"
    assert {name: row.notes for name, row in rows.items() if row.notes} == {
        "read": alone,
        "waits": "has not run",
        "projection.inside": alone,
    }
    assert report(model).summary() == (
        f"FP8: 4 of 7 linear layers (57 % of the weights of matrix products); 2 in FP32 ({alone}); 1 that has not run"
    )
    model.waits(torch.randn(16, 32))
    assert [row.name for row in report(model).other] == ["read", "projection.inside"]
    assert len(report(convert_to_fp8(model)).fp8) == 7  # it begins anew


class Bypassing(nn.Module):
    """Calls its layer in training alone, and multiplies by its weight in evaluation, as fast paths do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if self.training else F.linear(x, self.layer.weight, self.layer.bias)


def test_what_evaluation_bypasses_is_shown() -> None:
    model, x = convert_to_fp8(Bypassing()), torch.randn(16, 32)
    model(x)
    assert [row.notes for row in report(model).fp8] == [""]
    with torch.no_grad():
        model.eval()(x)
        assert [row.notes for row in report(model).fp8] == ["in evaluation its weight was read without it"]
        model.layer(x)
    assert [row.notes for row in report(model).fp8] == [""]


def test_a_frozen_layer_whose_values_are_read_has_not_run_in_fp8() -> None:
    model = quantize(nn.ModuleDict({"read": nn.Linear(32, 32), "runs": nn.Linear(32, 32)}))
    with torch.no_grad():
        F.linear(model["runs"](torch.randn(16, 32)), model["read"].weight)
    assert [row.name for row in report(model).fp8] == ["runs"]


def test_layers_that_came_after_the_conversion_say_so() -> None:
    model = convert_to_fp8(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), FP8Config(always=True))
    model[1] = nn.Linear(64, 64)
    model.append(nn.Conv1d(64, 64, 1))
    told = report(model)
    assert [row.notes for row in told.rows[1:]] == ["it came after the model was converted"]
    assert [row.notes for row in told.outside] == ["it came after the model was converted"]
