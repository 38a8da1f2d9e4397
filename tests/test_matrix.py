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
    "C": "both schedule the same cores and the same bus; train with NeighborDataModule",
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
        Collective         C  C  C  C  N
        Partitioned        =  E  =  =  N
        Link               S  =  =  =  ~
        PersistentLink     S  =  =  =  ~
        CollectiveLink     C  C  C  C  C
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


def make_datamodule(kind, task, folder, batch_size):
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
        options["gpu_route"] = "cpu"
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


def train(kind, task, strategy, folder):
    """Return the weights after two steps, or the error message."""
    trainer = pl.Trainer(
        strategy=HyScaleStrategy(drm=False, shares=[0.6, 0.4]) if strategy == "hyscale" else strategy,
        accelerator="cpu", devices=1 if strategy == "auto" else 2, max_steps=2, max_epochs=2, limit_val_batches=0,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = make_module(kind, task)
    try:
        batch_size = BATCH_SIZE // 2 if strategy == "ddp" else BATCH_SIZE  # per rank, or in total
        trainer.fit(module, datamodule=make_datamodule(kind, task, folder, batch_size))
    except (TypeError, ValueError) as error:
        return str(error)
    except Exception as error:  # an unexpected error, which the table does not contain; other cells still run
        return f"raw {type(error).__name__}"
    return dict(module.state_dict(), steps=torch.tensor(trainer.global_step))


def train_all(rank, strategy, folder):
    torch.set_num_threads(1)
    return {cell: train(*cell, strategy, folder) for cell in EXPECTED[strategy]}


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


@pytest.mark.parametrize(
    "strategy", ["auto", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ddp", "hyscale", "ascend_hybrid"))]
)
@pytest.mark.filterwarnings("ignore")
def test_trains_as_one_process_or_refuses(folder, alone, strategy):
    ranks = [alone] if strategy == "auto" else launch.run(train_all, 2, strategy, folder)
    assert {cell: classify_cell(cell, ranks, alone) for cell in EXPECTED[strategy]} == EXPECTED[strategy]
