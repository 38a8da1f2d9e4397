import warnings

import pytest
import pytorch_lightning as pl
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")

from lightning_gnn.graph import DiskFeatures, FeatureTable
from lightning_gnn.persistent.datamodule import PersistentSamplerDataModule
from lightning_gnn.sampling.node_datamodule import NeighborDataModule
from tests.batching_data import small_data
from tests.sampling.test_node_datamodule import Model, trainer
from tests.sampling.test_typed import contents, typed_data

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = {"num_neighbors": [3, 2], "batch_size": 16, "seed": 3}


def data():
    return small_data(num_nodes=60, num_edges=300)


def assert_same_content(a, b):
    assert sorted(a.keys()) == sorted(b.keys())
    for key in a.keys():  # noqa: SIM118  a Data iterates over pairs
        if isinstance(a[key], torch.Tensor):
            assert torch.equal(a[key].cpu(), b[key].cpu()), key
        else:
            assert a[key] == b[key], key


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"topology": "device", "features": "device"},
        {"topology": "pinned", "features": "pinned", "cache_rows": 20},
        {"topology": "pinned", "features": "pinned", "cache_bytes": 4000},
        {"topology": "pinned", "cache_bytes": "auto", "device_memory": "64kB", "bulk": 1},
        {"cache_bytes": "auto", "device_memory": "60kB", "bulk": 1, "prefetch": 0},
        {"mode": "persistent", "fetch_size": 2},
    ],
    ids=str,
)
def test_batches_equal_those_of_the_cpu(options):
    ours = PersistentSamplerDataModule(data(), **SIZES, device=DEVICE, **options)
    theirs = NeighborDataModule(data(), **SIZES)
    for name in ("train_dataloader", "val_dataloader", "predict_dataloader"):
        for a, b in zip(getattr(ours, name)(), getattr(theirs, name)(), strict=True):
            assert_same_content(a, b)
            assert a.x.device.type == a.y.device.type == a.edge_index.device.type == DEVICE


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"features": "pinned"}, {"cache_bytes": "auto", "prefetch": 0}], ids=str)
def test_features_may_stay_on_disk(tmp_path, options, dtype, monkeypatch):
    announced, real = [], DiskFeatures.announce
    monkeypatch.setattr(DiskFeatures, "announce", lambda self, n_id: announced.append(n_id.numel()) or real(self, n_id))
    store, graph = FeatureTable(data().x, dtype=dtype).save(tmp_path / "x.npy"), data()
    graph.x = graph.x.to(dtype)
    ours = PersistentSamplerDataModule(data(), **SIZES, device=DEVICE, memory="4MB", store=store, **options)
    theirs = NeighborDataModule(graph, **SIZES)
    for name in ("train_dataloader", "val_dataloader"):
        for a, b in zip(getattr(ours, name)(), getattr(theirs, name)(), strict=True):
            assert_same_content(a, b)
            assert a.x.device.type == DEVICE
    assert "data.x" not in [part.name for part in ours.placement.parts]
    table = ours.train_dataloader().tables["x"]
    assert len(announced) >= len(theirs.train_dataloader()) + len(theirs.val_dataloader())
    assert table.claim(), "nobody announces reads any more"


@pytest.mark.parametrize(
    "option", [{"quantize": True}, {"cache_rows": 5}, {"features": "device"}, {"features": "shard"}]
)
def test_what_is_for_features_in_memory_is_refused_for_those_on_disk(tmp_path, option):
    store = FeatureTable(data().x).save(tmp_path / "x.npy")
    with pytest.raises(ValueError, match="is for features in memory, but with memory= those on disk come by way of"):
        PersistentSamplerDataModule(data(), **SIZES, device=DEVICE, memory="4MB", store=store, **option)


