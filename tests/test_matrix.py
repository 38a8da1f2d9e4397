"""Every combination of DataModule, task and strategy trains two mini-batches as one process does, or is refused."""

import os
import re

import pytest
import pytorch_lightning as pl
import torch

import lightning_gnn
from lightning_gnn import FullGraphDataModule, HyScaleStrategy
from lightning_gnn.collective import CollectivePlan
from lightning_gnn.nn import RGCN, GraphSAGE, LinkPredictor, NodeClassifier
from lightning_gnn.partitioned import partition_graph
from tests.accelerators import simulated_npu
from tests.full_graph import launch
from tests.sampling.cases import GRAPHS, WRITES

TASKS = ("node", "link", "typed", "temporal", "negatives")
"""Node classes; labeled edges; either in a heterogeneous graph; either with node times; negatives for half of the
edges, with node times and sampled neighbors. All others use all neighbors."""
REFUSALS = {
    "E": "the batch has no labeled edges",
    "S": "mini-batch of edges, without seed nodes",
    "N": "mini-batches of seed nodes have no negative edges; use LinkDataModule",
    "F": "trains on full graphs, .*; use FullGraphDataModule",
    "D": "strategy=ascend_hybrid shards the graph",
    "H": "expected a homogeneous torch_geometric.data.Data, got HeteroData",
    "W": "the whole graph is the only batch",
}
"""Patterns of the refusal messages."""
TABLE = {
    "auto": """
        Neighbor           =  E  =  =  N
        PersistentSampler  =  E  =  =  N
        Collective         =  E  =  =  N
        Partitioned        =  E  =  =  N
        Link               S  =  =  =  =
        PersistentLink     S  =  =  =  =
        CollectiveLink     S  =  =  =  =
        PartitionedLink    S  =  =  =  =
        FullGraph          =  =  H  W  W
    """,
    "ddp": """
        Neighbor           =  E  =  =  N
        PersistentSampler  =  E  =  =  N
        Collective         =  E  =  =  N
        Partitioned        =  E  =  =  N
        Link               S  =  =  =  ~
        PersistentLink     S  =  =  =  ~
        CollectiveLink     S  =  =  =  ~
        PartitionedLink    S  =  =  =  ~
        FullGraph          D  D  H  W  W
    """,
    "hyscale": """
        Neighbor           =  E  =  =  N
        PersistentSampler  =  E  =  =  N
        Collective         =  E  =  =  N
        Partitioned        =  E  =  =  N
        Link               S  =  =  =  ~
        PersistentLink     S  =  =  =  ~
        CollectiveLink     S  =  =  =  ~
        PartitionedLink    S  =  =  =  ~
        FullGraph          D  D  H  W  W
    """,
    "ascend_hybrid": """
        Neighbor           F  F  F  F  N
        PersistentSampler  F  F  F  F  N
        Collective         F  F  F  F  N
        Partitioned        F  F  F  F  N
        Link               F  F  F  F  F
        PersistentLink     F  F  F  F  F
        CollectiveLink     F  F  F  F  F
        PartitionedLink    F  F  F  F  F
        FullGraph          =  =  H  W  W
    """,
}
"""By DataModule and task: =, the weights equal one process with the plain DataModule up to rounding, and the plain
DataModule on these ranks bit for bit; ~, only the latter, since ranks draw separately; or a letter of REFUSALS.
Without a GPU, PGSampler's modules sample by CPU threads; gpu_sampling/test_unlike_ranks.py simulates one."""
EXPECTED = {
    strategy: {(kind, task): cell for kind, *cells in map(str.split, table.strip().splitlines())
               for task, cell in zip(TASKS, cells, strict=True)}
    for strategy, table in TABLE.items()
}  # fmt: skip
KINDS = tuple(dict.fromkeys(kind for kind, _ in EXPECTED["auto"]))
BATCH_SIZE, NUM_EDGES = 8, 40


def find_plain_kind(kind):
    """Return the plain DataModule with the same mini-batches."""
    return "Link" if kind.endswith("Link") else kind if kind == "FullGraph" else "Neighbor"


