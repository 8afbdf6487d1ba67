"""The commands of `fp8booster`."""
