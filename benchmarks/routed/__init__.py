"""What `benchmarks.experts` times: routed tokens (`work.py`), products (`implementations.py`), whole experts (`whole.py`)."""
