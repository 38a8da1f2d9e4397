"""Documents that would hang or exhaust a run are rejected with one message."""

import json

import pytest

from lightning_gnn.collective.plan import CollectivePlan, Duration, StageTimes
from lightning_gnn.hyscale.drm import read_decisions
from lightning_gnn.runtime.files import LARGEST, read_json, read_text, read_yaml, write_whole
from tests.refusals import refuses

REFUSED = ["[" * 50_000, "- " * 50_000, "{a: 1", "a: !!python/object/apply:os.system [ls]"]


@pytest.mark.medium
@pytest.mark.parametrize("text", REFUSED)
def test_yaml(tmp_path, text):
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    refuses(ValueError, "not YAML", read_yaml, text)
    refuses(ValueError, r"(?s)^.{0,999}$", CollectivePlan.load, path)  # long content is abbreviated
    refuses(ValueError, r"(?s)plan\.yaml is not a valid plan of collective .*not YAML", CollectivePlan.load, path)


def test_wrong_values_are_shown_in_short():
    for text in (str(["x" * 1000] * 100), f"mode: {'x' * 100_000}\ngpu_buffer_size: 1\ncpu_buffer_size: 1"):
        refuses(ValueError, r"(?s)^.{0,900}but is.{0,900}$", CollectivePlan.from_yaml, text)


def test_json():
    assert read_json('{"a": [1]}') == {"a": [1]}
    refuses(ValueError, "nested too deeply", read_json, "[" * 100_000)
    deep = json.dumps({"mapping": 1})[:-1] + ', "b":' + "[" * 100_000
    refuses(ValueError, r"line 1 of the decision log is not a decision: .*nested too deeply", read_decisions, [deep])


def test_only_regular_files_of_a_bounded_size_are_read(tmp_path):
    import os

    os.mkfifo(tmp_path / "pipe")
    refuses(ValueError, "pipe is not a regular file", read_text, tmp_path / "pipe")
    refuses(ValueError, "not a regular file", CollectivePlan.load, tmp_path)
    (tmp_path / "large").write_bytes(bytes(LARGEST + 1))
    refuses(ValueError, r"large has 131073 bytes, but such a file has at most 131072", read_text, tmp_path / "large")
    (tmp_path / "latin").write_bytes(b"m\xf6de: cpu")
    refuses(ValueError, "latin is not a valid plan", CollectivePlan.load, tmp_path / "latin")


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "plan.yaml"
    write_whole(path, "old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    refuses(OSError, "No space left", write_whole, path, "new")
    assert path.read_text() == "old"
    assert [found.name for found in tmp_path.iterdir()] == ["plan.yaml"]


def test_plans_that_were_cut(tmp_path):
    times = StageTimes(Duration(0.08, 0.004), Duration(0.002), Duration(0.004), Duration(0.003), Duration(0.005), 8)
    epochs = {"collective": 1.0, "cpu": 3.0}
    path, plan = tmp_path / "plan.yaml", CollectivePlan("collective", 8, 3, 100, 2.5, times, epochs, 4)
    plan.save(path)
    assert CollectivePlan.load(path) == plan
    whole = path.read_text()
    for at in range(0, len(whole) - 4, 7):
        path.write_text(whole[:at])
        refuses(ValueError, r"plan\.yaml is not a valid plan of collective batching: ", CollectivePlan.load, path)
