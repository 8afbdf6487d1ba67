"""Share between benchmarks: timing, floors, shapes, the head of a result and how it is written."""
