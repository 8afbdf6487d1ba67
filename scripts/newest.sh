#!/usr/bin/env bash
# Makes the virtual environment $VENV, or brings it up to date, with the newest releases that pyproject.toml allows.
#
# Not with its `dev`, which holds Triton to what CPU builds of an older PyTorch are tested with.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv-newest}

"$PYTHON" -m venv "$VENV"
python=$VENV/bin/python
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
"$python" -m pip install --quiet --upgrade --upgrade-strategy eager --editable '.[data]' \
  accelerate compressed-tensors triton trl pytest pytest-xdist setuptools
"$python" -m fp8booster doctor --fix --no-speed
