"""What each process of a test of dealt-out tables does."""

import os

os.environ["TRITON_INTERPRET"] = "1"

import itertools
from pathlib import Path

import pytorch_lightning as pl
import torch
import torch.distributed as dist

from lightning_gnn.persistent import PersistentLinkDataModule, PersistentSamplerDataModule, shards
from lightning_gnn.persistent.exchange import Exchange
from lightning_gnn.sampling import LinkDataModule, NeighborDataModule
from tests.batching_data import small_data
from tests.sampling.test_node_datamodule import Model
from tests.sampling.test_typed import contents, typed_data

ALL = {"topology": "shard", "features": "shard"}
KINDS = {
    "features": {"topology": "device", "features": "shard"},
    "topology": {"topology": "shard", "features": "pinned", "disjoint": True},
    "both": ALL,
    "bulk": {**ALL, "bulk": 4},
    "bulk, in turn": {**ALL, "bulk": 4, "prefetch": 0},
    "one by one": {**ALL, "bulk": 1},
    "empty, bulk": {**ALL, "bulk": 2},
    "empty, one by one": {**ALL, "bulk": 1},
    "empty trees": {**ALL, "disjoint": True},
    "all neighbours": {**ALL, "num_neighbors": [-1], "prefetch": 0},
    "quantised": {**ALL, "quantize": True},
    "types": {"topology": "device", "features": "shard"},
    "links": ALL,
}


def graph_of(kind, rank):
    """A graph, the same for all ranks but for what they train and evaluate on."""
    if kind == "types":
        graph = typed_data()
        graph["paper"].train_mask = torch.arange(300) // 7 == rank + 1
        graph["paper"].val_mask = torch.arange(300) > 297 - 3 * rank
        return graph
    graph = small_data(num_nodes=61, num_edges=300)
    graph.train_mask, graph.val_mask = torch.arange(61) // 7 == rank + 1, torch.arange(61) > 59 - 3 * rank
    if "bulk" in kind or kind == "one by one":
        graph.train_mask = torch.arange(61) < 5 + 6 * rank  # 3 and 6 mini-batches
    return graph


class SomeEmpty:
    """A user's own batch sampler: some of its mini-batches are empty, other ones in each rank."""

    batch_size = 2
    POSITIONS = [[0, 1], [2], [], []], [[], [1], [2], [0], [], [3, 0]]

    def __init__(self, rank):
        self.positions = self.POSITIONS[rank]

    def __len__(self):
        return len(self.positions)

    def __iter__(self):
        return iter(self.positions)


def join(rank, folder):
    size = int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size)


def datamodules(kind, rank, options):
    """Return what is tested, and what it is compared with."""
    graph, options = graph_of(kind, rank), dict(options)
    common = {"batch_size": 2, "seed": 3, "num_neighbors": options.pop("num_neighbors", [3, 2])}
    common |= {name: options.pop(name) for name in ("disjoint",) if name in options}
    if "empty" in kind:
        common["batch_sampler"] = SomeEmpty(rank)
    if kind == "links":
        edges = {"input_train_edges": graph.edge_index[:, : 3 + rank], "neg_sampling_ratio": 1}
        ours = PersistentLinkDataModule(graph, **common, **edges, **options, device="cpu")
        return ours, LinkDataModule(graph, **common, **edges)
    ours = PersistentSamplerDataModule(graph, **common, **options, device="cpu")
    return ours, NeighborDataModule(graph, **common)


