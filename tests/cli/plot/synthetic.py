"""Folders of runs as `fp8booster train` writes them, with records of scales of realistic sizes."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

LINEARS = (*(f"self_attn.{name}_proj" for name in "qkvo"), *(f"mlp.{name}_proj" for name in ("gate", "up", "down")))
FORMATS = {"weight": "e4m3", "input": "e4m3", "output gradient": "e5m2"}
HEADER = {
    "fp8booster": "0.1.0",
    "kind": "scales",
    "every": 50,
    "config": {"scaling": "tensorwise"},
    "layers": {"fp8": 14, "bf16": 1},
}
Change = Callable[[dict[str, Any]], None]


def write_scales(path: Path, layers: int, samples: int, change: Change = lambda record: None) -> None:
    """A record in which all is within its limits, but for what `change` makes of a tensor's line."""
    chance = random.Random(0)
    lines = [json.dumps(HEADER)]
    for sample in range(1, samples + 1):
        for layer in range(layers):
            for position, linear in enumerate(LINEARS):
                for role, format in FORMATS.items():
                    spread = chance.gauss(0, 0.2)
                    amax = 2 ** ({"weight": -2, "input": 3, "output gradient": -14}[role] + layer / 16 + spread)
                    record = {
                        "step": 50 * sample,
                        "layer": f"model.layers.{layer}.{linear}",
                        "role": role,
                        "format": format,
                        "amax": amax * (1 + math.log(sample) / 4),
                        "scale": 448 / amax,
                        "flushed": abs(chance.gauss(0, 1e-3)) * (1 + position) / 8,
                        "saturated": 0.0,
                        "snr_db": (31.5 if format == "e4m3" else 25.5) - abs(spread),
                        "non_finite": 0,
                        "outlier": 12 + layer / 4 + chance.random(),
                        "kurtosis": 3 + layer / 4,
                        "ranks": 2,
                    }
                    change(record)
                    lines.append(json.dumps(record))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_metrics(folder: Path, steps: int, factor: float = 1.0) -> None:
    """Losses that fall, those of a run in FP8 by a factor above those of BF16."""
    chance = random.Random(1)
    folder.mkdir(parents=True, exist_ok=True)
    record = {"lr": 1e-4, "grad_norm": 1.0, "tokens_per_second": 1e4, "seconds": 0.5, "peak_memory": 1, "wire_bytes": 1}
    lines = [
        json.dumps({"step": step, "loss": factor * (11 * step**-0.2 + chance.gauss(0, 0.05)), **record})
        for step in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
