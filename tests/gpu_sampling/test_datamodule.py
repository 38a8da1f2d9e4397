import warnings

import pytest
import pytorch_lightning as pl
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")

from lightning_gnn.datamodules.link import LinkDataModule
from lightning_gnn.datamodules.node import NeighborDataModule
from lightning_gnn.features import DiskFeatures, FeatureTable
from lightning_gnn.gpu_sampling.datamodule import PersistentSamplerDataModule
from lightning_gnn.gpu_sampling.link_datamodule import PersistentLinkDataModule
from tests.batch_checks import assert_same, assert_same_batches
from tests.batching_data import small_data
from tests.faults.chains import Link
from tests.sampling.cases import GRAPHS, NODE_CASES, make_options
from tests.sampling.test_node_datamodule import Model, make_trainer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = {"num_neighbors": [3, 2], "batch_size": 16, "seed": 3}


def data():
    return small_data(num_nodes=60, num_edges=300)


assert_same_content = assert_same  # whichever device they are on


def make_pair(*, ours, **options):
    """Return the DataModule that samples on the GPU, and that of the CPU."""
    options = SIZES | options
    return PersistentSamplerDataModule(data(), **options, device=DEVICE, **ours), NeighborDataModule(data(), **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"topology": "device", "features": "device"},
        {"topology": "pinned", "features": "pinned", "cache_bytes": 4000},
        {"topology": "pinned", "cache_bytes": "auto", "device_memory": "64kB", "bulk": 1},
        {"cache_bytes": "auto", "device_memory": "60kB", "bulk": 1, "prefetch": 0},
        {"mode": "persistent", "fetch_size": 2},
    ],
    ids=str,
)
def test_wherever_the_graph_lies_batches_are_those_of_the_cpu(options):
    ours, theirs = make_pair(ours=options)
    for name in ("train_dataloader", "val_dataloader", "predict_dataloader"):
        assert_same_batches(getattr(ours, name)(), getattr(theirs, name)())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"features": "pinned"}, {"cache_bytes": "auto", "prefetch": 0}], ids=str)
def test_features_may_stay_on_disk(tmp_path, options, dtype, record_calls):
    announced = record_calls(DiskFeatures, "announce")
    store = FeatureTable(data().x, dtype=dtype).save(tmp_path / "x.npy")
    ours, theirs = make_pair(ours={"memory": "4MB", "store": store, **options})
    theirs.data.x = theirs.data.x.to(dtype)
    for name in ("train_dataloader", "val_dataloader"):
        assert_same_batches(getattr(ours, name)(), getattr(theirs, name)())
    assert "data.x" not in [part.name for part in ours.placement.parts]
    table = ours.train_dataloader().pipeline.tables["x"]
    assert len(announced) >= len(theirs.train_dataloader()) + len(theirs.val_dataloader())
    assert table.claim(), "no loader announces reads"


@pytest.mark.slow
@pytest.mark.parametrize("bulk", [2, 8])
def test_any_bulk_gives_the_same_batches_also_from_its_middle(bulk):
    ours, theirs = make_pair(ours={"bulk": bulk}, num_neighbors=[2], batch_size=8)
    loader = ours.train_dataloader()
    loader.first_batch = lambda: 1  # as in a resumed run
    made = list(loader)
    assert assert_same_batches(made, [*theirs.train_dataloader()][1:]) > 2
    assert loader.times.batches == len(made)
    # The first launch had room for its edges: it was not repeated with more memory.
    assert loader.pipeline.sampler._kernel._start_capacity == ours.placement.start_edges


@pytest.mark.slow
@pytest.mark.parametrize("case", ["typed", "node times"])
def test_hot_rows_change_nothing(case):
    graph = GRAPHS[NODE_CASES[case][0]]()
    options, places = make_options(case, graph, 8), {"topology": "pinned", "features": "pinned", "cache_bytes": 2000}
    loader = PersistentSamplerDataModule(graph, **options, **places, device=DEVICE).train_dataloader()
    tables = {name: table for name, table in loader.pipeline.tables.items() if table.cache is not None}
    assert set(tables) <= {"x", "half", ("paper", "x"), ("author", "x")}
    assert tables
    assert_same_batches(loader, NeighborDataModule(graph, **options).train_dataloader())


