"""`fp8booster plan`: the memory of a training step, part by part, before there is a GPU."""
