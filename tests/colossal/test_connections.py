"""CUDA_DEVICE_MAX_CONNECTIONS is what the user has set, whichever package is imported first."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fp8booster.colossal.compat.connections import VARIABLE

_IMPORTS = {
    "fp8booster first": "import fp8booster.plugins",
    "colossalai first": "import colossalai, fp8booster.plugins",
    "set in Python": f"import os; os.environ['{VARIABLE}'] = '2'; import fp8booster.plugins",
}


@pytest.mark.parametrize("given", [None, "1", "4"])
@pytest.mark.parametrize("first", list(_IMPORTS))
def test_what_the_user_has_set_is_kept(first: str, given: str | None) -> None:
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    if given is not None:
        environment[VARIABLE] = given
    script = f"{_IMPORTS[first]}; import os; print(os.environ.get('{VARIABLE}'))"
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    expected = "2" if first == "set in Python" else str(given)
    assert result.stdout.split()[-1] == expected


def test_a_gpu_that_is_in_use_is_told_of() -> None:
    script = (
        "import colossalai, torch; torch.cuda.is_initialized = lambda: True; "
        f"import fp8booster.plugins, os; print(os.environ['{VARIABLE}'])"
    )
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    result = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert result.stdout.split()[-1] == "1"
    assert "import fp8booster.plugins before the first use of a GPU" in result.stderr
