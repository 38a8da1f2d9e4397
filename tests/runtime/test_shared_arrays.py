"""Ranks of one machine share one copy of equal arrays; only memory use shows it."""

import copy
import errno
import mmap
import os
import re
import signal
import tempfile
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch_geometric.data import Data

from lightning_gnn import (
    CollectiveDataModule,
    FullGraphDataModule,
    LinkDataModule,
    NeighborDataModule,
    PersistentSamplerDataModule,
)
from lightning_gnn.features.arrays import load_array, save_arrays
from lightning_gnn.nn import GCN, GraphSAGE, LinkPredictor, NodeClassifier
from lightning_gnn.runtime import shared_arrays
from lightning_gnn.runtime.shared_arrays import find_tensors, share_equal_arrays
from lightning_gnn.runtime.store import checksum
from tests.full_graph.launch import observe, run

pytestmark = pytest.mark.skipif(
    shared_arrays.which_machine() is None, reason="for Linux with memory that is not reserved"
)


def draw_numbers(count=1 << 19, seed=1):
    return torch.rand(count, generator=torch.Generator().manual_seed(seed))


def join(rank, num_ranks):
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks)


def read_mappings(array):
    """Return an array's bytes in file pages, by file."""
    array = array.numpy() if isinstance(array, torch.Tensor) else array
    start, end = array.ctypes.data, array.ctypes.data + array.nbytes
    found = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, _, _, _, *name = line.split(maxsplit=5)
        first, last = (int(address, 16) for address in addresses.split("-"))
        if name and name[0][0] != "[" and (size := min(end, last) - max(start, first)) > 0:
            found[name[0]] = found.get(name[0], 0) + size
    return found


def count_mapped_bytes(array):
    """Return how many bytes of an array are pages of the shared file."""
    return sum(size for name, size in read_mappings(array).items() if "memfd:lightning_gnn" in name)


def count_own_bytes():
    """Return how many bytes this process alone has written in memory shared with others."""
    found, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0] and ":" not in line.split()[0]:
            ours = "memfd:lightning_gnn" in line
        elif ours and line.startswith("Anonymous:"):
            found += 1024 * int(line.split()[1])
    return found


# -- the arrays


@dataclass
class Pair:
    first: torch.Tensor
    second: torch.Tensor


def share_arrays(rank, num_ranks):
    join(rank, num_ranks)
    x = draw_numbers().view(-1, 8)
    edge_index = torch.arange(1 << 19).view(2, -1)
    held = {
        "data": Data(x=x, again=x[1:], edge_index=edge_index, name="text"),
        "pair": Pair(draw_numbers(seed=2), draw_numbers(seed=3).double()),
        "pairs": (draw_numbers(seed=4), None, draw_numbers(1000)),
    }
    before, given, left = copy.deepcopy(held), held["data"].x, x.numpy()
    shared = share_equal_arrays(held)
    large = [x, edge_index, held["pair"].first, held["pair"].second, held["pairs"][0]]
    for one in large:
        assert count_mapped_bytes(one) == one.nbytes
    assert shared == sum(one.nbytes for one in large)
    # The tensors stay the user's objects; views among them stay views.
    assert held["data"].x is given
    assert held["data"].again.data_ptr() == x[1:].data_ptr()
    assert torch.equal(x, before["data"].x)
    assert torch.equal(held["data"].again, before["data"].again)
    assert np.array_equal(left, before["data"].x.numpy())  # an existing array keeps its memory
    assert torch.equal(edge_index, before["data"].edge_index)
    assert torch.equal(held["pair"].second, before["pair"].second)
    # Writes are not visible to other ranks, and only the written page is copied.
    dist.barrier()
    assert count_own_bytes() == 0
    if rank == num_ranks - 1:
        x[5] = 7
        x.mul_(2)
        held["data"].again[100] = -1
    dist.barrier()
    if rank == num_ranks - 1:
        expected = before["data"].x.clone()
        expected[5] = 7
        expected.mul_(2)[1:][100] = -1
        assert torch.equal(x, expected)
        assert 0 < count_own_bytes() < shared
    else:
        assert torch.equal(x, before["data"].x)
        assert count_own_bytes() == 0
    dist.barrier()
    if rank == 0:
        edge_index[0, 1000] = -5
        assert count_own_bytes() == mmap.PAGESIZE
    dist.barrier()
    assert int(edge_index[0, 1000]) == (-5 if rank == 0 else 1000)
    assert share_equal_arrays(held) == 0  # sharing again does nothing
    return shared


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_equal_arrays_become_one_copy_in_place_and_writes_stay_with_the_writer(num_ranks):
    assert len(set(run(share_arrays, num_ranks, num_ranks))) == 1