def make_graph(name):
    data = GRAPHS[name]()
    for store in data.node_stores:
        store.x = store.x.double()
    return data


def make_datamodule(kind, task, folder, batch_size, on_gpu=False):
    """Make a DataModule; a partitioned one reads its graph from a folder."""
    name = "typed" if task == "typed" else "plain"
    data, options = make_graph(name), {}
    if task in ("temporal", "negatives"):
        options["time_attr"] = "node_time"
    if task == "negatives":
        options["neg_sampling"] = "binary"
    if kind == "FullGraph":
        if task == "link":
            data.edge_label_index, data.edge_label = data.edge_index[:, :NUM_EDGES], torch.arange(NUM_EDGES) % 2
        return FullGraphDataModule(data, **options)
    if find_plain_kind(kind) == "Link":
        edges = (data[WRITES] if task == "typed" else data).edge_index[:, :NUM_EDGES]
        options["input_train_edges"] = (WRITES, edges) if task == "typed" else edges
        if task == "negatives":  # so early that some find no valid node and take the earliest
            options["input_train_time"] = torch.full((NUM_EDGES,), 3)
        else:
            options["input_train_labels"] = torch.arange(NUM_EDGES) % 2
    else:
        options["input_train_nodes"] = ("paper", data["paper"].train_mask) if task == "typed" else data.train_mask
    if kind.startswith("Collective"):
        options["plan"] = CollectivePlan("collective", gpu_buffer_size=1, cpu_buffer_size=1)
        options["gpu_route"] = "auto" if on_gpu else "cpu"
    if on_gpu and kind.startswith(("Persistent", "Collective")):
        options["device"] = "cpu"  # Triton's interpreter stands in for a GPU
    if kind.startswith("Partitioned"):
        data = os.path.join(folder, name)
    make = getattr(lightning_gnn, f"{kind}DataModule")
    fanouts = [3, 2] if task == "negatives" else [-1, -1]
    return make(data, num_neighbors=fanouts, batch_size=batch_size, seed=3, **options)


def make_module(kind, task):
    pl.seed_everything(1, verbose=False)
    over_edges = task in ("link", "negatives") or (task != "node" and find_plain_kind(kind) == "Link")
    if task == "typed":
        model, target = RGCN(make_graph("typed").metadata(), 2, 4, 2, 3), WRITES if over_edges else "paper"
    else:
        model, target = GraphSAGE(3, 4, 2, 3), None
    model = model.double()
    return LinkPredictor(model, target=target) if over_edges else NodeClassifier(model, num_classes=3, target=target)


def make_strategy(strategy, place):
    """Make a strategy; for hyscale, two trainers with the same shares on every machine."""
    if strategy != "hyscale":
        return strategy
    # Shares list CPU trainers first, which have the last ranks. A CPU stands for each accelerator without a device.
    cpu_trainers = 0 if place.endswith("s") else 1
    devices = None if place.startswith("npu") else ["cpu"] * (2 - cpu_trainers)
    shares = [0.4, 0.6] if cpu_trainers else [0.6, 0.4]
    return HyScaleStrategy(drm=False, shares=shares, cpu_trainers=cpu_trainers, devices=devices)


