"""What `benchmarks.experts` times: routed tokens (`work.py`), products (`ways.py`), whole experts (`whole.py`)."""
