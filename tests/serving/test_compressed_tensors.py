"""The reading of exports by compressed-tensors, with which vLLM and transformers read them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from fp8booster import load_fp8
from tests.colossal.models import tiny_llama, token_batch
from tests.serving.folders import export

pytest.importorskip("compressed_tensors", reason="installed with transformers 5: make test-transformers5")


@pytest.mark.parametrize("format", ["compressed-tensors", "compressed-tensors-tensorwise"])
def test_an_export_is_decompressed_to_the_same_model(tmp_path: Path, format: str) -> None:
    export(tiny_llama().bfloat16(), tmp_path / "out", format=format)
    whole = transformers.CompressedTensorsConfig(run_compressed=False)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.bfloat16, quantization_config=whole
    )
    ours = load_fp8(tmp_path / "out").state_dict()
    found = {name: value for name, value in theirs.state_dict().items() if "scale" not in name}
    assert found.keys() == ours.keys()
    assert all(torch.equal(found[name], value) for name, value in ours.items())


@pytest.mark.parametrize("format", ["compressed-tensors", "compressed-tensors-tensorwise"])
def test_an_export_runs_as_it_is(tmp_path: Path, format: str) -> None:
    """Its FP8 weights are loaded as they are, and its inputs are rounded as ours: a scale for each token, or tensor."""
    model = tiny_llama().bfloat16().eval()
    export(model, tmp_path / "out", format=format)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16).eval()
    weight = theirs.model.layers[0].mlp.up_proj.weight
    ours = load_fp8(tmp_path / "out", frozen=True).model.layers[0].mlp.up_proj
    assert weight.dtype is torch.float8_e4m3fn
    assert torch.equal(weight.view(torch.uint8), ours.fp8_data[: len(weight)].view(torch.uint8))
    with torch.no_grad():
        exact, found = model(token_batch(0)).logits, theirs(token_batch(0)).logits
    assert 0 < (found - exact).norm() < 0.1 * exact.norm()
