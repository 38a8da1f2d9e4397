"""A user's subclass of a DataModule is used as its base class, whatever its name."""

import pytest
from hydra import compose, initialize_config_module

from lightning_gnn import FullGraphDataModule, LinkDataModule, NeighborDataModule, PartitionedDataModule
from lightning_gnn.cli.assemble import build_data, build_task, check_config
from lightning_gnn.cli.predictions import node_names
from lightning_gnn.partitioned import partition_graph
from tests.cli.command import NODE
from tests.refusals import refuses


class WalkLinks(LinkDataModule):
    pass


class EveryEdge(FullGraphDataModule):
    pass


class InParts(PartitionedDataModule):
    pass


class NotLinkDataModule(NeighborDataModule):
    pass


def draw_links(data, **options):
    return LinkDataModule(data, **options)


def build(*overrides, base=NODE):
    with initialize_config_module("lightning_gnn.conf", version_base=None):
        cfg = compose("train", overrides=[*base, "output_dir=out", *overrides])
    check_config(cfg)
    return cfg, build_task(cfg, build_data(cfg))


FULL = [item for item in NODE if not item.startswith("datamodule.")]


@pytest.mark.parametrize(
    ("like", "name", "kind", "base"),
    [
        ("link", "WalkLinks", WalkLinks, NODE),
        ("link", "draw_links", LinkDataModule, NODE),
        ("full", "EveryEdge", EveryEdge, FULL),
    ],
)
def test_links_are_predicted_with_one_s_own_class(like, name, kind, base):
    size = ["task.split.num_train=60", "task.split.num_val=20", "task.split.num_test=20"]
    options = ["task=link", f"datamodule={like}", f"datamodule._target_={__name__}.{name}", *size]
    _, (datamodule, _) = build(*options, base=base)
    assert type(datamodule) is kind
    batch = next(iter(datamodule.train_dataloader()))
    labels = batch.edge_label
    assert bool((labels > 0).any())
    assert bool((labels == 0).any())


def test_another_class_is_refused_whatever_its_name():
    target = f"datamodule._target_={__name__}.NotLinkDataModule"
    refuses(ValueError, "task=link trains on batches of edges", build, "task=link", target)
    missing = "datamodule._target_=no.such.LinkDataModule"
    refuses(Exception, "'no.such.LinkDataModule'", build, "task=link", missing)


def test_a_partitioned_graph_with_one_s_own_class(tmp_path):
    cfg, _ = build()
    partition_graph(build_data(cfg), tmp_path / "parts", 2, "ldg")
    options = ["datamodule=partitioned", f"datamodule.root={tmp_path / 'parts'}"]
    base = [item for item in NODE if not item.startswith("data.")]
    cfg, (datamodule, _) = build(*options, f"datamodule._target_={__name__}.InParts", base=base)
    assert type(datamodule) is InParts
    assert node_names(cfg, None, 600) is None
    other = f"datamodule._target_={__name__}.WalkLinks"
    refuses(ValueError, "data=partitioned works only with datamodule=partitioned", build, *options, other, base=base)
