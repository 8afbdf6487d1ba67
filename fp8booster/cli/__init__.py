"""What a person runs: `fp8booster train` and `fp8booster doctor`."""
