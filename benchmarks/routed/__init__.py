"""Hold what `benchmarks.experts` times: routed tokens (`work.py`), products of all experts (`implementations.py`),
whole experts (`whole.py`).
"""
