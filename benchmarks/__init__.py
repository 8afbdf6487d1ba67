"""Measure what fp8booster costs and gains on this machine, compared with its peers; each benchmark is one command."""
