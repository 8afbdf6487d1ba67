"""Where the FP8 weights of layers come from, and when they are no longer what the weights are."""
