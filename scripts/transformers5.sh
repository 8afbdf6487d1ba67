#!/usr/bin/env bash
# Makes the virtual environment $VENV5: the packages of $VENV, and above them the newest transformers.
#
# Only what differs is installed: transformers and peft of constraints-transformers5.txt, what these need newer, and
# compressed-tensors, which reads what export writes, and TRL.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=${VENV:-.venv}
VENV5=${VENV5:-.venv-transformers5}

"$VENV/bin/python" -m venv --system-site-packages --without-pip "$VENV5"
python=$VENV5/bin/python
# What $VENV has, and what $VENV itself inherits; the editable install in it is a .pth file, which a .pth does not run.
"$VENV/bin/python" -c 'import os, sys
seen = [path for path in sys.path if path.endswith("-packages")]
print(*seen, os.getcwd(), sep="\n")' >"$VENV5/parent.pth"
mv "$VENV5/parent.pth" "$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/"

export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
"$VENV/bin/python" -m pip --python "$python" install --quiet --constraint constraints-transformers5.txt \
  transformers peft compressed-tensors trl
