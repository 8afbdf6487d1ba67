from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8booster.reading import faults_named, is_of, read_index, read_record, require_rows
from tests.colossal.payload import Payload

FIELDS = {"step": int, "lr": float, "name": (str, type(None)), "rows": list}
WHOLE = {"step": 3, "lr": 1, "name": None, "rows": [], "of another version": True}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"step": 3', "a.json is not JSON, or not all of it; copy it again."),
        ("", "a.json is not JSON"),
        ("[" * 100_000, "a.json is not JSON"),
        ("null", "a.json holds null where an object belongs"),
        ("[]", "a.json holds a list where an object belongs"),
        ('{"lr": 1}', "a.json has no 'step'; copy it again."),
        (json.dumps(WHOLE | {"step": "3"}), "'step' in .*a.json is text where a whole number belongs"),
        (json.dumps(WHOLE | {"step": 3.5}), "'step' in .*a.json is a number where a whole number belongs"),
        (json.dumps(WHOLE | {"step": True}), "'step' in .*a.json is true or false where a whole number"),
        (json.dumps(WHOLE | {"name": 3}), "'name' in .*a.json is a whole number where text or null belongs"),
    ],
)
def test_a_record_that_is_wrong_is_named_with_its_fault_and_the_remedy(tmp_path, text, says) -> None:
    file = tmp_path / "a.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=says):
        read_record(file, FIELDS, "copy it again")


def test_a_record_that_is_missing_or_not_text_is_named(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"a.json is missing; copy it again."):
        read_record(tmp_path / "a.json", FIELDS, "copy it again")
    (tmp_path / "a.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"a.json is not text; copy it again."):
        read_record(tmp_path / "a.json", FIELDS, "copy it again")


def test_a_whole_record_is_read_with_what_is_not_asked_for(tmp_path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(WHOLE))
    assert read_record(tmp_path / "a.json", FIELDS, "copy it again") == WHOLE


@pytest.mark.parametrize("name", ["../a.bin", "/etc/passwd", "b/../../a.bin", "..\\a.bin"])
@pytest.mark.parametrize("place", ["weight_map", "param_groups"])
def test_an_index_that_leads_out_of_its_folder_is_not_to_be_trusted(tmp_path, name, place) -> None:
    index = {"weight_map": {}, "metadata": {}}
    index["weight_map" if place == "weight_map" else "metadata"] = {place: name}
    (tmp_path / "model.index.json").write_text(json.dumps({"weight_map": {}} | index))
    with pytest.raises(ValueError, match=r"outside of its folder, .*: do not trust this checkpoint"):
        read_index(tmp_path / "model.index.json", "copy it again")


def test_an_index_names_files_that_are_there(tmp_path) -> None:
    (tmp_path / "model.index.json").write_text(json.dumps({"weight_map": {"a": "parts/1.bin"}}))
    with pytest.raises(ValueError, match=r"1.bin is missing, which .*model.index.json names; copy it again"):
        read_index(tmp_path / "model.index.json", "copy it again")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "1.bin").touch()
    assert read_index(tmp_path / "model.index.json", "copy it again")["weight_map"] == {"a": "parts/1.bin"}


@pytest.mark.parametrize("form", ["zip", "legacy", "pickle", "unknown class"])
def test_code_in_a_file_does_not_run_and_is_not_recommended(tmp_path, form) -> None:
    file, payload = tmp_path / "part.pt", Payload(tmp_path / "ran")
    if form == "pickle":
        file.write_bytes(pickle.dumps(payload, protocol=2))
    else:
        content = Path("/") if form == "unknown class" else payload
        torch.save({"weight": content}, file, _use_new_zipfile_serialization=form != "legacy")
    with pytest.raises(ValueError, match=r"part.pt .* do not trust this checkpoint") as caught, faults_named():
        torch.load(file)
    assert "weights_only" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [b"", b"hello\n", b"\x80", "half", "half of safetensors"])
def test_a_damaged_file_is_named(tmp_path, content) -> None:
    file = tmp_path / ("part.safetensors" if content == "half of safetensors" else "part.pt")
    (save_file if file.suffix == ".safetensors" else torch.save)({"weight": torch.ones(999)}, file)
    file.write_bytes(file.read_bytes()[:1000] if isinstance(content, str) else content)
    with pytest.raises(ValueError, match=f"{file.name} is damaged") as caught, faults_named():
        (load_file if file.suffix == ".safetensors" else torch.load)(str(file))
    assert "weights_only" not in str(caught.value)


def test_errors_that_are_not_of_a_file_pass(tmp_path) -> None:
    with pytest.raises(RuntimeError, match=r"size mismatch"), faults_named():
        torch.nn.Linear(2, 2).load_state_dict({"weight": torch.ones(3, 3), "bias": torch.ones(2)})
    with pytest.raises(FileNotFoundError), faults_named():
        torch.load(tmp_path / "absent.pt")


def test_a_row_of_a_list_is_named() -> None:
    require_rows([{"name": "a"}], "'rows' in a.json", {"name": str}, "copy it again")
    for row, says in (({}, "has no 'name'"), ({"name": 1}, "is a whole number where text"), ([], "is a list where an")):
        with pytest.raises(ValueError, match=says):
            require_rows([{"name": "a"}, row], "'rows' in a.json", {"name": str}, "copy it again")


@pytest.mark.parametrize("kind", [int, float])
def test_a_number_is_one_of_64_bits(kind) -> None:
    assert is_of(2**63 - 1, kind)
    assert is_of(-(2**63) + 1, kind)
    assert not is_of(2**63, kind)
    assert not is_of(-(10**400), kind)
