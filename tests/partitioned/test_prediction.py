"""The plan for several machines: formulas checked manually, and predicted traffic compared with bytes sent."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from lightning_gnn.partitioned.assign import assign_nodes
from lightning_gnn.partitioned.folder import write_partition
from lightning_gnn.planning.cluster import Network, Traffic, Work, machine_memory, predict
from lightning_gnn.planning.cluster_traffic import ENVELOPE, count_traffic, row_bytes
from lightning_gnn.sampling.neighbor import topology_of
from tests.full_graph.launch import run
from tests.sampling.cases import GRAPHS, NODE_CASES, make_options

TRAFFIC = Traffic(
    request_bytes=np.array([[1e3, 2e3], [3e3, 4e3]]), response_bytes=np.array([[10e3, 20e3], [30e3, 40e3]]),
    sent=np.array([70e3, 40e3]), nodes=500.0, remote_rows=100.0, steps=10.5,
)  # fmt: skip
WORK = Work(
    prepare_s=0.02, step_s=0.03, fixed_s=0.005, workers=2, cores=2, serial_step_s=0.04, nodes=1000,
    gradient_bytes=50_000, message_s=1e-7, slowdown=1.5,
)  # fmt: skip
NETWORK = Network(1e6, latency=1e-3)


def test_the_formulas_by_hand():
    found = predict(TRAFFIC, WORK, NETWORK)
    # Rank 1 receives most: 6 kB of requests and 60 kB of answers in two rounds.
    inside = 1.5 * 0.5 * 0.02 + 1e-7 * 66e3
    preparing = inside + 2 * 2 * 1e-3 + 66e3 / 1e6
    reducing = 50e3 / 1e6 + 2 * 1e-3
    assert found.bounds == pytest.approx({
        "training": 1.5 * (0.5 * 0.03 + 0.005) + reducing,
        "preparing": preparing / 2,
        "network": (70e3 + 50e3) / 1e6 * 7 / 6,  # two threads that prepare and one that sums up, on two machines
        "cores": (1.5 * (0.5 * 0.04 + 0.005) + max(inside + 1e-7 * 40e3, 0.015 + 1e-7 * (44e3 + 70e3))) / 2,
    })  # fmt: skip
    assert (found.bound, found.ranks) == ("network", 2)
    assert found.epoch_s == pytest.approx(preparing + 10.5 * 0.14)
    alone = predict(TRAFFIC, replace(WORK, workers=0), NETWORK)
    assert alone.epoch_s == pytest.approx(10.5 * (1.5 * (0.5 * 0.03 + 0.005) + reducing + preparing))


@pytest.mark.parametrize(
    "options", [{"bandwidth": 0.0}, {"bandwidth": float("nan")}, {"bandwidth": 1.0, "latency": -1}]
)
def test_a_network_that_cannot_be(options):
    with pytest.raises(ValueError, match="network's"):
        Network(**options)


CASES = ["plain", "typed", "trees", "plain with a cache"]
CACHE = 800


def _count_sent_bytes(rank, folder):
    from lightning_gnn import PartitionedDataModule

    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    found = []
    for case in CASES:
        kind = case.split(" ")[0]
        data = GRAPHS[NODE_CASES[kind][0]]()
        more = {"cache": CACHE} if kind != case else {}
        datamodule = PartitionedDataModule(folder / kind, **make_options(kind, data), num_workers=0, **more)
        datamodule.setup("fit")
        exchange = datamodule.connection.remote.exchange
        before = exchange.sent + exchange.received
        batches = list(datamodule.train_dataloader())
        found.append(((exchange.sent + exchange.received - before) / len(batches), len(batches)))
        datamodule.teardown("fit")
    torch.distributed.destroy_process_group()
    return found


def _partition(data, folder, parts):
    assignment = assign_nodes(topology_of(data), parts, "random")
    write_partition(data, folder, assignment, parts)
    return {name: part.numpy() for name, part in assignment.items()}


def _make_loader(case, data):
    from lightning_gnn import NeighborDataModule

    return NeighborDataModule(data, **make_options(case, data)).train_dataloader()


@pytest.mark.slow
def test_counted_bytes_are_those_that_are_sent(tmp_path):
    counted = {}
    for case in CASES:
        kind = case.split(" ")[0]
        data = GRAPHS[NODE_CASES[kind][0]]()
        owner = {
            name: part.numpy() for name, part in assign_nodes(topology_of(data), 2, "random").items()
        } if kind != case else _partition(data, tmp_path / case, 2)  # fmt: skip
        cache = CACHE if kind != case else 0
        counted[case] = count_traffic(_make_loader(kind, data), owner, 2, batches=24, cache=cache)
    assert counted["plain with a cache"].remote_rows < 0.8 * counted["plain"].remote_rows
    sent = run(_count_sent_bytes, 2, tmp_path)
    for case, ranks in zip(CASES, zip(*sent, strict=True), strict=True):
        assert np.ceil(counted[case].steps) == ranks[0][1]
        # The real ranks' mini-batches are different samples; for such small ones, message headers dominate.
        assert counted[case].remote_bytes == pytest.approx(np.mean([bytes_ for bytes_, _ in ranks]), rel=0.25), case


def test_what_is_counted_for_a_path():
    # 0 -> 1 -> 2 -> 3: from seed 3, hops request the lists of 3 and 2, and the rows of 3, 2, 1.
    data = Data(x=torch.zeros(4, 5), edge_index=torch.tensor([[0, 1, 2], [1, 2, 3]]))
    from lightning_gnn import NeighborDataModule

    whole = NeighborDataModule(data, torch.tensor([3, 2]), num_neighbors=[1, 1], batch_size=1, shuffle=False)
    whole.setup("fit")
    owner = {None: np.array([0, 0, 1, 1])}
    loader = whole.train_dataloader()
    with pytest.raises(ValueError, match="rank 0 of 2 would have no training seeds"):
        count_traffic(loader, owner, 2, "local")
    found = count_traffic(loader, {None: np.array([0, 0, 1, 0])}, 2, "local")  # seed 3 is rank 0's, seed 2 rank 1's
    assert found.request_bytes.T.tolist() == [[0, 8 + ENVELOPE, 8 + ENVELOPE], [0, 8 + ENVELOPE, 16 + ENVELOPE]]
    assert found.response_bytes.T.tolist() == [[0, 24 + ENVELOPE, 20 + ENVELOPE], [0, 24 + ENVELOPE, 40 + ENVELOPE]]
    assert found.sent.tolist() == [
        16 + 2 * ENVELOPE + 64 + 2 * ENVELOPE, 24 + 2 * ENVELOPE + 44 + 2 * ENVELOPE,
    ]  # fmt: skip
    assert (found.remote_rows, found.nodes, found.steps) == (1.5, 3.0, 1.0)


def test_memory_of_a_machine(tmp_path):
    data = GRAPHS["typed"]()
    _partition(data, tmp_path / "parts", 1)
    sizes = {name: (data[name].num_nodes,) * 2 for name in data.node_types}
    counts = {name: (data[name].num_edges,) * 2 for name in data.edge_types}
    found = machine_memory(sizes, counts, row_bytes(data), 1, batch_bytes=100, batches=3, cache=7)
    files = {kind: sum(path.stat().st_size - 128 for path in (tmp_path / "parts" / "part-00000").glob(f"{kind}*.npy"))
             for kind in ("node", "edge")}  # fmt: skip
    assert (found["rows"], found["lists"]) == (files["node"], files["edge"])
    assert (found["owners"], found["cache"], found["mini-batches"]) == (70, 7, 300)
