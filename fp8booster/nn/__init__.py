"""FP8 layers for any PyTorch model."""

from fp8booster.nn.convert import convert_to_fp8
from fp8booster.nn.distributed import data_parallel, fully_shard
from fp8booster.nn.fuse import fuse
from fp8booster.nn.graphs import capture_layers
from fp8booster.nn.linear.frozen import FrozenFP8Linear
from fp8booster.nn.linear.functional import fp8_linear
from fp8booster.nn.linear.layer import FP8Layer, FP8Linear, forget_weights
from fp8booster.nn.quantize import quantize
from fp8booster.nn.recording import Recording, record
from fp8booster.nn.report import Report, report

__all__ = [
    "FP8Layer",
    "FP8Linear",
    "FrozenFP8Linear",
    "Recording",
    "Report",
    "capture_layers",
    "convert_to_fp8",
    "data_parallel",
    "forget_weights",
    "fp8_linear",
    "fully_shard",
    "fuse",
    "quantize",
    "record",
    "report",
]
