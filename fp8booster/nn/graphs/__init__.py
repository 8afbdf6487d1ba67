"""Layers whose forward and backward are replayed as CUDA graphs, so that the GPU does not wait for Python."""

from fp8booster.nn.graphs.capture import capture_as_configured, capture_layers, captured_layers, graph_breaks
from fp8booster.nn.graphs.layer import forget_graphs
from fp8booster.nn.graphs.pair import free_graphs

__all__ = ["capture_as_configured", "capture_layers", "captured_layers", "forget_graphs", "free_graphs", "graph_breaks"]