def train(kind, task, strategy, folder, place="cpu", rank=0):
    """Return the weights after two steps, or the error message."""
    accelerator, devices = "cpu", 1 if strategy == "auto" else 2
    if place.startswith("npu"):
        accelerator, devices = "npu", 2 if place == "npus" else 1
    on_gpu = place == "gpus" or (place == "gpu" and rank == 0)
    trainer = pl.Trainer(
        strategy=make_strategy(strategy, place),
        accelerator=accelerator, devices=devices, max_steps=2, max_epochs=2, limit_val_batches=0,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = make_module(kind, task)
    try:
        is_ddp = type(trainer.strategy).__name__ in ("DDPStrategy", "NPUDDPStrategy") and trainer.world_size == 2
        batch_size = BATCH_SIZE // 2 if is_ddp else BATCH_SIZE  # per rank, or in total
        trainer.fit(module, datamodule=make_datamodule(kind, task, folder, batch_size, on_gpu))
    except (TypeError, ValueError) as error:
        return str(error)
    except Exception as error:  # an unexpected error, which the table does not contain; other cells still run
        return f"raw {type(error).__name__}"
    weights = {name: value.cpu() for name, value in module.state_dict().items()}
    return dict(weights, steps=torch.tensor(trainer.global_step))


def train_all(rank, strategy, folder, place="cpu", cells=None):
    torch.set_num_threads(1)
    if place.startswith("npu"):
        simulated_npu.install()
    return {cell: train(*cell, strategy, folder, place, rank) for cell in cells or EXPECTED[strategy]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    for name in GRAPHS:
        partition_graph(make_graph(name), folder / name, 2, "ldg")
    return str(folder)


@pytest.fixture(scope="module")
def alone(folder):
    return train_all(0, "auto", folder)


def classify_cell(cell, ranks, alone):
    """Return the symbol of the table for a cell, or a description of an unexpected result."""
    found = [rank[cell] for rank in ranks]
    if any(isinstance(each, str) for each in found):
        said = [each if isinstance(each, str) else "trains" for each in found]
        marks = [mark for mark, words in REFUSALS.items() if all(re.search(words, each) for each in said)]
        return marks[0] if marks else said
    kind, task = cell
    own, one = ranks[0][find_plain_kind(kind), task], alone[find_plain_kind(kind), task]
    if any(not torch.equal(each[name], value) for each in found for name, value in own.items()):
        return "other weights"
    if own["steps"] != 2:
        return "other steps"
    return "=" if all(torch.allclose(own[name], one[name], 0, 1e-12) for name in own) else "~"


@pytest.mark.medium
@pytest.mark.parametrize(
    "strategy", ["auto", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ddp", "hyscale", "ascend_hybrid"))]
)
@pytest.mark.filterwarnings("ignore")
def test_trains_as_one_process_or_refuses(folder, alone, strategy):
    ranks = [alone] if strategy == "auto" else launch.run(train_all, 2, strategy, folder)
    assert {cell: classify_cell(cell, ranks, alone) for cell in EXPECTED[strategy]} == EXPECTED[strategy]


PLACES = {
    ("gpu", "auto"): 1, ("gpu", "ddp"): 2, ("gpu", "hyscale"): 2, ("gpu", "ascend_hybrid"): 2,
    ("gpus", "ddp"): 2, ("gpus", "hyscale"): 2, ("gpus", "ascend_hybrid"): 2,
    ("npu", "auto"): 1, ("npu", "ddp"): 1, ("npu", "hyscale"): 2, ("npu", "ascend_hybrid"): 1,
    ("npus", "auto"): 2, ("npus", "ddp"): 2, ("npus", "hyscale"): 2, ("npus", "ascend_hybrid"): 2,
}  # fmt: skip
"""Numbers of ranks: one fake GPU and, with two ranks, a CPU; two fake GPUs; one simulated NPU and, under hyscale, a CPU
trainer; two simulated NPUs."""


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(("place", "strategy"), PLACES)
@pytest.mark.filterwarnings("ignore")
def test_trains_on_other_devices_as_on_cpus(folder, alone, place, strategy, task):
    table = EXPECTED["ddp" if (place, strategy) == ("npus", "auto") else strategy]
    if PLACES[place, strategy] == 1:  # one device may train on a full graph under any strategy
        table = table | {cell: EXPECTED["auto"][cell] for cell in table if cell[0] == "FullGraph" or table[cell] == "~"}
    cells = [cell for cell in table if cell[1] == task]
    if place.startswith("gpu"):  # the others do not use it
        cells = [cell for cell in cells if not cell[0].startswith(("Partitioned", "FullGraph"))]
    ranks = launch.run(train_all, PLACES[place, strategy], strategy, folder, place, cells)
    assert {cell: classify_cell(cell, ranks, alone) for cell in cells} == {cell: table[cell] for cell in cells}
