"""`fp8booster export`: a run's model as engines load it."""
