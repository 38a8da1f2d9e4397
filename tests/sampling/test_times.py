"""Valid times, and the edges inside a time window."""

import datetime

import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData

from lightning_gnn import (
    CollectiveDataModule,
    CSCGraph,
    LinkDataModule,
    NeighborDataModule,
    NeighborSampler,
    PartitionedDataModule,
    PersistentSamplerDataModule,
    sample_neighbors,
)
from lightning_gnn.loading import LinkLoader, NodeLoader
from lightning_gnn.partitioned import partition_graph

EDGES = torch.stack([torch.arange(60) % 20, torch.arange(60) * 7 % 20])
SIZES = {"num_neighbors": [3, 2], "batch_size": 5}
NODE, EDGE = torch.arange(20), torch.arange(60)
RELATION = ("a", "to", "a")


def make_graph(**attributes):
    mask = torch.ones(20, dtype=torch.bool)
    return Data(torch.randn(20, 4), EDGES, y=torch.zeros(20, dtype=torch.int64), train_mask=mask, **attributes)


def typed(node=None, edge=None):
    data = HeteroData()
    data["a"].update(make_graph().to_dict())
    del data["a"].edge_index
    data[RELATION].edge_index = EDGES
    for name, time in (("a", node), (RELATION, edge)):
        if time is not None:
            data[name].time = time
    return data


def make_partitioned(data, folder, **options):
    partition_graph(data, folder, 2, "ldg")
    return PartitionedDataModule(folder, **SIZES, **options)


def sampler(data):
    return NeighborSampler(data, [3], time_attr="t")


PLACES = {
    "of nodes": lambda node, edge, folder: NeighborDataModule(make_graph(t=node), time_attr="t", **SIZES),
    "of edges": lambda node, edge, folder: NeighborDataModule(
        make_graph(t=edge), time_attr="t", input_train_time=NODE, **SIZES
    ),
    "of seeds": lambda node, edge, folder: NeighborDataModule(
        make_graph(t=EDGE), time_attr="t", input_train_time=node, **SIZES
    ),
    "of seeds for validation": lambda node, edge, folder: NeighborDataModule(
        make_graph(t=EDGE), time_attr="t", input_train_time=NODE, input_val_nodes=NODE, input_val_time=node, **SIZES
    ),
    "persistent": lambda node, edge, folder: PersistentSamplerDataModule(make_graph(t=node), time_attr="t", **SIZES),
    "collective": lambda node, edge, folder: CollectiveDataModule(make_graph(t=node), time_attr="t", **SIZES),
    "partitioned": lambda node, edge, folder: make_partitioned(make_graph(t=node), folder, time_attr="t"),
    "partitioned, seeds": lambda node, edge, folder: make_partitioned(
        make_graph(t=NODE), folder, time_attr="t", input_train_time=node
    ),
    "of a type": lambda node, edge, folder: NeighborDataModule(typed(node), "a", time_attr="time", **SIZES),
    "of a relation": lambda node, edge, folder: NeighborDataModule(
        typed(None, edge), "a", time_attr="time", input_train_time=NODE, **SIZES
    ),
    "of links": lambda node, edge, folder: LinkDataModule(
        make_graph(t=EDGE), EDGES[:, :20], input_train_time=node, time_attr="t", **SIZES
    ),
    "of typed links": lambda node, edge, folder: LinkDataModule(
        typed(None, EDGE), (RELATION, EDGES[:, :20]), input_train_time=node, time_attr="time", **SIZES
    ),
    "loader": lambda node, edge, folder: NodeLoader(make_graph(t=EDGE), sampler(make_graph(t=EDGE)), input_time=node),
    "link loader": lambda node, edge, folder: LinkLoader(
        make_graph(t=EDGE), sampler(make_graph(t=EDGE)), edge_label_index=EDGES[:, :20], edge_label_time=node
    ),
    "CSCGraph": lambda node, edge, folder: CSCGraph.from_data(make_graph()).with_time(edge),
    "CSCGraph, sources": lambda node, edge, folder: CSCGraph.from_data(make_graph()).with_source_time(node),
    "operator": lambda node, edge, folder: sample_neighbors(
        CSCGraph.from_data(make_graph()).with_time(EDGE), NODE, [2], seed_time=node
    ),
}


@pytest.mark.parametrize("unit", ["D", "s", "ns"])
@pytest.mark.parametrize("place", PLACES)
def test_dates_are_refused_with_what_to_write_instead(place, unit, tmp_path):
    node, edge = (np.datetime64("2020-01-01", unit) + np.arange(count) for count in (20, 60))
    with pytest.raises(TypeError, match=r"datetime64\[.*astype\('int64'\)"):
        PLACES[place](node, edge, tmp_path / "parts")


@pytest.mark.parametrize("window", [np.timedelta64(3, "D"), datetime.timedelta(days=3)])
@pytest.mark.parametrize("evaluation", [False, True])
def test_a_window_is_a_number_in_the_unit_of_the_times(window, evaluation):
    own = {"eval_loader_kwargs": {"time_window": window}} if evaluation else {"time_window": window}
    with pytest.raises(ValueError, match="time_window must be a number above 0, in the unit of the times"):
        NeighborDataModule(make_graph(t=NODE), time_attr="t", **SIZES, **own)


def test_times_of_nodes_and_edges_at_once_are_refused_with_the_column_to_rename():
    with pytest.raises(ValueError, match=r"nodes of 'a' and edges of .*'time': rename") as raised:
        NeighborDataModule(typed(NODE, EDGE), "a", time_attr="time", **SIZES)
    for kind, name, times in ((repr("a"), "node", {"input_train_time": NODE}), (str(RELATION), "edge", {})):
        data = typed(NODE, EDGE)
        renaming = f"data[{kind}].{name}_time = data[{kind}].pop('time')"
        assert renaming in str(raised.value)
        exec(renaming)
        made = NeighborDataModule(data, "a", time_attr="time", **times, **SIZES)
        batch = next(iter(made.train_dataloader()))
        assert batch["a"].num_nodes
