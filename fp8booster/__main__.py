"""`python -m fp8booster`, and `torchrun -m fp8booster train` on many nodes."""

from fp8booster.cli.main import app

app(prog_name="fp8booster")