def batches_of(rank, folder, kinds):
    """Return, by kind, how many mini-batches of each stage were right, where the tables were, and how many exchanges
    there were in each stage; raise for others.
    """
    join(rank, folder)
    exchanged = itertools.count()
    run = Exchange._run

    def counted(exchange):
        next(exchanged)
        run(exchange)

    Exchange._run = counted
    found = {}
    for kind in kinds:
        ours, theirs = datamodules(kind, rank, KINDS[kind])
        counts, exchanges = [], []
        for stage in ("train",) if kind == "links" else ("train", "val"):
            loaders = [getattr(made, f"{stage}_dataloader")() for made in (ours, theirs)]
            counts.append(0)
            begin = next(exchanged)
            for a, b in itertools.zip_longest(*loaders):
                if kind == "quantised":
                    step = b.x.abs().amax(dim=1, keepdim=True) / 127
                    assert bool(((a.x - b.x).abs() <= 0.501 * step).all())
                    a.x = b.x
                assert contents(a) == contents(b), (kind, stage, counts)
                counts[-1] += 1
            exchanges.append(next(exchanged) - begin - 1)
        found[kind] = counts, {part.name: part.place for part in ours.placement.parts}, exchanges
    dist.barrier()
    return found


_numbers = itertools.count()


def mapped(shape, dtype, device, group):
    """Stand in for symmetric memory: files that all processes map, each elsewhere."""
    number = next(_numbers)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    length = shape[0] * shape[1] * dtype.itemsize
    files = [Path(os.environ["RANK_FOLDER"]) / f"{number}-{other}" for other in range(size)]
    files[rank].write_bytes(bytes(length))
    dist.barrier(group)
    parts = [torch.from_file(str(file), shared=True, size=length, dtype=torch.uint8) for file in files]
    return parts[rank].view(dtype).view(shape), [part.data_ptr() for part in parts], lambda: dist.barrier(group), parts


def crossed(*arguments):
    """Do what a faulty driver would: each process finds another one's memory than it takes it for."""
    local, addresses, *rest = mapped(*arguments)
    return local, addresses[::-1], *rest


def peers_of(rank, folder, kinds):
    """Do :func:`batches_of` where processes read each other's memory."""
    from lightning_gnn.persistent import placement

    def met(device):
        node = shards.Node(shards.meet_on_node(device).group, device, True)
        shards.symmetric = crossed
        assert not shards.reads_right(node)
        shards.symmetric = mapped
        assert shards.reads_right(node)
        return node

    shards.symmetric, placement.meet_on_node = mapped, met
    return batches_of(rank, folder, kinds)


def out_of_step(rank, folder):
    """Leave a loader where the others do not begin it; return what is said."""
    join(rank, folder)
    ours, _ = datamodules("features", rank, KINDS["features"])
    train, val = ours.train_dataloader(), ours.val_dataloader()
    try:
        list(train)
        if rank == 0:
            next(iter(train))
        list(val)
    except RuntimeError as error:
        return str(error)
    return ""


def left(rank, folder):
    """Leave loaders where the others do, and begin them again; return how many mini-batches were right."""
    join(rank, folder)
    loaders = [made.train_dataloader() for made in datamodules("bulk", rank, KINDS["bulk"])]
    counts = []
    for number in (2, 1, None):
        made, plain = ([contents(batch) for batch in itertools.islice(loader, number)] for loader in loaders)
        assert made == plain
        counts.append(len(made))
    dist.barrier()
    return counts


def faulty(rank, folder):
    """Have one rank fail in the middle of its loader."""
    join(rank, folder)
    loader = datamodules("features", rank, KINDS["features"])[0].train_dataloader()
    for number, _ in enumerate(loader):
        if rank == 0 and number == 1:
            raise ValueError("a fault of the user's own")


def fitted(rank, ours):
    """Train and validate, also in the middle of an epoch; return the weights."""
    torch.set_num_threads(1)
    pl.seed_everything(5)
    made = datamodules("bulk", 4, KINDS["bulk"])[0 if ours else 1]  # of 13 nodes one validates 4 times, one 3 times
    module, quiet = Model(), dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    options = {"val_check_interval": 3, "num_sanity_val_steps": 1, "max_epochs": 2}
    pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", **options, **quiet).fit(module, made)
    return [parameter.tolist() for parameter in module.parameters()]
