"""FP8 training for Colossal-AI's Booster: real-time scaling, FP8 products and FP8 communication."""

from fp8booster.comm import Encoding
from fp8booster.config import Activations, Formats, FP8Config, WeightCopies
from fp8booster.import_order import patch_colossalai_when_imported
from fp8booster.levels import Level, level
from fp8booster.monitor.watchdog import Watchdog
from fp8booster.nn import (
    FP8Linear,
    Report,
    capture_layers,
    convert_to_fp8,
    data_parallel,
    forget_weights,
    fp8_linear,
    fully_shard,
    fuse,
    quantize,
    record,
    report,
)
from fp8booster.serving import export, load_fp8

__all__ = [
    "Activations",
    "Encoding",
    "FP8Config",
    "FP8Linear",
    "Formats",
    "Level",
    "Report",
    "Watchdog",
    "WeightCopies",
    "capture_layers",
    "convert_to_fp8",
    "data_parallel",
    "export",
    "forget_weights",
    "fp8_linear",
    "fully_shard",
    "fuse",
    "level",
    "load_fp8",
    "quantize",
    "record",
    "report",
]

patch_colossalai_when_imported()
