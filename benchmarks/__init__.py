"""What fp8booster costs and gains on this machine, beside its peers, each benchmark one command."""