def find_among_others(rank, folder):
    save_arrays(folder, {"x": draw_numbers()})
    data = draw_numbers()
    held = {
        "own": data,
        "again": data.view(2, -1),
        "small": draw_numbers(1000),
        "file": load_array(folder / "x.npy"),
        "shared": draw_numbers().share_memory_(),
        "trained": draw_numbers().requires_grad_(),
        "part": torch.from_numpy(draw_numbers().numpy()[5:]),
        "later part": torch.from_numpy(draw_numbers(1 << 20).numpy()[5000:]),
        "words": np.array(["word", None] * (1 << 17), dtype=object),
        "strided": draw_numbers().numpy()[::2],
        "meta": torch.empty(1 << 19, device="meta"),
        "text": "text",
    }
    return sorted(find_tensors(held))


@pytest.mark.medium
def test_what_is_left_alone(tmp_path):
    assert run(find_among_others, 1, tmp_path) == [["later part", "own", "part"]]
    if torch.cuda.is_available():
        assert not find_tensors({"pinned": draw_numbers().pin_memory(), "device": draw_numbers().cuda()})


def share_on_two_machines(rank, machines):
    join(rank, len(machines))
    shared_arrays.which_machine = lambda: machines[rank]
    x = draw_numbers(seed=int(machines[rank] == "other"))  # the content of other machines does not matter
    before = x.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shared = share_equal_arrays({"x": x})
    assert torch.equal(x, before)
    assert count_mapped_bytes(x) == shared
    dist.barrier()
    return shared > 0


@pytest.mark.slow
def test_only_ranks_of_one_machine_share():
    machines = ["one", "other", "one", "other", "third", None]
    assert run(share_on_two_machines, 6, machines) == [True, True, True, True, False, False]


def share_unequal(rank):
    join(rank, 3)
    held = {
        "x": draw_numbers(seed=int(rank == 1)),
        "y": draw_numbers((1 << 19) + int(rank == 2)),
        "z": draw_numbers(),
        **({"more": draw_numbers()} if rank == 1 else {}),
    }
    before = copy.deepcopy(held)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        share_equal_arrays(held)
        for name in held:  # a later setup, of another stage, logs nothing new
            held[name] = held[name].clone()
        share_equal_arrays(held)
    assert all(torch.equal(held[name], before[name]) for name in before)
    dist.barrier()
    return {name: count_mapped_bytes(held[name]) > 0 for name in held}, [str(one.message) for one in caught]


@pytest.mark.slow
def test_a_rank_that_holds_something_else_keeps_it_and_is_named_once():
    (first, said), (second, _), (third, _) = run(share_unequal, 3)
    assert first == {"x": True, "y": True, "z": True}
    assert second == {"x": False, "y": True, "z": True, "more": False}
    assert third == {"x": True, "y": False, "z": True}
    assert len(said) == 2
    assert "x of rank 1 differs from that of rank 0" in said[0]
    assert "y of rank 2 differs from that of rank 0" in said[1]


# -- failures


def make_refusing(error):
    def refuse(*_):
        raise error

    return refuse


WHOLE = (1 << 23) + (1 << 22)
NO_FILE = (os, "memfd_create", PermissionError(errno.EPERM, "memfd_create is not allowed"))
READ_ONLY = (tempfile, "TemporaryFile", OSError(errno.EROFS, "Read-only file system"))
FULL = (shared_arrays, "_bytes", OSError(errno.ENOSPC, "No space left on device"))
NO_MAPPING = (shared_arrays, "_map_file", RuntimeError("unable to mmap 8388608 bytes: Cannot allocate memory"))
NO_LIST = (shared_arrays, "_mapped_regions", PermissionError(errno.EACCES, "/proc/self/maps cannot be read"))
FAULTS = {
    "no file in memory": ([NO_FILE], 0, WHOLE, []),
    "no room": ([FULL], 0, 0, ["x: .*No space", "y: .*No space"]),
    "no file at all": ([NO_FILE, READ_ONLY], 0, 0, ["x: .*Read-only", "y: .*Read-only"]),
    "no mapping": ([NO_MAPPING], 1, 0, ["x: .*Cannot allocate", "y: .*Cannot allocate"]),
    "no list of mappings": ([NO_LIST], 1, 0, ["rank 1 has a copy .*cannot be read"]),
}
"""System calls that fail, the first failing rank, the bytes that are shared nevertheless, and the log."""


