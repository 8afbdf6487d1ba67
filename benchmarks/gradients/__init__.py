"""Gradients of a real run, and what each way of sending them in FP8 does to them."""
