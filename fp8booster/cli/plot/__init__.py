"""`fp8booster plot`: what a run recorded of its loss and of its casts to FP8, as one page."""
