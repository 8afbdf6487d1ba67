"""`fp8booster doctor`: what this machine has, what runs on it, and what mends it where something does not."""
