"""Collective batching of graphs with types, times and weights, of LABOR, and of every kind of subgraph."""

import gc
import threading

import pytest
import pytorch_lightning as pl
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch_geometric.data import Data, HeteroData

from lightning_gnn.collective.datamodule import CollectiveDataModule, configuration_name
from lightning_gnn.collective.plan import CollectivePlan
from lightning_gnn.collective.workers import THREAD_NAME
from lightning_gnn.graph import DiskFeatures, FeatureTable
from lightning_gnn.sampling.neighbor import NeighborSampler
from lightning_gnn.sampling.node_datamodule import NeighborDataModule
from tests.batching_data import small_data
from tests.sampling.test_typed import CITES, Typed, contents, typed_data
from tests.strategies import edge_indices, typed_graphs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COLLECTIVE = CollectivePlan("collective", 2, 1)
PLANS = [COLLECTIVE, CollectivePlan("collective", 1, 3), CollectivePlan("cpu", 1, 2), CollectivePlan("gpu", 1, 0)]
LOADERS = ("train_dataloader", "val_dataloader", "predict_dataloader")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """No plan of another test, and no thread left behind by any."""
    monkeypatch.setenv("LIGHTNING_GNN_CACHE", str(tmp_path / "cache"))
    yield
    gc.collect()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(THREAD_NAME)]


@st.composite
def graphs_of_users(draw, typed, random):
    """Draw a graph as users have them: some types without features, without nodes or without edges."""
    if not typed:
        num_nodes, edge_index = draw(edge_indices(max_nodes=16, max_edges=60))
        data = Data(x=torch.randn(num_nodes, 3, generator=random), edge_index=edge_index)
        data.y, data.time = torch.arange(num_nodes), torch.randint(9, (num_nodes,), generator=random)
        data.weight = torch.rand(edge_index.size(1), generator=random).mul(3).floor()
        return data, None
    topology = draw(typed_graphs())
    named = [name for name, size in topology.sizes.items() if size]
    assume(named)
    data = HeteroData()
    for name, size in topology.sizes.items():
        data[name].num_nodes = size
        data[name].time = torch.randint(9, (size,), generator=random)
        if draw(st.booleans()):
            data[name].x = torch.randn(size, draw(st.integers(1, 4)), generator=random)
    for name, relation in topology.relations.items():
        data[name].edge_index = relation.to_edge_index()
        if draw(st.booleans()):
            data[name].edge_attr = torch.arange(relation.num_edges)
            data[name].weight = torch.rand(relation.num_edges, generator=random).mul(3).floor()
    return data, draw(st.sampled_from(named))


@st.composite
def cases(draw):
    """Draw a graph, and options of NeighborDataModule that go together."""
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    data, kind = draw(graphs_of_users(draw(st.booleans()), random))
    count = data.num_nodes if kind is None else data[kind].num_nodes
    fanouts = st.lists(st.sampled_from([-1, 0, 1, 2, 3]), min_size=1, max_size=3)
    options = {"num_neighbors": draw(fanouts), "batch_size": draw(st.integers(1, 6)), "seed": draw(st.integers(0, 99))}
    seeds = torch.arange(count)[: draw(st.integers(1, 14))]
    options["input_train_nodes"] = seeds if kind is None else (kind, seeds)
    options["input_val_nodes"] = seeds[:3] if kind is None else (kind, seeds[:3])
    options["replace"] = draw(st.booleans())
    picks = draw(st.sampled_from(["uniform", "times", "weights", "labor"]))
    if picks == "times":
        options |= {"time_attr": "time", "temporal_strategy": draw(st.sampled_from(["uniform", "last"]))}
        if draw(st.booleans()):
            options["time_window"] = draw(st.sampled_from([1, 2.5, 7]))
        if draw(st.booleans()):
            options["input_train_time"] = torch.randint(9, (seeds.numel(),), generator=random)
    elif picks == "weights":
        assume(kind is None or any("weight" in store for store in data.edge_stores))
        options["weight_attr"] = "weight"
    elif picks == "labor":
        more = {"layer_dependency": draw(st.booleans()), "batch_dependency": draw(st.sampled_from([1, 3]))}
        options |= {"replace": False, "sampler": "labor", **more}
    options["disjoint"] = draw(st.booleans())
    subgraphs = ["directional", "bidirectional"] + ["induced"] * (not options["disjoint"] and picks != "times")
    options["subgraph_type"] = draw(st.sampled_from(subgraphs))
    if draw(st.booleans()):
        options["eval_loader_kwargs"] = {"num_neighbors": draw(fanouts), "subgraph_type": subgraphs[-1]}
    return data, options


def assert_same_batches(data, options, plan, **more):
    """Compare all loaders; return that of the training set."""
    ours = CollectiveDataModule(data, plan=plan, cache_plan=False, **options, **more)
    theirs = NeighborDataModule(data, **options)
    loaders = [getattr(ours, name)() for name in LOADERS]
    for name, loader in zip(LOADERS, loaders, strict=True):
        found, expected = list(loader), list(getattr(theirs, name)())
        assert len(found) == len(expected) > 0
        for batch, other in zip(found, expected, strict=True):
            assert contents(batch) == contents(other)
    return loaders[0]


@settings(max_examples=50)
@given(cases(), st.sampled_from(PLANS), st.integers(1, 2))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_kind_equals_the_neighbor_datamodules(case, plan, num_workers):
    data, options = case
    assert_same_batches(data, options, plan, gpu_route="cpu", num_workers=num_workers)


