"""``lgnn predict``: tables with the model's outputs, and with the names of nodes if available."""

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from lightning_gnn.cli import predictions
from lightning_gnn.cli.predictions import check_format, node_names, write_parquet
from lightning_gnn.datasets.folder import save_folder
from lightning_gnn.datasets.synthetic import planted_power_law
from tests.cli.command import NODE, lgnn
from tests.refusals import refuses


def test_names_of_nodes_and_formats_that_there_are(tmp_path, monkeypatch):
    cfg = OmegaConf.create({"data": {"root": str(tmp_path)}})
    assert node_names(cfg, None, 2) is None
    assert node_names(OmegaConf.create({"data": {}}), None, 2) is None
    (tmp_path / "ids.txt").write_text("Ann\nBob Ü.\n", encoding="utf-8")
    assert node_names(cfg, None, 2) == ["Ann", "Bob Ü."]
    refuses(ValueError, "has 2 lines, but the graph has 3 nodes; write one line per node", node_names, cfg, None, 3)
    (tmp_path / "nodes/user").mkdir(parents=True)
    (tmp_path / "nodes/user/ids.txt").write_text("x")
    assert node_names(cfg, "user", 1) == ["x"]
    check_format("npy")
    refuses(ValueError, "predictions=csv is unknown; use one of npy, parquet", check_format, "csv")
    monkeypatch.setattr(predictions, "find_spec", lambda name: None)
    refuses(ModuleNotFoundError, r"pip install 'lightning-gnn\[parquet\]'", check_format, "parquet")


def test_a_table_is_written_in_parts(tmp_path, monkeypatch):
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(predictions, "_ROWS_PER_GROUP", 3)
    logits = torch.randn(7, 4, generator=torch.Generator().manual_seed(0)) * 3
    names = [f"paper {i}" for i in range(7)]
    said = write_parquet(logits, tmp_path / "predictions.parquet", "node", names)
    assert said == "predictions.parquet: 7 rows of id, class, p0, …, p3"
    table = parquet.read_table(tmp_path / "predictions.parquet")
    assert parquet.ParquetFile(tmp_path / "predictions.parquet").num_row_groups == 3
    assert table["id"].to_pylist() == names
    assert table["class"].to_pylist() == logits.argmax(1).tolist()
    np.testing.assert_allclose(table["p2"].to_numpy(), logits.softmax(1)[:, 2].numpy(), rtol=1e-5)
    assert [path.name for path in tmp_path.iterdir()] == ["predictions.parquet"]


@pytest.mark.slow
def test_a_run_writes_what_the_other_format_holds(tmp_path, capfd):
    parquet = pytest.importorskip("pyarrow.parquet")
    data = planted_power_law(300, 2000, 3, 8, split=(0.4, 0.2, 0.2))
    save_folder(data, tmp_path / "graph")
    (tmp_path / "graph/ids.txt").write_text("".join(f"node {i}\n" for i in range(300)))
    base = ["data=custom", f"data.root={tmp_path}/graph", *(item for item in NODE if not item.startswith("data."))]
    assert lgnn(tmp_path / "train", base=base) == 0
    given = [f"ckpt_path={tmp_path}/train/checkpoints/best.ckpt", "inference=full"]
    assert lgnn(tmp_path / "npy", *given, base=[], command=["predict"]) == 0
    assert lgnn(tmp_path / "parquet", *given, "predictions=parquet", base=[], command=["predict"]) == 0
    assert "predictions.parquet: 300 rows of id, class, p0, p1, p2" in capfd.readouterr().out
    logits = torch.from_numpy(np.load(tmp_path / "npy/predictions.npy"))
    table = parquet.read_table(tmp_path / "parquet/predictions.parquet").to_pydict()
    assert table["id"] == [f"node {i}" for i in range(300)]
    assert table["class"] == logits.argmax(1).tolist()
    np.testing.assert_allclose(table["p1"], logits.softmax(1)[:, 1].numpy(), rtol=1e-5, atol=1e-7)