@pytest.mark.slow
def test_any_bulk_gives_the_same_batches_also_from_its_middle():
    options = SIZES | {"num_neighbors": [2], "batch_size": 8}
    theirs = list(NeighborDataModule(data(), **options).train_dataloader())
    for bulk in (2, 8):
        ours = PersistentSamplerDataModule(data(), **options, device=DEVICE, bulk=bulk)
        loader = ours.train_dataloader()
        loader.first_batch = lambda: 1  # as in a resumed run
        made = list(loader)
        assert len(made) == len(theirs) - 1 > 2
        for a, b in zip(made, theirs[1:], strict=True):
            assert_same_content(a, b)
        assert loader.times.batches == len(made)


@pytest.mark.parametrize("bulk", [1, 8])
def test_positions_that_are_no_list_are_refused_as_on_the_cpu(bulk):
    options = {"num_neighbors": [2], "seed": 3, "batch_sampler": [torch.tensor([[0, 1]])]}
    ours = PersistentSamplerDataModule(data(), **options, device=DEVICE, bulk=bulk)
    for module in (ours, NeighborDataModule(data(), **options)):
        with pytest.raises(ValueError, match=r"seeds must have one dimension, but have the shape \[1, 2\]"):
            list(module.train_dataloader())


def more(kind):
    """A graph, and options that sample it otherwise than uniformly, or with types."""
    if kind in ("types", "types with times"):
        graph = typed_data()
        graph["paper"].train_mask = torch.arange(300) < 5
        graph["paper"].val_mask = torch.arange(300) > 297
        return graph, {"time_attr": "time"} if kind == "types with times" else {}
    graph = data()
    graph.train_mask, graph.val_mask = torch.arange(60) < 7, torch.arange(60) > 57
    graph.time = torch.arange(60)
    given = {"input_train_time": torch.arange(20, 27), "time_attr": "time", "time_window": 12.5}
    options = {"times": given, "weights": {"weight_attr": "edge_weight"}}
    return graph, options.get(kind, {"sampler": "labor", "batch_dependency": 2})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["types", "types with times", "times", "weights", "LABOR"])
def test_batches_of_every_kind_equal_those_of_the_cpu(kind):
    graph, options = more(kind)
    places = {"topology": "pinned", "features": "pinned"} if kind in ("types", "weights") else {}
    options |= {"num_neighbors": [3, 2], "batch_size": 4, "seed": 3, "eval_loader_kwargs": {"num_neighbors": [2]}}
    ours = PersistentSamplerDataModule(graph, **options, **places, device=DEVICE)
    theirs = NeighborDataModule(graph, **options)
    for name in ("train_dataloader", "val_dataloader"):
        for a, b in zip(getattr(ours, name)(), getattr(theirs, name)(), strict=True):
            assert contents(a) == contents(b)
            assert all(part.edge_index.device.type == DEVICE for part in a.edge_stores)
            assert all(part.x.device.type == DEVICE for part in a.node_stores if "x" in part)


@pytest.mark.slow
def test_features_of_types_are_quantised():
    graph, options = more("types")
    options |= {"num_neighbors": [2], "batch_size": 5, "seed": 3}
    ours = PersistentSamplerDataModule(graph, **options, device=DEVICE, quantize=True)
    assert ours.data is graph
    for a, b in zip(ours.train_dataloader(), NeighborDataModule(graph, **options).train_dataloader(), strict=True):
        for name in ("paper", "author"):
            step = b[name].x.abs().amax(dim=1, keepdim=True) / 127
            assert bool(((a[name].x.cpu() - b[name].x).abs() <= 0.501 * step).all())
            assert not torch.equal(a[name].x.cpu(), b[name].x)


