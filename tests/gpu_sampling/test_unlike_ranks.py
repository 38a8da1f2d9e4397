"""Ranks of which only some have a GPU: every DataModule trains under every strategy as without one, or refuses."""

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
from tests.sampling.test_loaders_by_themselves import Seen, link, node, trainer

SHARD = {"topology": "shard", "features": "shard"}
KINDS = {
    "node": (node, NeighborDataModule, {}),
    "link": (link, LinkDataModule, {}),
    "persistent": (node, PersistentSamplerDataModule, {}),
    "persistent, one at a time": (node, PersistentSamplerDataModule, {"bulk": 1, "prefetch": 0}),
    "persistent, sharded": (node, PersistentSamplerDataModule, SHARD),
    "persistent link": (link, PersistentLinkDataModule, {}),
    "collective": (node, CollectiveDataModule, {}),
}
SAME = {name: "link" if "link" in name else "node" for name in KINDS}
"""Whose mini-batches each has."""


def seen(rank, name, strategy, gpus):
    """Train and predict; return what this rank has seen, or its error."""
    make, kind, options = KINDS[name]
    if rank in gpus and name not in ("node", "link"):
        options = {**options, "device": "cpu"}  # Triton's interpreter stands for a GPU
    module = Seen()
    run = trainer(HyScaleStrategy(drm=False) if strategy == "hyscale" else strategy)
    pl.seed_everything(3, verbose=False)
    try:
        datamodule = make(kind, **options)()
        run.fit(module, datamodule=datamodule)
        run.predict(module, datamodule=datamodule)
    except (TypeError, ValueError) as error:
        return str(error)
    return module.seen


def on_rank(rank, strategy, gpus):
    """Train with every DataModule; return by name what this rank has seen."""
    torch.set_num_threads(1)
    return {name: seen(rank, name, strategy, gpus) for name in KINDS}


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [(0,), (0, 1)])
@pytest.mark.parametrize("strategy", ["ddp", "hyscale", "ascend_hybrid"])
@pytest.mark.filterwarnings("ignore")
def test_mini_batches_do_not_depend_on_which_ranks_have_a_gpu(strategy, gpus):
    for found in launch.run(on_rank, 2, strategy, gpus):
        for name, same in SAME.items():
            if name == "persistent, sharded" and len(gpus) == 2:
                assert "use 'auto', 'device' or 'pinned'" in found[name]  # the interpreter has no peer access
            elif strategy == "ascend_hybrid":
                assert "trains on full graphs" in found[name]
            elif name == "collective" and strategy == "hyscale":
                assert "both schedule the same cores" in found[name]
            else:
                assert isinstance(found[name], dict), found[name]
                assert found[name] == found[same], name


def full_graph_on_rank(rank, strategy):
    try:
        trainer(strategy).fit(Seen(), FullGraphDataModule(small_data(61, 500)))
    except ValueError as error:
        return str(error)
    return "trained"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "hyscale"])
def test_full_graphs_are_refused_where_ranks_would_repeat_them(strategy):
    for said in launch.run(full_graph_on_rank, 2, strategy):
        assert "strategy=ascend_hybrid" in said