@pytest.mark.slow
@settings(max_examples=10)
@given(cases(), st.sampled_from(["device", "pinned"]))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_kind_on_the_gpu_equals_the_neighbor_datamodules(case, place):
    pytest.importorskip("triton", reason="Triton exists on Linux only")
    data, options = case
    options |= {"input_pred_nodes": options["input_val_nodes"], "batch_size": 3 + options["batch_size"]}
    places = {"topology": place, "features": place}
    loader = assert_same_batches(data, options, COLLECTIVE, device=DEVICE, num_workers=1, **places)
    assert loader.route.node_sampler.backend == "triton"


@pytest.mark.slow
def test_both_sides_may_read_from_disk(tmp_path):
    pytest.importorskip("triton", reason="Triton exists on Linux only")
    data = small_data(num_nodes=60, num_edges=300)
    given = {
        "device": DEVICE,
        "num_workers": 1,
        "memory": "4MB",
        "store": FeatureTable(data.x).save(tmp_path / "x.npy"),
    }
    options = {"num_neighbors": [3, 2], "batch_size": 8, "seed": 3}
    loader = assert_same_batches(data, options, COLLECTIVE, **given)
    assert isinstance(loader.tables["x"], DiskFeatures), "the CPU's"
    assert loader.route.tables["x"] is loader.tables["x"], "the GPU's too"
    assert loader.tables["x"].counts.rows > 0


def test_types_share_no_buffer():
    data = typed_data()
    data["author"].x = torch.randn(120, 6)  # as wide as that of papers
    options = {"num_neighbors": [4, 3], "batch_size": 20, "seed": 3}
    assert_same_batches(data, options, CollectivePlan("cpu", 1, 3), gpu_route="cpu", num_workers=2)


@pytest.mark.parametrize("thread_safe", [False, True])
@pytest.mark.parametrize("plan", [COLLECTIVE, CollectivePlan("cpu", 1, 2)], ids=lambda plan: plan.mode)
def test_transforms_of_the_users_own(plan, thread_safe):
    def transform(batch):
        batch["venue"].x = torch.nn.functional.one_hot(batch["venue"].n_id, 7).float()
        batch[CITES].late = batch["paper"].time[batch[CITES].edge_index[0]]
        if not thread_safe:
            batch["paper"].noise = torch.rand(batch["paper"].num_nodes)
        return batch

    options = {"num_neighbors": [3, 2], "batch_size": 30, "seed": 3, "transform": transform, "thread_safe": thread_safe}
    assert_same_batches(typed_data(), options, plan, gpu_route="cpu", num_workers=2)


def fitted(datamodule, data, tmp_path, **kwargs):
    pl.seed_everything(3, verbose=False)
    module = Typed(data)
    with torch.no_grad():
        module(next(iter(datamodule.val_dataloader())))  # sizes of lazy layers
    module.seen.clear()
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path, **{"max_epochs": 2, **kwargs},
    )  # fmt: skip
    trainer.fit(module, datamodule=datamodule)
    return module


@pytest.mark.parametrize("options", [{}, {"time_attr": "time"}], ids=["types", "types with times"])
@pytest.mark.parametrize("plan", ["auto", COLLECTIVE], ids=["auto", "collective"])
def test_training_is_that_of_the_neighbor_datamodule_bit_for_bit(plan, options, tmp_path):
    data, sizes = typed_data(), {"num_neighbors": [4, 3], "batch_size": 10, "seed": 5}
    ours = CollectiveDataModule(
        data, plan=plan, gpu_route="cpu", num_workers=2, profile_batches=2, gpu_buffer_size=2, **sizes, **options
    )
    found = fitted(ours, data, tmp_path)
    expected = fitted(NeighborDataModule(data, **sizes, **options), data, tmp_path)
    for a, b in zip(found.parameters(), expected.parameters(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(torch.cat(found.seen), torch.cat(expected.seen))
    assert ours.plan is not None
    assert plan != "auto" or ours.plan.times is not None


def test_rows_of_a_type_that_are_trained_are_those_of_the_step():
    data = typed_data()
    data["venue"].x = torch.nn.Parameter(torch.randn(7, 4))
    options = {"num_neighbors": [4, 3], "batch_size": 20, "seed": 3}
    batches = CollectiveDataModule(
        data, plan=COLLECTIVE, gpu_route="cpu", num_workers=2, sparse_grad=True, **options
    ).train_dataloader()
    for batch in batches:
        assert torch.equal(batch["venue"].x, data["venue"].x[batch["venue"].n_id])
        batch["venue"].x.sum().backward()
        assert data["venue"].x.grad.is_sparse
        with torch.no_grad():
            data["venue"].x += 1
            data["venue"].x.grad = None
    assert len(batches) > 3


def test_plans_tell_kinds_of_sampling_apart():
    data, typed = small_data(), typed_data()
    data.time = torch.arange(400)
    kinds = [
        (data, {}),
        (data, {"time_attr": "time"}),
        (data, {"time_attr": "time", "time_window": 5}),
        (data, {"time_attr": "time", "temporal_strategy": "last"}),
        (data, {"weight_attr": "edge_weight"}),
        (data, {"sampler": "labor"}),
        (data, {"sampler": "labor", "layer_dependency": True}),
        (data, {"subgraph_type": "induced"}),
        (typed, {}),
        (typed, {"weight_attr": "weight"}),
    ]
    names = [configuration_name(graph, NeighborSampler(graph, [3], **options), None, []) for graph, options in kinds]
    assert len(set(names)) == len(kinds)
    wider = typed_data()
    wider["author"].x = torch.randn(120, 5)
    assert configuration_name(wider, NeighborSampler(wider, [3]), None, []) != names[8]
    assert configuration_name(typed_data(), NeighborSampler(typed, [3]), None, []) == names[8]
    assert configuration_name(typed_data(seed=1), NeighborSampler(typed, [3]), None, []) != names[8]  # another graph
