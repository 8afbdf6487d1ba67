"""The linear layers that `benchmarks.linear` compares: fp8booster's, BF16 and the peers'."""

from benchmarks.layers.ours import OURS
from benchmarks.layers.peers import PEERS

LAYERS = {**PEERS, **OURS}
"""By the names that the command line takes, in the order of the tables' columns."""