@pytest.mark.slow
@pytest.mark.parametrize("case", ["plain", "typed", "labor"])
def test_quantised_features_come_back_within_half_a_step(case):
    graph = GRAPHS[NODE_CASES[case][0]]()
    options = make_options(case, graph, 8)
    places = {"features": "pinned", "cache_bytes": 300} if case == "labor" else {}
    ours = PersistentSamplerDataModule(graph, **options, **places, device=DEVICE, quantize=True)
    assert ours.data is graph
    for a, b in zip(ours.train_dataloader(), NeighborDataModule(graph, **options).train_dataloader(), strict=True):
        for mine, theirs in zip(a.node_stores, b.node_stores, strict=True):
            step = theirs.x.abs().amax(dim=1, keepdim=True) / 127
            assert bool(((mine.x.cpu() - theirs.x).abs() <= 0.501 * step).all())
            assert not theirs.x.numel() or not torch.equal(mine.x.cpu(), theirs.x)
            mine.x = theirs.x  # everything else is the same
        if "half" in a:
            a.half = b.half
        assert_same(a, b)


@pytest.mark.medium
@pytest.mark.parametrize("links", [False, True])
def test_training_is_the_same_as_on_the_cpu(links):
    kinds = (LinkDataModule, PersistentLinkDataModule) if links else (NeighborDataModule, PersistentSamplerDataModule)
    options = {"input_train_edges": data().edge_index[:, :6], "neg_sampling": "binary"} if links else {}
    weights = []
    for kind, device in zip(kinds, ({}, {"device": "cpu"}), strict=True):
        pl.seed_everything(2, verbose=False)
        model = Link() if links else Model()
        make_trainer(max_epochs=2).fit(model, kind(data(), **SIZES, **options, **device))
        weights.append([value.tolist() for value in model.state_dict().values()])
    assert weights[0] == weights[1]


@pytest.mark.medium
def test_loaders_that_lightning_makes_anew_to_overfit_keep_their_arguments():
    found = []
    for kind in (NeighborDataModule, PersistentSamplerDataModule):
        pl.seed_everything(2, verbose=False)
        gpu = kind is PersistentSamplerDataModule
        module = kind(data(), **SIZES, **({"device": "cpu"} if gpu else {"num_workers": 2}))
        model, run = Model(), make_trainer(max_epochs=2, overfit_batches=2)
        run.fit(model, module)
        loader = run.train_dataloader
        assert (loader.pipeline.seed, loader.num_threads, loader.first_batch) == (
            module.seed,
            0 if gpu else 2,
            module.position.first_batch,
        )
        assert list(loader.pipeline.tables) == (["x", "edge_attr"] if gpu else [])
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
    assert_same_batches(batches, NeighborDataModule(data(), **SIZES).train_dataloader())


OWN = type("Own", (), {"sample_from_edges": len})()
ON_DISK = "these options are for features in memory, but memory= reads them from disk through"


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        *(
            (kind, {"topology": "disk"}, "topology='disk' is unknown; use one of auto, device, shard, pinned")
            for kind in (PersistentSamplerDataModule, PersistentLinkDataModule)
        ),
        *(
            (PersistentSamplerDataModule, options, message)
            for options, message in (
                ({"features": "disk"}, "features='disk' is unknown"),
                ({"prefetch": -1}, "prefetch must not be negative"),
                ({"device_memory": "big"}, "device_memory must be a number of bytes"),
                ({"gpus": 0}, "gpus must be at least 1"),
                ({"fetch_size": 0}, "fetch_size must be at least 1"),
                ({"topology": "shard", "sampling": "labor"}, "topology='shard' does not go with sampling='labor'"),
                (
                    {"topology": "shard", "eval_loader_kwargs": {"subgraph_type": "induced"}},
                    "does not go with subgraph_type",
                ),
                *(
                    ({"memory": "4MB", **option}, ON_DISK)
                    for option in ({"quantize": True}, {"features": "shard"})
                ),
            )
        ),
        (PersistentLinkDataModule, {"bulk": 8}, "unknown option bulk: mini-batches of edges are sampled one by one"),
        (PersistentLinkDataModule, {"link_sampler": OWN, "num_neighbors": None, "seed": None},
         "it cannot take the sampler Own; use LinkDataModule with it"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(kind, options, message, tmp_path):
    if "memory" in options:
        options = {**options, "store": FeatureTable(data().x).save(tmp_path / "x.npy")}
    with pytest.raises((ValueError, TypeError), match=message):
        kind(data(), **SIZES | options)
