"""Several ranks sample the same mini-batches from a partitioned graph as from the whole one, bit for bit."""

from pathlib import Path

import pytest
import torch

from lightning_gnn import PartitionedDataModule, PartitionedLinkDataModule
from lightning_gnn.loading.seed_order import OwnSeedsOrder
from lightning_gnn.partitioned import partition_graph
from tests.batch_checks import assert_same_batches
from tests.full_graph.launch import run
from tests.sampling.cases import CASES, GRAPHS, LINK_CASES, load_alone, make_options


def _compare(rank, ranks, folder, cases, topology, order, cache):
    torch.distributed.init_process_group("gloo", rank=rank, world_size=ranks)
    data = {name: make() for name, make in GRAPHS.items()}
    batches_of, given = {}, {"topology": topology, "order": order, "cache": cache, "num_workers": 2}
    for case in cases:
        graph = CASES[case][0]
        whole, kind = data[graph], PartitionedLinkDataModule if case in LINK_CASES else PartitionedDataModule
        datamodule = kind(Path(folder) / graph, **make_options(case, whole), **given)
        datamodule.setup("fit")
        own = None
        if order == "local":
            owners = datamodule.owners_of_seeds(ranks)
            own = OwnSeedsOrder(owners, num_replicas=ranks, rank=rank, shuffle=True, seed=3)
        count = assert_same_batches(datamodule.train_dataloader(), load_alone(case, whole, ranks, rank, own))
        datamodule.teardown("fit")
        batches_of[case] = count, dict(datamodule.rows_read)
    torch.distributed.destroy_process_group()
    return batches_of


@pytest.fixture(scope="module")
def four_parts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("four")
    for (name, make), method in zip(GRAPHS.items(), ("metis", "random"), strict=True):
        partition_graph(make(), folder / name, 4, method)
    return str(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "topology", "order", "cache"),
    [(4, "parts", "global", 0), (2, "parts", "local", "1kB"), (3, "whole", "global", "400B"), (8, "parts", "local", 0)],
)
def test_several_ranks(four_parts, ranks, topology, order, cache):
    # With four parts, two or three ranks load several, and eight ranks share them.
    cases = list(CASES) if ranks == 4 else ["plain", "node times", "typed", "links, binary", "weights"]
    if order == "local":
        cases = [case for case in cases if "link" not in case]
    results = run(_compare, ranks, ranks, four_parts, cases, topology, order, cache)
    read = [result["plain"][1] for result in results]
    assert all(counts["elsewhere"] for counts in read)
    assert bool(cache) == any(counts.get("cached", 0) for counts in read)
