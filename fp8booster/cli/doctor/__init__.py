"""`fp8booster doctor`: what this machine has, what runs on it, and what to do where something does not."""
