"""`fp8booster eval`: the loss of a model in BF16 and in FP8, on the same text."""