def share_with_fault(rank, fault):
    join(rank, 2)
    x, y = draw_numbers(1 << 21), draw_numbers(1 << 20, seed=2)
    before = x.clone(), y.clone()
    refused, first, _, _ = FAULTS[fault]
    for module, name, error in refused if rank >= first else ():
        setattr(module, name, make_refusing(error))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shared = share_equal_arrays({"x": x, "y": y})
    assert torch.equal(x, before[0])
    assert torch.equal(y, before[1])
    dist.barrier()
    if rank:
        x += 1
    dist.barrier()
    assert torch.equal(x, before[0] + rank)
    assert all(name.endswith("(deleted)") for name in read_mappings(x) | read_mappings(y))
    return shared, [str(one.message) for one in caught]


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_what_the_system_refuses_costs_memory_alone(fault):
    outcomes = run(share_with_fault, 2, fault)
    _, _, least, said = FAULTS[fault]
    assert all(shared >= least for shared, _ in outcomes)
    for word, pattern in zip(outcomes[0][1], said, strict=True):
        assert re.search(pattern, word), word


def die_while_sharing(rank, folder):
    join(rank, 3)

    def die(tensors, file):
        (folder / "links").write_text(str(os.fstat(file).st_nlink))
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 1:  # it has opened the file of rank 0 already
        shared_arrays._refer = die
    share_equal_arrays({"x": draw_numbers()})


@pytest.mark.slow
def test_ranks_that_are_killed_leave_nothing_behind_and_nobody_waiting(tmp_path):
    outcome = observe(die_while_sharing, 3, tmp_path)
    assert outcome.exit_codes[1] == -signal.SIGKILL
    assert all("peer" in outcome.errors[rank] for rank in (0, 2))
    assert (tmp_path / "links").read_text() == "0"  # the file never had a name in any folder


# -- the DataModules


def make_large_graph(num_nodes=6000, num_edges=300_000):
    generator = torch.Generator().manual_seed(0)
    data = Data(
        x=torch.randn(num_nodes, 64, generator=generator),
        edge_index=torch.randint(num_nodes, (2, num_edges), generator=generator),
        y=torch.randint(4, (num_nodes,), generator=generator),
        edge_weight=torch.rand(num_edges, generator=generator),
    )
    split = torch.arange(num_nodes) % 10
    data.train_mask, data.val_mask, data.test_mask = split == 0, split == 1, split == 2
    return data


