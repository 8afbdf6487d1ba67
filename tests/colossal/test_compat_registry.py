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
from fp8booster.colossal.compat.registry import Kind, Patch, Replacements


@pytest.fixture
def module_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module, not imported yet, with `value = 1` and with `seen`, whether `stand_in` could be imported."""
    name = f"module_{uuid.uuid4().hex}"
    (tmp_path / f"{name}.py").write_text("import sys\nvalue = 1\nseen = 'stand_in' in sys.modules\n")
    monkeypatch.syspath_prepend(tmp_path)
    return name


def _patch(module: str, repair, during_import: bool = False) -> Patch:
    return Patch("a_patch", module, "a.py:1", "always", Kind.UPSTREAM, repair, during_import)


def _set_value(module: ModuleType, replacements: Replacements) -> None:
    """Set the value."""
    if module.value == 1:
        replacements.set(module, "value", 2)


def test_a_module_is_patched_at_its_import(module_name: str) -> None:
    patch = _patch(module_name, _set_value)
    patch.watch()
    assert patch.state is compat.State.WAITING
    module = importlib.import_module(module_name)
    assert (module.value, patch.state, patch.summary) == (2, compat.State.APPLIED, "a patch")
    patch.leave_out()
    assert (module.value, patch.state) == (1, compat.State.LEFT_OUT)


def test_an_imported_module_is_patched_at_once(module_name: str) -> None:
    module = importlib.import_module(module_name)
    _patch(module_name, _set_value).watch()
    assert module.value == 2


def test_a_repaired_upstream_is_left_alone(module_name: str) -> None:
    module = importlib.import_module(module_name)
    module.value = 3
    patch = _patch(module_name, _set_value)
    patch.watch()
    assert (module.value, patch.state) == (3, compat.State.NOT_NEEDED)


def test_a_patch_left_out_before_the_import_stays_out(module_name: str) -> None:
    patch = _patch(module_name, _set_value)
    patch.watch()
    patch.leave_out()
    assert importlib.import_module(module_name).value == 1


def test_a_stand_in_lasts_for_the_import_only(module_name: str) -> None:
    patch = _patch(
        module_name,
        lambda replacements: replacements.set_item(sys.modules, "stand_in", ModuleType("stand_in")),
        during_import=True,
    )
    patch.watch()
    assert importlib.import_module(module_name).seen
    assert "stand_in" not in sys.modules
    assert patch.state is compat.State.APPLIED


def test_a_stand_in_for_a_package_lasts_while_any_of_its_modules_runs(tmp_path: Path, module_name: str) -> None:
    """Also after one that it imported itself; and another module finds it again later."""
    package = tmp_path / f"package_of_{module_name}"
    package.mkdir()
    asks = "import sys\nseen = 'stand_in' in sys.modules\n"
    (package / "inner.py").write_text(asks)
    (package / "__init__.py").write_text(f"from . import inner\nfrom {module_name} import value\n" + asks)
    (package / "later.py").write_text(asks)
    patch = _patch(
        package.name,
        lambda replacements: replacements.set_item(sys.modules, "stand_in", ModuleType("stand_in")),
        during_import=True,
    )
    patch.watch()
    outer = importlib.import_module(package.name)
    assert outer.inner.seen
    assert outer.seen
    assert "stand_in" not in sys.modules
    assert importlib.import_module(f"{package.name}.later").seen
    assert "stand_in" not in sys.modules


def test_the_loader_keeps_its_type(module_name: str) -> None:
    _patch(module_name, _set_value).watch()
    module = importlib.import_module(module_name)
    assert isinstance(module.__spec__.loader, importlib.machinery.SourceFileLoader)


def test_apply_refuses_an_unknown_name() -> None:
    with pytest.raises(ValueError, match=r"no patch is called 'warp_drive'; the patches are .*async"):
        compat.apply(without=("warp_drive",))


def test_only_an_applied_patch_is_taken_out() -> None:
    with (
        pytest.raises(ValueError, match="cannot be taken out: it"),
        compat.taken_out("missing_imports_are_late_errors"),
    ):
        pass


def test_a_patch_is_taken_out_beneath_one_that_wraps_it(module_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    repairs = {
        "lower": lambda module, each: each.set(module, "value", module.value + 10),
        "upper": lambda module, each: each.set(module, "value", module.value * 2),
    }
    both = {
        name: Patch(name, module_name, "a.py:1", "always", Kind.UPSTREAM, repair) for name, repair in repairs.items()
    }
    monkeypatch.setattr(registry, "_PATCHES", both)
    monkeypatch.setattr(registry, "_watched", set(both))
    for patch in both.values():
        patch.watch()
    module = importlib.import_module(module_name)
    for name, without in (("lower", 2), ("upper", 11)):
        with compat.taken_out(name):
            assert module.value == without
        assert module.value == (1 + 10) * 2
    compat.apply(without=("lower",))
    assert module.value == 2


@pytest.mark.parametrize("patch", compat.patches(), ids=lambda patch: patch.name)
def test_each_patch_says_what_it_changes(patch: Patch) -> None:
    colossalai = Path(importlib.util.find_spec("colossalai").submodule_search_locations[0])
    assert (colossalai / patch.place.partition(":")[0]).is_file()
    assert patch.repair.__doc__.startswith("Without it")
    if patch.kind is Kind.FP8:  # of a defect, `test_compat.py` finds that it is gone
        assert "No longer needed when" in " ".join(patch.repair.__doc__.split())
    assert patch.needed_when


def test_wrappers_stand_where_functions_and_methods_were(module_name: str) -> None:
    module = importlib.import_module(module_name)
    module.double = lambda number: 2 * number
    module.Adder = type("Adder", (), {"add": staticmethod(lambda number: number + 1), "value": lambda self: 3})
    module.double.__module__ = module_name
    replacements = Replacements()
    for target in ("double", "Adder.add", "Adder.value"):
        replacements.wrap(module, target, lambda upstream, *args: -upstream(*args))
    assert (module.double(3), module.Adder.add(3), module.Adder().value()) == (-6, -4, -3)
    replacements.undo()
    assert (module.double(3), module.Adder.add(3), module.Adder().value()) == (6, 4, 3)
