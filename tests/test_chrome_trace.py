"""The stages of a mini-batch have names in the Chrome traces of Lightning's and torch's profilers."""

import json

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.profilers import PyTorchProfiler

from lightning_gnn.collective.datamodule import CollectiveDataModule
from lightning_gnn.collective.plan import CollectivePlan
from lightning_gnn.datamodules.node import NeighborDataModule
from lightning_gnn.datasets.synthetic import planted_power_law
from lightning_gnn.nn import GraphSAGE, NodeClassifier

SIZES = {"num_neighbors": [4, 4], "batch_size": 10, "num_workers": 1, "seed": 1}
PLAN = CollectivePlan("collective", 2, 1)
STAGES = {"lightning_gnn::sampling", "lightning_gnn::feature_loading"}


ROUTE = {"gpu_route": "cpu", "plan": PLAN}


@pytest.mark.medium
@pytest.mark.parametrize(
    ("kind", "options", "stages"),
    [
        (NeighborDataModule, {}, STAGES),
        (NeighborDataModule, {"num_workers": 0}, STAGES),
        (CollectiveDataModule, ROUTE, STAGES | {"lightning_gnn::transfer"}),
    ],
    ids=["a worker", "no worker", "collective"],
)
def test_a_chrome_trace_of_lightnings_profiler_names_the_stages(tmp_path, kind, options, stages):
    data = planted_power_law(300, 2000, 3, 8, split=(0.5, 0.2, 0.2))
    profiler = PyTorchProfiler(
        dirpath=tmp_path,
        record_module_names=False,
        schedule=torch.profiler.schedule(wait=0, warmup=1, active=5),
        experimental_config=torch.profiler._ExperimentalConfig(profile_all_threads=True),
    )
    trainer = pl.Trainer(
        max_epochs=1, profiler=profiler, accelerator="cpu", limit_val_batches=0, logger=False,
        enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(NodeClassifier(GraphSAGE(8, 8, 2, 3), 3), kind(data, **{**SIZES, **options}))
    (path,) = tmp_path.glob("*.pt.trace.json")
    found = {event["name"] for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"}
    assert stages <= found
