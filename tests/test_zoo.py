"""Model zoo: each model trains as documented, and the page shows the measured results."""

import importlib
import json
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent


@pytest.fixture
def zoo(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.models.zoo")


def test_the_page_has_the_table_of_the_results(zoo):
    result = json.loads((zoo.PAGE.parents[1] / "benchmarks/results/zoo.json").read_text())
    page = zoo.PAGE.read_text(encoding="utf-8")
    assert zoo.written(page, result) == page, "run python -m benchmarks.models.zoo"
    for row in result["rows"]:
        assert len(row["values"]) == 5
        assert tuple(row["machine"]) == zoo.MACHINE
        assert row["mean"] == pytest.approx(sum(row["values"]) / 5, abs=0.006)
    rows = {row["name"]: row for row in result["rows"]}
    for name, published in zoo.PUBLISHED.items():
        for data, value in zip(zoo.DATA, published, strict=True):
            if (row := rows.get(f"{name} on {data}")) is not None:
                assert abs(row["mean"] - value) < 2  # the papers report means over a hundred seeds


@pytest.mark.slow
def test_all_train_and_what_is_measured_before_can_be_kept(zoo, tmp_path, capsys):
    threads = torch.get_num_threads()
    try:
        first = zoo.main(["--quick", "--runs", "2", "--out", str(tmp_path / "zoo.json")])
        zoo.main(["--quick", "--runs", "2", "--only", "GIN", "--add", str(tmp_path / "zoo.json"), "--out",
                  str(tmp_path / "more.json")])  # fmt: skip
    finally:
        torch.set_num_threads(threads)
    assert all(tuple(row["machine"]) == zoo.MACHINE for row in first["rows"])
    assert [row["name"] for row in first["rows"]] == [f"{name} on synthetic" for name in zoo.MODELS]
    assert all(0 <= row["min"] <= row["mean"] <= row["max"] <= 100 for row in first["rows"])
    again = json.loads((tmp_path / "more.json").read_text())
    assert {row["name"] for row in again["rows"]} == {row["name"] for row in first["rows"]}
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["more.json", "zoo.json"]


@pytest.mark.slow
def test_settings_of_papers_are_those_of_the_experiments(zoo):
    with zoo.initialize_config_module("lightning_gnn.conf", version_base="1.3"):
        for name in (*zoo.MODELS, *zoo.TUNED):
            for data in (*zoo.DATA, "PubMed") if name in zoo.TUNED else ("PubMed",):  # one file for all
                cfg = zoo.compose("train", overrides=zoo.overrides_of(name, data))
                assert cfg.data.name == data
                assert cfg.datamodule._target_.endswith("FullGraphDataModule")
                assert cfg.trainer.max_epochs >= 200
                assert cfg.task.weight_decay > 0
