"""Watches training while it runs: the bytes it sends, the memory it takes, the errors of FP8 casts."""
