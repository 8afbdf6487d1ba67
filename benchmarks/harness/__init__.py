"""What the benchmarks share: timing, floors, shapes, the head of a result and how it is written."""