@pytest.mark.slow
@pytest.mark.parametrize("cache", [{"cache_rows": 30}, {"cache_bytes": 2600}], ids=str)
@pytest.mark.parametrize("kind", ["types", "types with times", "times", "weights", "LABOR"])
def test_hot_rows_of_every_kind_change_nothing(kind, cache):
    graph, options = more(kind)
    options |= {"num_neighbors": [3], "batch_size": 4, "seed": 3}
    ours = PersistentSamplerDataModule(
        graph, **options, **cache, topology="pinned", features="pinned", device=DEVICE, quantize=kind == "LABOR"
    )
    loader = ours.train_dataloader()
    tables = {name: table for name, table in loader.tables.items() if table.cache is not None}
    assert tables
    assert set(tables) <= {"x", ("paper", "x"), ("author", "x")}
    if "cache_rows" in cache:
        assert sum(table.cache_rows for table in tables.values()) == 30
    else:
        assert sum(table.cache.nbytes for table in tables.values()) <= 2600
    for a, b in zip(loader, NeighborDataModule(graph, **options).train_dataloader(), strict=True):
        if kind == "LABOR":
            a.x = b.x  # rounded
        assert contents(a) == contents(b)


def test_evaluation_may_sample_otherwise():
    options = {**SIZES, "eval_loader_kwargs": {"num_neighbors": [-1, -1]}}
    ours = PersistentSamplerDataModule(data(), **options, device=DEVICE)
    theirs = NeighborDataModule(data(), **options)
    for a, b in zip(ours.val_dataloader(), theirs.val_dataloader(), strict=True):
        assert_same_content(a, b)


def test_quantised_features_come_back_within_half_a_step():
    ours = PersistentSamplerDataModule(data(), **SIZES, device=DEVICE, quantize=True)
    for a, b in zip(ours.train_dataloader(), NeighborDataModule(data(), **SIZES).train_dataloader(), strict=True):
        step = b.x.abs().amax(dim=1, keepdim=True) / 127
        assert bool(((a.x.cpu() - b.x).abs() <= 0.501 * step).all())


def test_training_is_the_same_as_on_the_cpu():
    models = []
    for kind in (NeighborDataModule, PersistentSamplerDataModule):
        pl.seed_everything(2, verbose=False)
        options = {"device": "cpu"} if kind is PersistentSamplerDataModule else {}
        model = Model()
        trainer(max_epochs=2).fit(model, kind(data(), **SIZES, **options))
        models.append(model)
    assert models[0].history == models[1].history


def test_loaders_that_lightning_makes_anew_to_overfit_keep_their_arguments():
    found = []
    for kind in (NeighborDataModule, PersistentSamplerDataModule):
        pl.seed_everything(2, verbose=False)
        gpu = kind is PersistentSamplerDataModule
        module = kind(data(), **SIZES, **({"device": "cpu"} if gpu else {"num_workers": 2}))
        model, run = Model(), trainer(max_epochs=2, overfit_batches=2)
        run.fit(model, module)
        loader = run.train_dataloader
        assert (loader.seed, loader.num_threads, loader.first_batch) == (
            module.seed,
            0 if gpu else 2,
            module._first_batch,
        )
        assert list(loader.tables) == (["x", "edge_attr"] if gpu else [])
        found.append(model.history)
    assert found[0] == found[1]
    assert len(found[0]) == 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_once_and_gives_the_same_batches():
    ours = PersistentSamplerDataModule(data(), **SIZES, num_workers=1)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        batches = list(ours.train_dataloader())
        ours.val_dataloader()
    assert sum("No GPU for the persistent sampler" in str(warning.message) for warning in warned) == 1
    for a, b in zip(batches, NeighborDataModule(data(), **SIZES).train_dataloader(), strict=True):
        assert_same_content(a, b)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topology": "disk"}, "topology='disk' is unknown; use one of auto, device, shard, pinned"),
        ({"features": "disk"}, "features='disk' is unknown"),
        ({"cache_rows": -1}, "cache_rows must not be negative"),
        ({"cache_rows": 1, "cache_bytes": 1}, "not both"),
        ({"features": "device", "cache_rows": 5}, "every row is at hand"),
        ({"fetch_size": 0}, "fetch_size must be at least 1"),
    ],
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        PersistentSamplerDataModule(data(), **SIZES, **options)
