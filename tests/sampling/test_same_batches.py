"""Every DataModule yields the same mini-batches as a single thread on one machine."""

import itertools
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.data import HeteroData
from torch_geometric.loader import LinkLoader, NodeLoader

from lightning_gnn import (
    CollectiveDataModule,
    CollectiveLinkDataModule,
    LinkDataModule,
    NeighborDataModule,
    PartitionedDataModule,
    PartitionedLinkDataModule,
    PersistentLinkDataModule,
    PersistentSamplerDataModule,
)
from lightning_gnn.collective.plan import CollectivePlan
from lightning_gnn.features import FeatureTable
from lightning_gnn.ops import batch_key
from lightning_gnn.ops.library import runs_triton
from lightning_gnn.partitioned import partition_graph
from lightning_gnn.partitioned.folder import write_partition
from tests.batch_checks import assert_same_batches, check
from tests.sampling.cases import CASES, GRAPHS, LINK_CASES, NODE_CASES, WRITES, any_case, load_alone, make_options

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # where Triton's interpreter stands in for a GPU
COLLECTIVE = CollectivePlan("collective", 2, 1)
PLANS = [COLLECTIVE, CollectivePlan("collective", 1, 3), CollectivePlan("cpu", 1, 2), CollectivePlan("gpu", 1, 0)]
pytestmark = pytest.mark.usefixtures("no_thread_left")
PINNED = {"topology": "pinned", "features": "pinned", "cache_bytes": 800}
STAGES = ("train", "val")
with_kernels = [
    pytest.mark.slow, pytest.mark.skipif(not runs_triton(torch.device(DEVICE)), reason="neither a GPU nor Triton")
]  # fmt: skip


def list_tables(loader):
    return loader.pipeline.tables.values()


WAYS = {
    "threads": (NeighborDataModule, LinkDataModule, {"num_workers": 3}),
    "collective": (
        CollectiveDataModule,
        CollectiveLinkDataModule,
        {"plan": COLLECTIVE, "gpu_route": "cpu", "num_workers": 2},
    ),
    "CPU alone": (CollectiveDataModule, None, {"plan": PLANS[2], "gpu_route": "cpu", "num_workers": 1}),
    "persistent": (PersistentSamplerDataModule, PersistentLinkDataModule, {"device": DEVICE}),
    "pinned": (PersistentSamplerDataModule, PersistentLinkDataModule, {"device": DEVICE, **PINNED}),
    "both routes": (
        CollectiveDataModule,
        CollectiveLinkDataModule,
        {"plan": COLLECTIVE, "device": DEVICE, "num_workers": 1},
    ),
    "parts": (PartitionedDataModule, PartitionedLinkDataModule, {"topology": "parts", "num_workers": 2}),
    "disk": (NeighborDataModule, LinkDataModule, {"memory": "8MB", "num_workers": 2}),
    "collective, disk": (CollectiveDataModule, None, {"memory": "8MB", "num_workers": 2}),
    "whole": (PartitionedDataModule, PartitionedLinkDataModule, {"topology": "whole", "num_workers": 0}),
}
"""DataModules of nodes and of edges, and their options."""
ON_KERNELS = ("persistent", "pinned", "both routes")
COMBINED = ("CPU alone", "collective, disk", "whole")
"""Ways of which each slice takes a few cases only, since the other ways cover their components."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Both graphs in three parts, and the features of both on disk."""
    folder = tmp_path_factory.mktemp("three")
    for name, make in GRAPHS.items():
        data = make()
        partition_graph(data, folder / name, 3, "ldg")
        for store in data.node_stores:
            if store.num_nodes:
                FeatureTable(store.x).save(folder / f"{store._key}.npy")
    return folder


def make_datamodule(way, case, data, folder, most):
    """Return the DataModule of a case."""
    of_nodes, of_edges, given = WAYS[way]
    options = {**make_options(case, data, most), **given}
    if "memory" in given:
        one = {name: folder / f"{name}.npy" for name in ("paper", "author")}
        options["store"] = one if CASES[case][0] == "typed" else folder / "None.npy"
    source = folder / CASES[case][0] if way in ("parts", "whole") else data
    return (of_edges if case in LINK_CASES else of_nodes)(source, **options)


class Numbered:
    """Draws the keys of an epoch's mini-batches in order, since PyG's loaders do not pass keys."""

    def __init__(self, sampler, seed):
        self.sampler, self.keys = sampler, (batch_key(seed, batch=number) for number in itertools.count())
        self.edge_permutation = None

    def sample_from_nodes(self, inputs):
        return self.sampler.sample_from_nodes(inputs, key=next(self.keys))

    def sample_from_edges(self, inputs, neg_sampling=None):
        return self.sampler.sample_from_edges(inputs, neg_sampling, key=next(self.keys))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_mini_batches_are_what_pygs_loaders_make_of_the_samples(case):
    data = GRAPHS[CASES[case][0]]()
    options = make_options(case, data)
    ours = load_alone(case, data, shuffle=False)
    time = options.get("input_train_time")
    numbered = Numbered(ours.link_sampler if case in LINK_CASES else ours.node_sampler, 3)
    if case in LINK_CASES:
        given = {"edge_label_index": options["input_train_edges"], "edge_label_time": time}
        theirs = LinkLoader(data, numbered, **given, neg_sampling=options["neg_sampling"], batch_size=8)
    else:
        theirs = NodeLoader(data, numbered, options["input_train_nodes"], time, batch_size=8)
    assert assert_same_batches(ours, theirs) > 1
    seeds = options["input_train_edges" if case in LINK_CASES else "input_train_nodes"]
    parts = (seeds[1] if isinstance(seeds, tuple) else seeds).split(8, dim=-1)
    for batch, own in zip(theirs, parts, strict=True):
        if options.get("subgraph_type") != "bidirectional":  # adds reversed edges
            check(batch, data)
        assert torch.equal(find_seeds(batch, data, case), own)


