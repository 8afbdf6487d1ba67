#!/usr/bin/env bash
# Makes the virtual environment $VENV with everything that fp8booster needs, from the interpreter $PYTHON.
#
# A PyTorch that $PYTHON already has is used if it is new enough; otherwise $TORCH is installed. From then on pip is
# held to that PyTorch. colossalai comes last and without its dependencies, for its metadata pins torch<=2.5.1.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}
TORCH=${TORCH:-torch==2.13.0}

say() { printf '\033[1m%s\033[0m\n' "$*"; }

# Prints the version of the interpreter's PyTorch; fails where it is missing, broken or too old.
torch_of() {
  "$1" -c 'import torch; print(torch.__version__); exit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11))' 2>/dev/null
}

"$PYTHON" -c 'import sys; exit(sys.version_info < (3, 10))' 2>/dev/null || {
  echo "fp8booster needs Python 3.10 or newer, and $PYTHON is none; choose another with make PYTHON=..." >&2
  exit 1
}

if [ ! -x "$VENV/bin/python" ]; then
  if version=$(torch_of "$PYTHON"); then
    say "Making $VENV, with PyTorch $version of $PYTHON"
    "$PYTHON" -m venv --system-site-packages "$VENV"
    # Where $PYTHON is itself in a virtual environment, its packages are not among the system's.
    "$PYTHON" -c 'import site, sys
if sys.prefix != sys.base_prefix: print(*site.getsitepackages(), sep="\n")' >"$VENV/parent.pth"
    mv "$VENV/parent.pth" "$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/"
  else
    say "Making $VENV"
    "$PYTHON" -m venv "$VENV"
  fi
fi
python=$VENV/bin/python
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
"$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip --upgrade

if ! torch_of "$python" >/dev/null; then
  say "Installing $TORCH"
  "$python" -m pip install --quiet "$TORCH"
fi
version=$(torch_of "$python") || {
  echo "PyTorch 2.11 or newer is needed and $TORCH did not bring it; choose another with make TORCH=torch==..." >&2
  exit 1
}

say "Installing fp8booster beside PyTorch $version"
constraints=$VENV/constraints.txt
# The version by which pip knows it, from which PyTorch's own may differ by a suffix such as +cu130.
installed=$("$python" -c 'from importlib.metadata import version; print(version("torch"))')
{ grep -v '^torch<' constraints.txt; echo "torch==$installed"; } >"$constraints"
"$python" -m pip install --quiet --constraint "$constraints" --editable '.[dev]'
"$python" -m pip install --quiet --no-deps colossalai==0.5.0