class BatchRecorder(pl.Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.seen.append(checksum(*(value for _, value in sorted(batch.to_dict().items()))))

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        self.on_train_batch_start(trainer, pl_module, batch, batch_idx)


def fit(num_ranks, module, datamodule, strategy, callbacks=(), max_epochs=1):
    listener = BatchRecorder()
    trainer = pl.Trainer(
        accelerator="cpu", devices=num_ranks, strategy=strategy, max_epochs=max_epochs,
        callbacks=[listener, *callbacks], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module, datamodule=datamodule)
    return listener.seen, checksum(*module.state_dict().values())


SAMPLED = {"num_neighbors": [4, 3], "batch_size": 64, "seed": 3}
DATAMODULES = {
    "neighbor": lambda data, **more: NeighborDataModule(data, **SAMPLED, **more),
    "full evaluation": lambda data, **more: NeighborDataModule(data, **SAMPLED, inference="full", **more),
    "link": lambda data, **more: LinkDataModule(
        data, torch.stack([data.edge_index[1], data.edge_index[0]])[:, :2000].contiguous(), neg_sampling_ratio=1.0,
        **SAMPLED, **more,
    ),
    "persistent": lambda data, **more: PersistentSamplerDataModule(data, **SAMPLED, **more),
    "collective": lambda data, **more: CollectiveDataModule(data, **SAMPLED, num_workers=1, **more),
}  # fmt: skip


def train(rank, num_ranks, kinds):
    results = {}
    for kind in kinds:
        outcomes = []
        for share in (False, True):
            data = make_large_graph()
            before, x = copy.deepcopy(data), data.x
            pl.seed_everything(1, verbose=False)
            full = kind == "full graph"
            if full:
                datamodule = FullGraphDataModule(data, share_memory=share)
            else:
                datamodule = DATAMODULES[kind](data, share_memory=share)
            if kind == "link":
                module = LinkPredictor(GraphSAGE(64, 8, 2, 8))
            else:
                module = NodeClassifier((GCN if full else GraphSAGE)(64, 8, 2, 4), num_classes=4)
            outcomes.append(fit(num_ranks, module, datamodule, "ascend_hybrid" if full else "ddp"))
            arrays = [x, data.edge_index]
            if not full:
                graph = datamodule.graph_sampler.graph
                arrays += [graph.indices, graph.edge_ids]
            else:
                arrays += [datamodule.graph.forward.indices, datamodule.graph.edge_ids]
            wanted = [share and num_ranks > 1] * len(arrays)
            assert [count_mapped_bytes(one) >= one.nbytes for one in arrays] == wanted
            assert any(wanted) or not any(map(count_mapped_bytes, arrays))
            # The user's graph is unchanged and writable.
            assert all(torch.equal(data[key], before[key]) for key in before.keys())  # noqa: SIM118  PyG's
            x.mul_(rank + 2)
            dist.barrier()
            assert torch.equal(data.x, before.x * (rank + 2))
        assert outcomes[0] == outcomes[1]
        assert outcomes[0][0]
        results[kind] = outcomes[0]
    return results


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_batches_and_weights_are_those_without_sharing(num_ranks):
    kinds = [*DATAMODULES, "full graph"] if num_ranks == 2 else ["neighbor", "full graph"]
    outcomes = run(train, num_ranks, num_ranks, kinds)
    for kind in kinds:
        assert len({outcome[kind][1] for outcome in outcomes}) == 1, kind  # all ranks train one model
        batches = [set(outcome[kind][0]) for outcome in outcomes]
        assert kind.startswith("full") or not set.intersection(*batches)


def train_hybrid(rank):
    data = make_large_graph()
    datamodule = NeighborDataModule(data, **SAMPLED)
    fit(2, NodeClassifier(GraphSAGE(64, 8, 2, 4), num_classes=4), datamodule, "hyscale")
    assert count_mapped_bytes(data.x) >= data.x.nbytes


@pytest.mark.slow
def test_ranks_of_a_hybrid_run_share_too():
    run(train_hybrid, 2)


class Normalizing(NeighborDataModule):
    """Writes to its graph before and after the ranks share it."""

    def setup(self, stage):
        self.data.x -= self.data.x.mean(dim=0)
        super().setup(stage)
        self.data.x /= self.data.x.std(dim=0)


def write_and_train(rank, writer):
    """Train features, or write to the graph in setup; written arrays are not shared, all others are."""
    data = make_large_graph()
    before = data.x.clone()
    module = NodeClassifier(GraphSAGE(64, 8, 2, 4), num_classes=4)
    if writer == "module":
        module.table = data.x = torch.nn.Parameter(data.x)
    pl.seed_everything(1, verbose=False)
    fit(2, module, (Normalizing if writer == "datamodule" else NeighborDataModule)(data, **SAMPLED), "ddp")
    assert count_mapped_bytes(data.edge_index)
    if writer == "module":
        assert not count_mapped_bytes(data.x.detach())
        assert not torch.equal(data.x, before)
    else:
        expected = before - before.mean(dim=0)
        assert torch.equal(data.x, expected / expected.std(dim=0))


@pytest.mark.slow
@pytest.mark.parametrize("who", ["module", "datamodule"])
def test_what_is_written_while_training_or_in_setup_is_not_shared(who):
    run(write_and_train, 2, who)


def share_during_writes(rank):
    """Share an array while a thread of this rank may write to it; return what was shared and lost."""
    join(rank, 2)
    x = draw_numbers(8 << 20)
    begun, end, written = threading.Event(), threading.Event(), []

    def write():
        draw = np.random.default_rng(rank)
        while not end.is_set():
            at = draw.integers(0, x.numel(), 20_000)
            x.numpy()[at] = 2.0
            written.append(at)
            begun.set()

    writer = threading.Thread(target=write, name="writer")
    if rank == 0:
        writer.start()
        begun.wait()
    shared = share_equal_arrays({"x": x})
    end.set()
    if rank == 0:
        writer.join()
    lost = sum(int((x.numpy()[at] != 2.0).sum()) for at in written)
    dist.barrier()
    return shared, lost, share_equal_arrays({"y": draw_numbers(8 << 20)}) > 0


@pytest.mark.slow
def test_nothing_is_shared_while_another_thread_may_write():
    assert run(share_during_writes, 2) == [(0, 0, True)] * 2


def test_observers_bars_and_loggers_do_not_count_as_writers():
    from lightning_fabric.strategies.launchers.subprocess_script import _ChildProcessObserver

    def list_others():
        # The threads that watch a test may end during the next one.
        return [name for name in shared_arrays.other_threads() if not name.startswith(("silence", "pytest_timeout"))]

    before = list_others()
    running = type("Running", (), {"poll": lambda self: None, "returncode": None})()
    own = _ChildProcessObserver(main_pid=os.getpid(), child_processes=[running], sleep_period=0.01)
    own.start()
    assert list_others() == before
    gate = threading.Event()
    other = threading.Thread(target=gate.wait, name="somebody else's")
    other.start()
    try:
        assert list_others() == [*before, "somebody else's"]
    finally:
        gate.set()
        other.join()
        running.returncode = 0
        own.join()