def find_seeds(batch, data, case):
    """Return the nodes, or the ends of the positive edges, for which a batch was sampled."""
    typed = isinstance(data, HeteroData)
    if case in NODE_CASES:
        nodes = batch["paper"] if typed else batch
        return nodes.n_id[: nodes.batch_size]
    ends = [batch["author"], batch["paper"]] if typed else [batch, batch]
    if "triplets" in case:
        places = ends[0].src_index, ends[1].dst_pos_index
    else:
        label = batch[WRITES] if typed else batch
        places = label.edge_label_index[:, : label.input_id.numel()]
    return torch.stack([end.n_id[place] for end, place in zip(ends, places, strict=True)])


def find_marks(way, case):
    marks = [*with_kernels] if way in ON_KERNELS else [pytest.mark.campaign] if way in COMBINED else []
    return marks


PAIRS = [
    pytest.param(way, case, marks=find_marks(way, case))
    for way, case in itertools.product(WAYS, CASES)
    if case in NODE_CASES
    # Collective batching does not support edge seeds, and negatives are drawn before the location of the graph matters.
    or (
        WAYS[way][1] is not None
        and (way != "pinned" or case in ("links, binary", "typed links", "typed link times, triplets", "links, labor"))
    )
]


@pytest.mark.slow
@pytest.mark.parametrize(("way", "case"), PAIRS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_kind_of_mini_batch(way, case, folder):
    data = GRAPHS[CASES[case][0]]()
    most = 12 if way in ON_KERNELS else 40  # the interpreter is slow
    module = make_datamodule(way, case, data, folder, most)
    module.setup("fit")
    expected = [load_alone(case, data, stage=stage, most=most) for stage in STAGES]
    for stage, plain in zip(STAGES, expected, strict=True):
        loader = getattr(module, f"{stage}_dataloader")()
        if way == "both routes" and stage == "train":
            assert loader.prefetcher.route.sampler.backend == "triton"
        for _ in range(1 if way in ON_KERNELS or stage == "val" else 2):  # the second epoch differs
            assert assert_same_batches(loader, plain) > (stage == "train")
    if "disk" in way:
        assert all(table.counts.rows for table in module.train_dataloader().pipeline.tables.values()), (
            "nothing was read"
        )
    if way == "pinned":
        has_cached_lists = module.placement.to_dict()["placement"]["topology"]["cached"] > 0
        assert has_cached_lists or any(table.cache is not None for table in loader.pipeline.tables.values()), (
            "nothing is cached on the device"
        )
    if way in ON_KERNELS[:2]:
        (batch, *_) = loader
        assert {store.x.device.type for store in batch.node_stores if "x" in store} == {DEVICE}
        assert {store.edge_index.device.type for store in batch.edge_stores} == {DEVICE}
    module.teardown("fit")


ANY = given(case=any_case(), plan=st.sampled_from(PLANS), parts=st.integers(1, 5), seed=st.integers(0, 99))


@pytest.mark.slow
@pytest.mark.parametrize("way", [way for way in WAYS if "disk" not in way and way not in ON_KERNELS])
@pytest.mark.filterwarnings("ignore::UserWarning")
@settings(max_examples=30)
@ANY
def test_any_graph_and_any_options(way, case, plan, parts, seed):
    check_batches(way, case, plan, parts, seed)


def test_times_of_nodes_without_edges():
    nodes = ("d", torch.tensor([0]))
    options = {"num_neighbors": [-1], "batch_size": 1, "seed": 0, "input_train_nodes": nodes, "input_val_nodes": nodes}
    data = HeteroData(d={"time": torch.tensor([1]), "num_nodes": 1})
    check_batches("parts", (data, {**options, "time_attr": "time", "time_window": 1}), None, 2, 0)


@pytest.mark.parametrize("way", [pytest.param(way, marks=with_kernels) for way in ON_KERNELS])
@pytest.mark.filterwarnings("ignore::UserWarning")
@settings(max_examples=8)  # under Triton's interpreter, each takes 20 seconds
@ANY
def test_any_graph_and_any_options_on_kernels(way, case, plan, parts, seed):
    check_batches(way, case, plan, parts, seed)


def check_batches(way, case, plan, parts, seed):
    """Compare the mini-batches of a way with those of ``NeighborDataModule``."""
    data, options = case
    kind, _, given = WAYS[way]
    with tempfile.TemporaryDirectory() as folder:
        source = data
        if way in ("parts", "whole"):
            generator, sizes = torch.Generator().manual_seed(seed), {None: data.num_nodes}
            if isinstance(data, HeteroData):
                sizes = {name: data[name].num_nodes for name in data.node_types}
            owner = {name: torch.randint(parts, (size,), generator=generator) for name, size in sizes.items()}
            source = Path(folder) / "parts"
            write_partition(data, source, owner, parts)
        elif kind is CollectiveDataModule:
            given = {**given, "plan": plan if way != "both routes" else COLLECTIVE}
        module = kind(source, **options, **given)
        module.setup("fit")
        expected = NeighborDataModule(data, **options)
        for stage in STAGES:
            loaders = [getattr(each, f"{stage}_dataloader")() for each in (module, expected)]
            assert_same_batches(*loaders)
        module.teardown("fit")
