"""Arithmetic: the cast to FP8 and the FP8 product, each Triton kernel beside the torch function that defines it."""
