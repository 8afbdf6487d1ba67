"""What training does while it runs: the bytes it sends, the memory it takes, what FP8 does to its tensors."""
