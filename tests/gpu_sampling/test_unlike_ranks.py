"""If only some ranks have a GPU, every DataModule trains as without one under every strategy, or refuses."""

import pytest
import pytorch_lightning as pl
import torch

from lightning_gnn import (
    CollectiveDataModule,
    FullGraphDataModule,
    HyScaleStrategy,
    LinkDataModule,
    NeighborDataModule,
    PersistentLinkDataModule,
    PersistentSamplerDataModule,
)
from tests.batching_data import small_data
from tests.full_graph import launch
from tests.sampling.test_loaders_by_themselves import SeedRecorder, make_link_case, make_node_case, make_trainer

SHARD = {"topology": "shard", "features": "shard"}
KINDS = {
    "node": (make_node_case, NeighborDataModule, {}),
    "link": (make_link_case, LinkDataModule, {}),
    "persistent": (make_node_case, PersistentSamplerDataModule, {}),
    "persistent, one at a time": (make_node_case, PersistentSamplerDataModule, {"bulk": 1, "prefetch": 0}),
    "persistent, sharded": (make_node_case, PersistentSamplerDataModule, SHARD),
    "persistent link": (make_link_case, PersistentLinkDataModule, {}),
    "collective": (make_node_case, CollectiveDataModule, {}),
}
SAME = {name: "link" if "link" in name else "node" for name in KINDS}
"""The DataModule that yields the reference mini-batches."""


def train_and_predict(rank, name, strategy, gpus):
    """Train and predict; return what this rank has seen, or its error."""
    make, kind, options = KINDS[name]
    if rank in gpus and name not in ("node", "link"):
        options = {**options, "device": "cpu"}  # Triton's interpreter stands in for a GPU
    module = SeedRecorder()
    run = make_trainer(HyScaleStrategy(drm=False) if strategy == "hyscale" else strategy)
    pl.seed_everything(3, verbose=False)
    try:
        datamodule = make(kind, **options)()
        run.fit(module, datamodule=datamodule)
        run.predict(module, datamodule=datamodule)
    except (TypeError, ValueError) as error:
        return str(error)
    return module.seen


def train_all(rank, strategy, gpus):
    """Train with every DataModule; return by name what this rank has seen."""
    torch.set_num_threads(1)
    return {name: train_and_predict(rank, name, strategy, gpus) for name in KINDS}


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [(0,), (0, 1)])
@pytest.mark.parametrize("strategy", ["ddp", "hyscale", "ascend_hybrid"])
@pytest.mark.filterwarnings("ignore")
def test_mini_batches_do_not_depend_on_which_ranks_have_a_gpu(strategy, gpus):
    for found in launch.run(train_all, 2, strategy, gpus):
        for name, same in SAME.items():
            if name == "persistent, sharded" and len(gpus) == 2:
                assert "use 'auto', 'device' or 'pinned'" in found[name]  # the interpreter has no peer access
            elif strategy == "ascend_hybrid":
                assert "trains on full graphs" in found[name]
            else:
                assert isinstance(found[name], dict), found[name]
                assert found[name] == found[same], name


def train_full_graph(rank, strategy):
    try:
        make_trainer(strategy).fit(SeedRecorder(), FullGraphDataModule(small_data(61, 500)))
    except ValueError as error:
        return str(error)
    return "trained"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "hyscale"])
def test_full_graphs_are_refused_where_ranks_would_repeat_them(strategy):
    for said in launch.run(train_full_graph, 2, strategy):
        assert "strategy=ascend_hybrid" in said
