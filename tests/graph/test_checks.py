import math

import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.testing import MyFeatureStore, MyGraphStore

from lightning_gnn.datamodules.link import LinkDataModule
from lightning_gnn.datamodules.node import NeighborDataModule
from lightning_gnn.features.table import check_finite_rows
from lightning_gnn.full_graph.datamodule import FullGraphDataModule
from lightning_gnn.graph.checks import check_edge_data, check_edges, check_node_data, check_nodes
from lightning_gnn.loading import MiniBatchPipeline
from lightning_gnn.partitioned import partition_graph
from lightning_gnn.sampling.neighbor import NeighborSampler
from tests.batching_data import small_data
from tests.refusals import refuses

MASK = torch.tensor([True, False, True, False])


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.complex64]
)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_no_value_that_is_not_finite_is_missed(dtype, bad):
    largest = torch.finfo(dtype).max
    for row in range(11):
        values = torch.full((11, 3), largest, dtype=dtype)
        values[::2] = -largest
        check_finite_rows(values, block=4)
        values[row, row % 3] = bad
        with pytest.raises(ValueError, match=rf"x holds NaN or infinity in 1 of 11 rows \(node {row}\)"):
            check_finite_rows(values, block=4)


@pytest.mark.parametrize("key", ["x", "edge_attr", "edge_weight"])
def test_nan_is_found_unless_it_may_be_there(key):
    data = small_data()
    data[key][7] = math.nan
    kind = "node" if key == "x" else "edge"
    with pytest.raises(ValueError, match=rf"data.{key} holds NaN .* 1 of \d+ rows \({kind} 7\).*check_features=False"):
        check_node_data(data, check_features=True)
    check_node_data(data)


def test_large_mapped_tables_are_left_out_with_a_note(monkeypatch, tmp_path):
    data = small_data()
    data.x[7] = math.nan
    del data.edge_attr, data.edge_weight
    monkeypatch.setattr("lightning_gnn.graph.checks._MAX_MAPPED_BYTES", data.x.nbytes - 1)
    notes = []
    monkeypatch.setattr("lightning_gnn.graph.checks.rank_zero_info", notes.append)
    shared = data.x.clone().share_memory_()
    for in_memory in (data.x.clone(), shared):
        data.x = in_memory
        refuses(ValueError, r"data\.x holds NaN", check_node_data, data, check_features=True)
    assert not notes
    np.save(tmp_path / "x.npy", data.x.numpy())
    data.x = torch.from_numpy(np.load(tmp_path / "x.npy", mmap_mode="c"))
    check_node_data(data, check_features=True)
    assert notes == ["data.x is memory-mapped and has 0.0 GiB: it is not checked for NaN and infinity"]
    monkeypatch.setattr("lightning_gnn.graph.checks._MAX_MAPPED_BYTES", data.x.nbytes)
    refuses(ValueError, r"data\.x holds NaN", check_node_data, data, check_features=True)


NO_MASK = r"n is torch.uint8, but a mask must be torch.bool; use n.bool\(\)"
MANY = torch.stack([MASK] * 10, 1)
BOOL_OR_IDS = "n must be a bool mask or int64 ids"


@pytest.mark.parametrize(
    ("nodes", "error", "message"),
    [
        (MASK.to(torch.uint8), TypeError, NO_MASK),
        (MANY, ValueError, r"\[4, 10\]: it has 10 splits; select one column.*n\[:, 0\]"),
        (torch.tensor(3), ValueError, "one dimension"),
        (("paper", MASK), TypeError, "n names the node type 'paper'.*pass only the nodes"),
        ("paper", TypeError, "n names the node type 'paper'"),
        (torch.tensor([2**62]), ValueError, "n holds node 4611686018427387904, but the graph has 4 nodes"),
        ([2**70], TypeError, BOOL_OR_IDS),
        ({1, 2}, TypeError, rf"{BOOL_OR_IDS}, but is \{{1, 2\}}"),
        (torch.tensor([1.5]), TypeError, "but is torch.float32"),
    ],
)
def test_wrong_nodes_are_named(nodes, error, message):
    refuses(error, message, check_nodes, nodes, 4, "n")


def test_a_mask_by_name_must_be_one():
    with pytest.raises(TypeError, match=r"data.train_mask is torch.int64, but a mask must be torch.bool"):
        check_nodes(torch.tensor([0, 2]), 4, "data.train_mask")
    assert check_nodes(torch.tensor([0, 2]), 4, "data.train_idx").tolist() == [0, 2]


@pytest.mark.parametrize(
    ("edges", "error", "message"),
    [
        ((("a", "to", "b"), [[0], [1]]), TypeError, r"e names the edge type \('a', 'to', 'b'\).*pass only the edges"),
        (torch.ones(5, 2, dtype=torch.int64), ValueError, r"shape \[2, n\], but has \[5, 2\]; transpose it"),
        ([[0.5], [1]], TypeError, "int64 tensor"),
        ([[0], [2**62]], ValueError, "e holds node 4611686018427387904"),
        ([[0], [1, 2]], TypeError, r"int64 tensor \[2, n\], but is \[\[0\], \[1, 2\]\]"),
    ],
)
def test_wrong_edges_are_named(edges, error, message):
    refuses(error, message, check_edges, edges, (4, 4), "e")


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (HeteroData(), TypeError, r"got HeteroData; use data.to_homogeneous\(\)"),
        (Data(x=torch.eye(4).to_sparse(), num_nodes=4), ValueError, r"data.x is sparse.*use data.x.to_dense\(\)"),
        (Data(edge_index=torch.tensor([[0], [1]]), y=torch.zeros(4)), ValueError, "2 nodes; set data.num_nodes"),
    ],
)  # fmt: skip
def test_wrong_graphs_are_named(data, error, message):
    refuses(error, message, check_node_data, data)


@pytest.mark.parametrize("key", ["edge_attr", "edge_weight"])
def test_attributes_of_other_edges_are_named(key):
    data = small_data()
    check_edge_data(data)
    data[key] = data[key][:-1]
    refuses(ValueError, rf"data.{key} has the shape \[3999.*but the graph has 4000 edges", check_edge_data, data)
    for kind in (NeighborDataModule, LinkDataModule):
        refuses(ValueError, rf"data.{key} has the shape", kind, data, num_neighbors=[2])
    refuses(ValueError, rf"data.{key} has the shape", FullGraphDataModule, data)


READERS = {
    "neighbor": lambda data: NeighborDataModule(data, num_neighbors=[2]),
    "link": lambda data: LinkDataModule(data, num_neighbors=[2]),
    "full": FullGraphDataModule,
    "sampler": lambda data: NeighborSampler(data, [2]),
    "pipeline": lambda data: MiniBatchPipeline(data, None),
    "partition": lambda data: partition_graph(data, "nowhere", 2),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_remote_stores_are_refused_with_what_reads_them(read):
    stores = (MyFeatureStore(), MyGraphStore())
    refuses(TypeError, r"lightning_gnn\.enable_pyg_sampling\(\): loader = .*NeighborLoader", read, stores)
    refuses(TypeError, "got tuple$", read, (1, 2))
