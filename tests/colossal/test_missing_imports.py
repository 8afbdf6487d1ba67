"""What colossalai imports and the installed packages do not have is refused when it is used."""

from __future__ import annotations

import importlib
import subprocess
import sys
from abc import ABC
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
from transformers import cache_utils

from fp8booster.colossal.compat.environment import missing_imports_are_late_errors
from fp8booster.colossal.compat.registry import Replacements
from fp8booster.colossal.sharding import SHARDED_TRANSFORMERS
from tests.distributed import TEST_SECONDS

OF_TRANSFORMERS = "from transformers.cache_utils import Cache, NoCache\nfrom transformers.no_masks import mask, MASKS\n"


@pytest.fixture
def run() -> Callable[..., dict]:
    """Run the code of a module as it is imported, and return what it defines."""

    def run_module(code: str, name: str = "colossalai.shardformer") -> dict:
        replacements, defined = Replacements(), {"__name__": name}
        missing_imports_are_late_errors(replacements)
        try:
            exec(code, defined)
        finally:
            replacements.undo()
        return defined

    return run_module


def test_a_name_that_transformers_has_no_more_is_refused_when_it_is_used(run: Callable[..., dict]) -> None:
    made = run(OF_TRANSFORMERS + "class Longer(NoCache): ...\n")
    assert made["Cache"] is cache_utils.Cache
    assert not isinstance(made["Cache"], made["NoCache"])
    uses: dict[str, list[Callable[[], object]]] = {
        "cache_utils.NoCache": [made["NoCache"], made["Longer"], lambda: made["NoCache"].from_legacy()],
        "no_masks.mask": [lambda: made["mask"](1, size=2)],
        "no_masks.MASKS": [lambda: made["MASKS"]["sdpa"]],
    }
    for name, refused in uses.items():
        for use in refused:
            with pytest.raises(ImportError) as raised:
                use()
            assert str(raised.value) == (
                f"colossalai.shardformer needs transformers.{name}, which transformers {version('transformers')} does "
                f"not have: pip install transformers=={SHARDED_TRANSFORMERS}"
            )
    assert not hasattr(cache_utils, "NoCache")
    assert "transformers.no_masks" not in sys.modules


@pytest.mark.parametrize(
    ("code", "name"),
    [
        pytest.param(OF_TRANSFORMERS, "peft.tuners", id="by another package"),
        pytest.param(OF_TRANSFORMERS, "colossalai_extra", id="by one whose name begins alike"),
        pytest.param("def use():\n  from transformers.no_masks import mask\nuse()", "colossalai.a", id="in a function"),
        pytest.param("import transformers.no_masks", "colossalai.a", id="of a module alone"),
        pytest.param("from torch.no_masks import mask", "colossalai.a", id="of a package that training needs"),
    ],
)
def test_other_imports_fail_as_they_did(run: Callable[..., dict], code: str, name: str) -> None:
    with pytest.raises(ImportError, match=r"NoCache|no_masks"):
        run(code, name)


def test_a_package_that_is_there_and_lacks_something_itself_says_what(
    run: Callable[..., dict], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "galore_torch.py").write_text("import a_package_that_nobody_has\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    with pytest.raises(ModuleNotFoundError, match="a_package_that_nobody_has"):
        run("from galore_torch import GaLoreAdamW", "colossalai.nn.optimizer")


USED_AS_IMPORTED = """
from abc import ABC
from typing import Optional
from transformers.no_utils import Base, MASKS, add_docstring, is_here, logging
logger = logging.get_logger(__name__)
here = "yes" if is_here() else "no"
made = [each for each in MASKS] + [MASKS["sdpa"].count]
class Policy(Base, ABC):
    @add_docstring("text")
    def forward(self, cache: Base | None = None, other: Optional[Base] = MASKS.default): ...
"""


def test_uses_of_missing_names_while_a_module_is_imported_are_refused_afterwards(run: Callable[..., dict]) -> None:
    made = run(USED_AS_IMPORTED)
    assert made["here"] == "no"
    assert issubclass(made["Policy"], ABC)
    late = (made["Policy"], made["Policy"].forward, made["made"][0], lambda: made["logger"].warning("a text"))
    for use in late:
        with pytest.raises(ImportError, match=r"^colossalai\.shardformer needs transformers\.no_utils\.\w+, which"):
            use()


@pytest.mark.parametrize(("seed", "share"), [(0, 1.0), (1, 0.5), (2, 0.1)])
def test_plugins_are_imported_whatever_a_release_lacks(seed: int, share: float) -> None:
    program = [sys.executable, "-m", "tests.colossal.thinned", str(seed), str(share)]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=TEST_SECONDS)
    assert done.returncode == 0, done.stderr
    missing, refused = map(int, done.stdout.split())
    assert missing > 0
    assert refused > 0
