"""Functions that the processes of tests with sharded tables run."""

import itertools
import os
from pathlib import Path
from types import SimpleNamespace

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory

from lightning_gnn import LinkDataModule, NeighborDataModule
from lightning_gnn.gpu_sampling import PersistentLinkDataModule, PersistentSamplerDataModule, shards
from tests.batch_checks import assert_same_batches
from tests.batching_data import small_data
from tests.sampling.test_node_datamodule import Model
from tests.sampling.test_typed import typed_data

ALL = {"topology": "shard", "features": "shard"}
KINDS = {
    "features": {"topology": "device", "features": "shard"},
    "topology": {"topology": "shard", "features": "pinned", "disjoint": True},
    "both": ALL,
    "bulk": {**ALL, "bulk": 4},
    "all neighbours": {**ALL, "num_neighbors": [-1], "prefetch": 0},
    "quantised": {**ALL, "quantize": True},
    "types": {"topology": "device", "features": "shard"},
    "links": ALL,
}
DEVICE_BYTES = 17_000
"""Room for mini-batches only."""


def make_graph(kind, rank):
    """Return a graph that is the same for all ranks, except for the training and evaluation masks."""
    if kind == "types":
        graph = typed_data()
        graph["paper"].train_mask = torch.arange(300) // 7 == rank + 1
        graph["paper"].val_mask = torch.arange(300) > 297 - 3 * rank
        return graph
    graph = small_data(num_nodes=61, num_edges=300)
    graph.train_mask, graph.val_mask = torch.arange(61) // 7 == rank + 1, torch.arange(61) > 59 - 3 * rank
    if kind == "bulk":
        graph.train_mask = torch.arange(61) < 5 + 6 * rank  # 3 and 6 mini-batches
    return graph


def join(rank, folder):
    size = int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size)


def make_datamodules(kind, rank, options):
    """Return the DataModule under test and the reference."""
    graph, options = make_graph(kind, rank), dict(options)
    common = {"batch_size": 2, "seed": 3, "num_neighbors": options.pop("num_neighbors", [3, 2])}
    common |= {name: options.pop(name) for name in ("disjoint",) if name in options}
    if kind == "links":
        edges = {"input_train_edges": graph.edge_index[:, : 3 + rank], "neg_sampling_ratio": 1}
        ours = PersistentLinkDataModule(graph, **common, **edges, **options, device="cpu")
        return ours, LinkDataModule(graph, **common, **edges)
    ours = PersistentSamplerDataModule(graph, **common, **options, device="cpu")
    return ours, NeighborDataModule(graph, **common)


class FileMemory:
    """Stands in for symmetric memory: files that all processes map, each at another address."""

    def __init__(self, swapped=False):
        self.numbers, self.swapped = itertools.count(), swapped

    def empty(self, *shape, dtype, device):
        self.number, self.length = next(self.numbers), shape[0] * shape[1] * dtype.itemsize
        self._file(dist.get_rank()).write_bytes(bytes(self.length))
        return self.get_buffer(dist.get_rank(), shape, dtype)

    def rendezvous(self, local, group):
        dist.barrier(group)
        # Like a faulty driver, swapped memory is that of another process.
        order = range(dist.get_world_size(group))[:: -1 if self.swapped else 1]
        self.parts = [self.get_buffer(rank, local.shape, local.dtype) for rank in order]
        return SimpleNamespace(get_buffer=lambda rank, *_: self.parts[rank], barrier=dist.barrier, parts=self.parts)

    def get_buffer(self, rank, shape, dtype):
        part = torch.from_file(str(self._file(rank)), shared=True, size=self.length, dtype=torch.uint8)
        return part.view(dtype).view(*shape)

    def _file(self, rank):
        return Path(os.environ["RANK_FOLDER"]) / f"{self.number}-{rank}"


def read_by_address(swapped=False):
    """Let processes read each other's memory as GPUs with peer access do."""
    memory = FileMemory(swapped)
    _symmetric_memory.empty, _symmetric_memory.rendezvous = memory.empty, memory.rendezvous
    shards.find_obstacle, torch.accelerator.synchronize = lambda device, devices: "", lambda device: None


def share_with_failing_step(rank, folder, step):
    """Return why no table is sharded, and the error of sharding one, if a step fails on rank 1."""
    join(rank, folder)
    read_by_address()
    owner = {"copy_shard": shards.BlockCyclicLayout, "take": shards.PeerShards}.get(step, _symmetric_memory)
    works = getattr(owner, step)

    def fail(*args, **kwargs):
        works(*args, **kwargs)
        raise MemoryError("planted")

    if rank == 1:
        setattr(owner, step, fail)
    machine = shards.rendezvous_on_machine(torch.device("cpu"))
    try:
        machine.share(torch.arange(6).view(-1, 1))
    except RuntimeError as error:
        return machine.obstacle, str(error), machine.gather(rank)
    return machine.obstacle, "", machine.gather(rank)


def compare_batches(rank, folder, kinds):
    """Compare all mini-batches; return by kind their number per stage, and where the tables are stored."""
    join(rank, folder)
    read_by_address()
    found = {}
    for kind in kinds:
        ours, theirs = make_datamodules(kind, rank, KINDS[kind])
        counts = []
        for stage in ("train",) if kind == "links" else ("train", "val"):
            made, plain = (list(getattr(made, f"{stage}_dataloader")()) for made in (ours, theirs))
            for a, b in zip(made, plain, strict=True) if kind == "quantised" else ():
                step = b.x.abs().amax(dim=1, keepdim=True) / 127
                assert bool(((a.x - b.x).abs() <= 0.501 * step).all())
                a.x = b.x
            counts.append(assert_same_batches(made, plain))
        found[kind] = counts, {part.name: part.place for part in ours.placement.parts}
    dist.barrier()
    return found


def explain_unsharded(rank, folder, fails):
    """Return by kind why tables were not sharded, and where they are stored; with ``fails``, reads are wrong."""
    join(rank, folder)
    if fails:
        read_by_address(swapped=True)
    refused = {}
    for kind in ("both", "features", "topology", "links"):
        try:
            make_datamodules(kind, rank, KINDS[kind])[0].train_dataloader()
        except ValueError as error:
            refused[kind] = str(error)
    ours, theirs = make_datamodules("both", rank, {"device_memory": DEVICE_BYTES})
    assert_same_batches(ours.train_dataloader(), theirs.train_dataloader())
    assert str(ours.placement) == str(ours.plan_placement())  # for one GPU
    dist.barrier()
    return refused, {part.name: part.place for part in ours.placement.parts}


def fit_model(rank, ours):
    """Train and validate, also in the middle of an epoch; return the weights."""
    read_by_address()
    torch.set_num_threads(1)
    pl.seed_everything(5)
    made = make_datamodules("bulk", 4, KINDS["bulk"])[0 if ours else 1]  # 13 nodes: ranks validate 4 and 3 batches
    module, quiet = Model(), dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    options = {"val_check_interval": 3, "num_sanity_val_steps": 1, "max_epochs": 2}
    pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", **options, **quiet).fit(module, made)
    return [parameter.tolist() for parameter in module.parameters()]
