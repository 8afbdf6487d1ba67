"""Sources of the FP8 weights of layers, and of when they are stale."""
