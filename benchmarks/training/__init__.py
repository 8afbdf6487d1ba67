"""The parts of `benchmarks.llama` and `benchmarks.modes`: models, engines, and how whole training steps are measured.

`engines.py` names what is compared; `colossal.py` and `fsdp2.py` build it. `launch.py` gives each engine, in its turn,
processes of its own (`worker.py`, forked by `host.py`), so that one which fails takes nothing with it and leaves no
memory behind. `modes.py` has the jobs of the parallel modes.
`measure.py` times steps there; `records.py`, `tables.py` and `output.py` make the result of what all turns found.
"""
