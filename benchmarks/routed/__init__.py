"""Parts of `benchmarks.experts`: routed tokens (`work.py`), ways to multiply (`ways.py`), whole experts (`whole.py`)."""
