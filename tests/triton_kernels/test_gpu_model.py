"""``benchmarks.gpu.model`` predicts exactly the accesses that Triton's interpreter counts."""

import importlib
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")
import triton.runtime.interpreter as interpreter

from lightning_gnn.triton_kernels import sample as module
from lightning_gnn.triton_kernels import sample_bulk as bulk_module
from lightning_gnn.triton_kernels.sample import TritonNeighborSampler
from lightning_gnn.triton_kernels.sample_bulk import sample_bulk
from tests.triton_kernels.sampling_cases import GRAPHS


@pytest.fixture
def model(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    return importlib.import_module("benchmarks.gpu.model")


class AccessCounter:
    """Counts the accesses of kernels to registered arrays by name."""

    KINDS = {  # noqa: RUF012
        "create_masked_load": ("load", 0, 1),
        "create_masked_store": ("store", 0, 2),
        "create_atomic_rmw": ("atomic", 1, 3),
    }

    def __init__(self, monkeypatch):
        self.ranges, self.counts = [], Counter()
        for name, (kind, pointer_at, mask_at) in self.KINDS.items():
            original = getattr(interpreter.InterpreterBuilder, name)
            monkeypatch.setattr(interpreter.InterpreterBuilder, name, self.counted(original, kind, pointer_at, mask_at))

    def counted(self, original, kind, pointer_at, mask_at):
        def call(builder, *args):
            addresses = np.atleast_1d(args[pointer_at].data).astype(np.uint64)
            mask = np.broadcast_to(np.atleast_1d(args[mask_at].data), addresses.shape).astype(bool)
            for name, low, high in self.ranges:
                seen = int(((addresses >= low) & (addresses < high) & mask).sum())
                if seen:
                    self.counts[kind, name] += seen
            return original(builder, *args)

        return call

    def name(self, name, tensor):
        if tensor.numel():
            low = tensor.data_ptr()
            self.ranges.append((name, low, low + tensor.numel() * tensor.element_size()))
        return tensor


class CountedSampler(TritonNeighborSampler):
    def _allocate(self, size, dtype):
        return torch.empty(size, dtype=dtype)

    def outputs(self, *sizes):
        made = super().outputs(*sizes)
        for name, tensor in zip(("node_out", "edge_index_out", "edge_out"), made, strict=False):
            self.counting.name(name, tensor)
        return made

    def scratch(self, name, size, dtype, fill=None):
        known = name in self._buffers
        made = super().scratch(name, size, dtype, fill)
        if not known and name in self.counting.names:
            self.counting.name(name, made)
        return made


@pytest.mark.skipif(not module.INTERPRETED, reason="kernels are compiled here")
@pytest.mark.slow
@pytest.mark.parametrize(("parts", "mode"), [(1, "fused"), (2, "fused"), (1, "persistent")])
def test_counts_are_those_of_the_interpreter(parts, mode, model, monkeypatch):
    counting = AccessCounter(monkeypatch)
    counting.names = set(model.BYTES) - {"table"}
    indptr, indices = GRAPHS["random"]
    indptr = counting.name("indptr", torch.tensor(indptr))
    indices = counting.name("indices", torch.tensor(indices, dtype=torch.int32))
    CountedSampler.counting = counting
    sampler = CountedSampler(indptr, indices, num_programs=2, num_warps=1, mode=mode)
    if parts == 1:
        seeds = counting.name("seeds", torch.tensor([3, 0, 40, 3]))
        made = [sampler.sample(seeds, [4, 3], 1)]
    else:
        joined = bulk_module.joined
        monkeypatch.setattr(
            bulk_module, "joined", lambda s, seeds, *rest: joined(s, counting.name("seeds", seeds), *rest)
        )
        made = sample_bulk(sampler, [torch.tensor([3, 0]), torch.tensor([7, 40, 5])], [4, 3], [1, 2])
    nodes = tuple(map(sum, zip(*(sample[4] for sample in made), strict=True)))
    edges = tuple(map(sum, zip(*(sample[5] for sample in made), strict=True)))
    batch = model.Batch(nodes, edges, parts)
    queued = mode == "persistent"
    wanted = (model.queue_counts if queued else model.hop_counts)(batch, programs=2, tile=64) + model.emit_counts(batch)
    polls = counting.counts["load", "queue"] - wanted["load", "queue"]  # of slots that are still empty
    assert polls >= 0
    counting.counts["load", "queue"] -= polls
    if parts > 1:  # the search for its parts
        searched = counting.counts["load", "nodes"] - wanted["load", "nodes"]
        assert 0 < searched < 100
        counting.counts["load", "nodes"] -= searched
        counting.counts["load", "rowptr"] -= len(edges) * parts
        counting.counts = +counting.counts
    assert counting.counts == wanted
    assert model.barriers(batch, queued) == (7 if queued else 5 if parts == 1 else 6)


@pytest.mark.parametrize("mode", ["fused", "bulk", "queue"])
def test_counts_are_those_of_the_compiled_kernels(mode, model):
    """Per array that has one name in the kernels; a bulk also searches for its parts."""
    row = model.COUNTED[mode]
    batch = model.Batch(tuple(row["nodes"]), tuple(row["edges"]), row["parts"])
    kernel = row["kernels"]["queue_kernel" if mode == "queue" else "hop_kernel"]
    assert kernel["releases"] == row["programs"] * model.barriers(batch, mode == "queue")
    seen = model.counted(mode)
    wanted = model.queue_counts(batch, 8) if mode == "queue" else model.hop_counts(batch, 8)
    for key in (("atomic", "state"), ("load", "indptr"), ("load", "indices"), ("store", "src"), ("store", "eid")):
        assert seen[key][0] == wanted[key]
        assert 0 < seen[key][1] <= seen[key][0]


def test_the_roofline_says_what_a_bulk_saves(model):
    batch = model.Batch((1024, 15_000, 140_000, 450_000), (15_360, 150_000, 700_000))
    alone, shared = (model.expected(batch.times(bulk), 2039, 432) for bulk in (1, 8))
    assert alone["barriers"] == 7
    assert shared["barriers"] == 8 / 8
    assert shared["us"] < alone["us"] < model.hop_by_hop(batch, 2039, 432)
    assert shared["fixed_us"] == pytest.approx((8 * model.BARRIER_US + 2 * model.LAUNCH_US + model.SYNC_US) / 8)
    rows = model.roofline({"x": batch})
    assert [row["bulk"] for row in rows] == [1, 8] * 3
    for row in rows:  # built variants pay off, omitted ones do not
        saved = {way: us / row["us"] for way, us in row["saves_us"].items()}
        assert saved["one pass"] > 0.03
        assert all(share < 0.03 for way, share in saved.items() if way != "one pass" and row["bulk"] == 8)


def test_the_guide_shows_the_table_of_the_file(model):
    result = json.loads(model.FILE.read_text())
    assert {row["sm"] for row in result["kernels"]} == {80, 90}
    assert all(row["spilled"] <= 64 for row in result["kernels"])
    text = model.PAGE.read_text(encoding="utf-8")
    assert model.replaced(text, model.page(result)) == text, "run python -m benchmarks.gpu.model --write"


def test_occupancy(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    resident = importlib.import_module("benchmarks.gpu.kernel_usage").resident
    assert resident(128, 2048, 80) == 2
    assert resident(96, 2048, 90) == 2
    assert resident(16, 0, 80) == 8
    assert resident(32, 40_000, 80) == 4
