"""`fp8booster generate`: text by a model in BF16 or in FP8."""
