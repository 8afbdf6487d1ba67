"""`fp8booster train`: train a language model in BF16, in FP8, or in one after the other on the same batches.

The command's own process prepares the data, starts one worker process for each rank, shows their progress and
writes the summary (`run.py`); a worker (`rank.py`) builds the model, boosts it and runs the loop (`loop.py`).
"""
