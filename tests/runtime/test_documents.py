"""Documents that would hang or exhaust a run are refused with one message."""

import json

import pytest

from lightning_gnn.collective.plan import CollectivePlan
from lightning_gnn.hyscale.decisions import read_decisions
from lightning_gnn.runtime.files import LARGEST, read_json, read_text, read_yaml, write_whole

REFUSED = [
    ("[" * 50_000, "not YAML"),
    ("- " * 50_000, "not YAML"),
    ("{a: 1", "not YAML"),
    ("a: !!python/object/apply:os.system [ls]", "not YAML"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_yaml(tmp_path, text, message):
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_yaml(text)
    with pytest.raises(
        ValueError, match=rf"(?s)plan\.yaml holds no plan of collective batching: .*{message}"
    ) as caught:
        CollectivePlan.load(path)
    assert len(str(caught.value)) < 1000


def test_wrong_values_are_shown_in_short(tmp_path):
    for text in (str(["x" * 1000] * 100), f"mode: {'x' * 100_000}\ngpu_buffer_size: 1\ncpu_buffer_size: 1"):
        with pytest.raises(ValueError, match="but is") as caught:
            CollectivePlan.from_yaml(text)
        assert len(str(caught.value)) < 1000


def test_json():
    assert read_json('{"a": [1]}') == {"a": [1]}
    with pytest.raises(ValueError, match="nested too deeply"):
        read_json("[" * 100_000)
    with pytest.raises(ValueError, match=r"line 1 of the decision log is no decision: .*nested too deeply"):
        read_decisions([json.dumps({"mapping": 1})[:-1] + ', "b":' + "[" * 100_000])


def test_only_regular_files_of_a_bounded_size_are_read(tmp_path):
    import os

    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe is no regular file"):
        read_text(tmp_path / "pipe")
    with pytest.raises(ValueError, match="no regular file"):
        CollectivePlan.load(tmp_path)
    (tmp_path / "large").write_bytes(bytes(LARGEST + 1))
    with pytest.raises(ValueError, match=r"large has 131073 bytes, but such a file has at most 131072"):
        read_text(tmp_path / "large")
    (tmp_path / "latin").write_bytes(b"m\xf6de: cpu")
    with pytest.raises(ValueError, match="latin holds no plan"):
        CollectivePlan.load(tmp_path / "latin")


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "plan.yaml"
    write_whole(path, "old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert [found.name for found in tmp_path.iterdir()] == ["plan.yaml"]
