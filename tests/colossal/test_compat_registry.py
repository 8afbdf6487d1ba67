from __future__ import annotations

import importlib
import importlib.util
import sys
import uuid
from pathlib import Path
from types import ModuleType

import pytest

from fp8booster.colossal import compat
from fp8booster.colossal.compat import registry
from fp8booster.colossal.compat.registry import Mend
from fp8booster.colossal.patch import Patch


@pytest.fixture
def module_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module, not imported yet, with `value = 1` and with `seen`, whether `stand_in` could be imported."""
    name = f"module_{uuid.uuid4().hex}"
    (tmp_path / f"{name}.py").write_text("import sys\nvalue = 1\nseen = 'stand_in' in sys.modules\n")
    monkeypatch.syspath_prepend(tmp_path)
    return name


def _mend(module: str, repair, during_import: bool = False) -> Mend:
    return Mend("a_mend", module, "a.py:1", "always", during_import, repair)


def _set_value(module: ModuleType, patch: Patch) -> None:
    """Set the value."""
    if module.value == 1:
        patch.set(module, "value", 2)


def test_a_module_is_mended_at_its_import(module_name: str) -> None:
    mend = _mend(module_name, _set_value)
    mend.watch()
    assert mend.state is compat.State.WAITING
    module = importlib.import_module(module_name)
    assert (module.value, mend.state, mend.summary) == (2, compat.State.APPLIED, "Set the value.")
    mend.leave_out()
    assert (module.value, mend.state) == (1, compat.State.LEFT_OUT)


def test_an_imported_module_is_mended_at_once(module_name: str) -> None:
    module = importlib.import_module(module_name)
    _mend(module_name, _set_value).watch()
    assert module.value == 2


def test_a_repaired_upstream_is_left_alone(module_name: str) -> None:
    module = importlib.import_module(module_name)
    module.value = 3
    mend = _mend(module_name, _set_value)
    mend.watch()
    assert (module.value, mend.state) == (3, compat.State.NOT_NEEDED)


def test_a_mend_left_out_before_the_import_stays_out(module_name: str) -> None:
    mend = _mend(module_name, _set_value)
    mend.watch()
    mend.leave_out()
    assert importlib.import_module(module_name).value == 1


def test_a_stand_in_lasts_for_the_import_only(module_name: str) -> None:
    mend = _mend(module_name, lambda patch: patch.add_module(ModuleType("stand_in")), during_import=True)
    mend.watch()
    assert importlib.import_module(module_name).seen
    assert "stand_in" not in sys.modules
    assert mend.state is compat.State.APPLIED


def test_the_loader_keeps_its_type(module_name: str) -> None:
    _mend(module_name, _set_value).watch()
    module = importlib.import_module(module_name)
    assert isinstance(module.__spec__.loader, importlib.machinery.SourceFileLoader)


def test_apply_refuses_an_unknown_name() -> None:
    with pytest.raises(ValueError, match=r"no mend is called 'warp_drive'; the mends are .*async"):
        compat.apply(without=("warp_drive",))


def test_only_an_applied_mend_is_taken_out() -> None:
    with pytest.raises(ValueError, match="cannot be taken out: it"), compat.taken_out("galore_torch_is_optional"):
        pass


def test_a_mend_is_taken_out_beneath_one_that_wraps_it(module_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    repairs = {
        "lower": lambda module, patch: patch.set(module, "value", module.value + 10),
        "upper": lambda module, patch: patch.set(module, "value", module.value * 2),
    }
    both = {name: Mend(name, module_name, "a.py:1", "always", False, repair) for name, repair in repairs.items()}
    monkeypatch.setattr(registry, "_MENDS", both)
    monkeypatch.setattr(registry, "_watched", set(both))
    for mend in both.values():
        mend.watch()
    module = importlib.import_module(module_name)
    for name, without in (("lower", 2), ("upper", 11)):
        with compat.taken_out(name):
            assert module.value == without
        assert module.value == (1 + 10) * 2
    compat.apply(without=("lower",))
    assert module.value == 2


@pytest.mark.parametrize("mend", compat.mends(), ids=lambda mend: mend.name)
def test_each_mend_says_what_it_mends(mend: Mend) -> None:
    colossalai = Path(importlib.util.find_spec("colossalai").submodule_search_locations[0])
    assert (colossalai / mend.place.partition(":")[0]).is_file()
    assert mend.summary.endswith(".")
    assert "Without it" in mend.repair.__doc__
    assert "No longer needed when" in " ".join(mend.repair.__doc__.split())
    assert mend.needed_when
