import pytest
import pytorch_lightning as pl
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")

from lightning_gnn.persistent.link_datamodule import PersistentLinkDataModule
from lightning_gnn.sampling.link_datamodule import LinkDataModule
from tests.batching_data import small_data
from tests.faults.chains import Link
from tests.persistent.test_datamodule import DEVICE
from tests.sampling.test_node_datamodule import trainer
from tests.sampling.test_typed import WRITES, contents, typed_data


def options_of(kind):
    """A graph, training edges and how both ends are sampled."""
    if kind.startswith("types"):
        graph = typed_data()
        for name in ("author", "venue"):
            graph[name].time = torch.zeros(graph[name].num_nodes, dtype=torch.int64)
        given = {"input_train_edges": (WRITES, graph[WRITES].edge_index[:, :6]), "neg_sampling": "triplet"}
        if kind == "types with times":
            return graph, {**given, "time_attr": "time", "input_train_time": torch.arange(900, 906)}
        return graph, {**given, "exclude_seed_edges": {WRITES: ("paper", "rev_writes", "author")}}
    graph = small_data(num_nodes=60, num_edges=300)
    given = {"input_train_edges": graph.edge_index[:, :6], "neg_sampling": "binary"}
    more = {
        "uniform": {"input_val_edges": graph.edge_index[:, 20:22], "eval_loader_kwargs": {"num_neighbors": [2]}},
        "disjoint": {"disjoint": True, "neg_sampling": None},
        "without seed edges": {"exclude_seed_edges": True},
        "LABOR": {"sampler": "labor", "batch_dependency": 2},
    }
    return graph, given | more[kind]


PLACES = {
    "uniform": {"topology": "pinned", "features": "pinned", "cache_bytes": 2000},
    "types": {"topology": "pinned", "features": "pinned", "cache_bytes": 2000},
    "LABOR": {"features": "pinned", "cache_rows": 10},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["uniform", "disjoint", "without seed edges", "LABOR", "types", "types with times"])
def test_batches_equal_those_of_the_cpu(kind):
    graph, options = options_of(kind)
    options |= {"num_neighbors": [3, 2] if kind == "uniform" else [3], "batch_size": 3, "seed": 3}
    ours = PersistentLinkDataModule(graph, **options, **PLACES.get(kind, {}), device=DEVICE)
    theirs = LinkDataModule(graph, **options)
    for name in ("train_dataloader", *(["val_dataloader"] if kind == "uniform" else [])):
        for a, b in zip(getattr(ours, name)(), getattr(theirs, name)(), strict=True):
            assert contents(a) == contents(b)
            tensors = {key: value.device.type for key, value in a.to_dict().items() if isinstance(value, torch.Tensor)}
            assert set(tensors.values()) <= {DEVICE}, tensors
    if "cache_bytes" in PLACES.get(kind, {}):
        assert any(table.cache is not None for table in ours._tables.values())


def test_training_is_the_same_as_on_the_cpu():
    graph, options = options_of("uniform")
    outcomes = []
    for kind, device in ((LinkDataModule, {}), (PersistentLinkDataModule, {"device": "cpu"})):
        pl.seed_everything(2, verbose=False)
        model = Link()
        trainer(max_epochs=1).fit(model, kind(graph, **options, num_neighbors=[3], batch_size=3, seed=1, **device))
        outcomes.append({name: value.tolist() for name, value in model.state_dict().items()})
    assert outcomes[0] == outcomes[1]


def test_bad_arguments_are_named():
    graph, options = options_of("without seed edges")
    sizes = {"num_neighbors": [2], "batch_size": 4}
    with pytest.raises(ValueError, match="topology='disk' is unknown; use one of auto, device, shard, pinned"):
        PersistentLinkDataModule(graph, **options, **sizes, topology="disk")
    with pytest.raises(TypeError, match="there is no option bulk: mini-batches of edges are sampled one by one"):
        PersistentLinkDataModule(graph, **options, **sizes, bulk=8)
    own = type("Own", (), {"sample_from_edges": len})()
    with pytest.raises(TypeError, match="it cannot take the sampler Own; use LinkDataModule with it"):
        PersistentLinkDataModule(graph, batch_size=4, link_sampler=own)
