"""The parts of `benchmarks.experts`: routed tokens and their reference (`work.py`), ways to multiply (`ways.py`), and to
run whole experts (`whole.py`)."""
