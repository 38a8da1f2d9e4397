"""The mini-batches of a graph in parts are those of one machine, bit for bit."""

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.data import Data

from lightning_gnn import NeighborDataModule, PartitionedDataModule, PartitionedLinkDataModule
from lightning_gnn.partitioned import partition_graph
from lightning_gnn.partitioned.folder import write_partition
from lightning_gnn.sampling.seed_order import OwnSeedsOrder
from tests.full_graph.launch import run
from tests.partitioned.graphs import GRAPHS, LINK_CASES, NODE_CASES, assert_same, one_machine, options_of
from tests.strategies import edge_indices

CASES = [*NODE_CASES, *LINK_CASES]


def in_parts(case, data, folder, **options):
    kind = PartitionedLinkDataModule if case in LINK_CASES else PartitionedDataModule
    return kind(folder, **options_of(case, data), **options)


@pytest.fixture(scope="module", params=GRAPHS)
def written(request, tmp_path_factory):
    data, folder = GRAPHS[request.param](), tmp_path_factory.mktemp("parts")
    partition_graph(data, folder / "ldg", 3, "ldg", batches=0)
    return request.param, data, folder / "ldg"


@pytest.mark.parametrize("topology", ["parts", "whole"])
def test_one_rank_with_all_parts(written, topology):
    name, data, folder = written
    for case in CASES:
        if (NODE_CASES | LINK_CASES)[case][0] != name:
            continue
        datamodule = in_parts(case, data, folder, topology=topology, num_workers=2)
        datamodule.setup("fit")
        batches, expected = list(datamodule.train_dataloader()), one_machine(case, data)
        assert len(batches) == len(expected) > 1, case
        for batch, other in zip(batches, expected, strict=True):
            assert_same(batch, other)
        datamodule.teardown("fit")


@settings(max_examples=40)
@given(edge_indices(max_nodes=12, max_edges=50), st.integers(1, 5), st.randoms(use_true_random=False))
def test_any_graph_in_any_parts(edges, parts, random):
    num_nodes, edge_index = edges
    data = Data(x=torch.arange(2.0 * num_nodes).view(-1, 2), edge_index=edge_index)
    assignment = torch.tensor([random.randrange(parts) for _ in range(num_nodes)])
    options = {"input_train_nodes": torch.arange(num_nodes), "num_neighbors": [2, 3], "batch_size": 4, "seed": 1}
    with tempfile.TemporaryDirectory() as folder:
        write_partition(data, Path(folder) / "parts", {None: assignment}, parts)
        datamodule = PartitionedDataModule(Path(folder) / "parts", **options, num_workers=0)
        datamodule.setup("fit")
        expected = NeighborDataModule(data, **options).train_dataloader()
        for batch, other in zip(datamodule.train_dataloader(), expected, strict=True):
            assert_same(batch, other)


def _compare(rank, ranks, folder, cases, topology, order, cache):
    torch.distributed.init_process_group("gloo", rank=rank, world_size=ranks)
    data = {name: make() for name, make in GRAPHS.items()}
    batches_of = {}
    for case in cases:
        whole = data[(NODE_CASES | LINK_CASES)[case][0]]
        parts = Path(folder) / (NODE_CASES | LINK_CASES)[case][0]
        datamodule = in_parts(case, whole, parts, topology=topology, order=order, cache=cache, num_workers=2)
        datamodule.setup("fit")
        own = None
        if order == "local":
            owners = datamodule.owners_of_seeds(ranks)
            own = OwnSeedsOrder(owners, num_replicas=ranks, rank=rank, shuffle=True, seed=3)
        expected = one_machine(case, whole, ranks, rank, own)
        batches = list(datamodule.train_dataloader())
        assert len(batches) == len(expected) > 0
        for batch, other in zip(batches, expected, strict=True):
            assert_same(batch, other)
        datamodule.teardown("fit")
        batches_of[case] = len(batches), dict(datamodule.rows_read)
    torch.distributed.destroy_process_group()
    return batches_of


@pytest.fixture(scope="module")
def four_parts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("four")
    for (name, make), method in zip(GRAPHS.items(), ("metis", "random"), strict=True):
        partition_graph(make(), folder / name, 4, method, batches=0)
    return str(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "topology", "order", "cache"),
    [
        (4, "parts", "global", 0),
        (2, "parts", "local", "1kB"),
        (3, "whole", "global", "400B"),
        (8, "parts", "local", 0),
    ],
)
def test_several_ranks(four_parts, ranks, topology, order, cache):
    # With four parts, two or three ranks have several, and of eight ranks two have the same.
    cases = CASES if ranks == 4 else ["plain", "node times", "typed", "links", "weights"]
    if order == "local":
        cases = [case for case in cases if "link" not in case]
    results = run(_compare, ranks, ranks, four_parts, cases, topology, order, cache)
    read = [result["plain"][1] for result in results]
    assert all(counts["elsewhere"] for counts in read)
    assert bool(cache) == any(counts.get("cached", 0) for counts in read)
