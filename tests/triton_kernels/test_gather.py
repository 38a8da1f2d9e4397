import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined

from lightning_gnn.features import FeatureTable
from lightning_gnn.features.hot_cache import RowCache, top_accessed
from lightning_gnn.ops import gather_rows
from lightning_gnn.ops.gather import triton as gather_triton
from lightning_gnn.ops.gather.reference import Gather
from lightning_gnn.ops.gather.triton import gather_cuda
from lightning_gnn.triton_kernels.gather import gather
from tests.triton_kernels.sampling_cases import shard_table
from tests.triton_kernels.test_sample import AccessWatch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = {  # table, out
    "float32": (torch.float32, torch.float32),
    "float16": (torch.float16, torch.float16),
    "float16 to float32": (torch.float16, torch.float32),
    "float32 to float16": (torch.float32, torch.float16),
    "int8 to float32": (torch.int8, torch.float32),
    "int8 to float16": (torch.int8, torch.float16),
}
CACHES = ("none", "empty", "some", "all")


def on_cuda(test):
    reason = "needs a CUDA device; the interpreter stands in for it"
    return pytest.mark.cuda(pytest.mark.skipif(not torch.cuda.is_available(), reason=reason)(test))


def make_table(rows, columns, dtype, seed=0):
    """Make (table, scales or None)."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.int8:
        values = torch.randint(-127, 128, (rows, columns), dtype=dtype, generator=generator)
        return values, torch.rand(rows, generator=generator)
    return torch.randn(rows, columns, generator=generator).to(dtype), None


def make_cache(table, kind):
    """Make (slot, cache) with rows that differ from the table's, to show where a row came from."""
    rows = table.size(0)
    if kind == "none":
        return None, None
    count = {"empty": 0, "some": rows // 2, "all": rows}[kind]
    chosen = torch.randperm(rows, generator=torch.Generator().manual_seed(1))[:count]
    slot = torch.full((rows,), -1, dtype=torch.int32)
    slot[chosen] = torch.arange(count, dtype=torch.int32)
    return slot, (table[chosen] // 2 if table.dtype == torch.int8 else table[chosen] + 1).contiguous()


def expect(table, index, out_dtype, scales, slot, cache):
    index = index.long()
    values = table[index]
    if slot is not None:
        place = slot[index].long()
        values[place >= 0] = cache[place[place >= 0]]
    if scales is not None:
        values = values.float() * scales[index][:, None]
    return values.to(out_dtype)


def move_to_device(*tensors):
    return [None if tensor is None else tensor.to(DEVICE) for tensor in tensors]


def run_kernel(table, index, out_dtype, scales=None, slot=None, cache=None):
    # Rows that are not written remain visible.
    out = torch.full((index.numel(), table.size(1)), 99, dtype=out_dtype)
    table, index, out, scales, slot, cache = move_to_device(table, index, out, scales, slot, cache)
    return gather(table, index, out, scales, slot, cache).cpu()


@pytest.mark.campaign
@pytest.mark.parametrize("columns", [1, 7, 100, 129, 602])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cached", CACHES)
def test_kernel_equals_torch(kind, columns, cached):
    dtype, out_dtype = KINDS[kind]
    table, scales = make_table(37, columns, dtype)
    slot, cache = make_cache(table, cached)
    index = torch.randint(37, (45,), dtype=torch.int64)  # more than there are rows: duplicates
    out = run_kernel(table, index, out_dtype, scales, slot, cache)
    assert torch.equal(out, expect(table, index, out_dtype, scales, slot, cache))


@pytest.mark.parametrize("bus_bytes", [1, 1 << 15, 1 << 30])
@pytest.mark.parametrize("columns", [1, 100, 602])
def test_few_programs_gather_all_rows(columns, bus_bytes):
    """Fewer programs than tiles, as many as tiles, and more bytes than there are."""
    table, _ = make_table(37, columns, torch.float32)
    index = torch.randint(37, (300,))
    out = torch.full((300, columns), 99.0)
    table, index, out = move_to_device(table, index, out)
    assert torch.equal(gather(table, index, out, bus_bytes=bus_bytes), table[index])


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16, torch.float64, torch.uint8])
def test_copies_of_any_dtype_keep_every_bit(dtype):
    table = torch.randint(0, 2, (20, 5)).to(dtype)
    if dtype.is_floating_point:
        table[3] = float("nan")
    index = torch.tensor([3, 3, 0, 19])
    out = run_kernel(table, index, dtype)
    assert torch.equal(out.view(torch.uint8), table[index].view(torch.uint8))


@pytest.mark.skipif(torch.cuda.is_available(), reason="watches Triton's interpreter")
@pytest.mark.parametrize("kind", ["float32", "int8 to float16"])
@pytest.mark.parametrize(("num_rows", "num_shards", "shift"), [(37, 3, 0), (37, 4, 2), (2, 3, 1)])
def test_rows_dealt_out_to_gpus_are_read_in_bounds(kind, num_rows, num_shards, shift, monkeypatch):
    """Each part has room for its own rows only; the index exceeds all of them."""
    watch, (dtype, out_dtype) = AccessWatch(monkeypatch), KINDS[kind]
    table, scales = make_table(num_rows, 5, dtype)
    index = torch.tensor([*range(num_rows), 0, num_rows, -1, 2**40, -(2**40)])
    dealt = shard_table(table, num_shards, shift, own=1, place=watch.allow)
    out = torch.full((index.numel(), 5), 99, dtype=out_dtype)
    for tensor in (dealt.addresses, index, out, *([] if scales is None else [scales])):
        watch.allow(tensor)
    dealt.take(index, out, scales)
    assert torch.equal(out[: num_rows + 1], expect(table, index[: num_rows + 1], out_dtype, scales, None, None))
    assert bool(out[num_rows + 1 :].isnan().all())
    assert watch.accesses > 0


@pytest.mark.parametrize("cached", CACHES)
@pytest.mark.parametrize("bad", [-1, 10, 2**40, -(2**40)])
def test_an_index_out_of_range_reads_nothing(bad, cached):
    index = torch.tensor([0, bad, 9])
    for kind in ("float32", "float16 to float32", "int8 to float16"):
        dtype, out_dtype = KINDS[kind]
        table, scales = make_table(10, 6, dtype)
        slot, cache = make_cache(table, cached)
        out = run_kernel(table, index, out_dtype, scales, slot, cache)
        good = torch.tensor([0, 9])
        assert bool(out[1].isnan().all())
        assert torch.equal(out[[0, 2]], expect(table, good, out_dtype, scales, slot, cache))
    assert run_kernel(torch.arange(10)[:, None], index, torch.int64)[1].item() == -1
    assert run_kernel(torch.ones(10, 3, dtype=torch.bool), index, torch.bool)[1].tolist() == [False] * 3


@pytest.mark.parametrize("with_kernel", [True, False])
@pytest.mark.parametrize("shape", [(30,), (30, 5), (30, 2, 3), (30, 0)])
def test_the_operator_on_cuda_equals_the_one_on_the_cpu(shape, with_kernel, monkeypatch):
    if not with_kernel:
        monkeypatch.setattr(gather_triton, "runs_triton", lambda device: False)
    table = torch.randn(shape)
    index = torch.randint(30, (17,), dtype=torch.int32)
    out = torch.empty(17, *shape[1:])
    gather_cuda(Gather(*(tensors := move_to_device(table, index, out))))
    assert torch.equal(tensors[2].cpu(), gather_rows(table, index))


@pytest.mark.parametrize("with_kernel", [True, False])
@pytest.mark.parametrize("cache_rows", [0, 9, 30])
@pytest.mark.parametrize("kind", ["float32", "float16", "int8"])
def test_a_cached_table_gathers_the_same(kind, cache_rows, with_kernel, monkeypatch):
    if not with_kernel:
        monkeypatch.setattr(gather_triton, "runs_triton", lambda device: False)
    table = FeatureTable(torch.randn(30, 12).to(torch.float16 if kind == "float16" else torch.float32))
    table = table.quantized() if kind == "int8" else table
    cached = table.cached(top_accessed(torch.rand(30), cache_rows), "cpu")
    index = torch.randint(30, (50,))
    assert torch.equal(cached.gather(index), table.gather(index))
    out = torch.empty(50, 12, dtype=table.dtype)
    if DEVICE == "cpu":  # run the CUDA operator on tensors that the interpreter can read
        gather_cuda(Gather(cached.values, index, out, cached.scales, cached.cache.slot, cached.cache.rows))
        assert torch.equal(out, table.gather(index))


def test_cuda_arguments_are_checked():
    table, index, out = torch.randn(5, 2), torch.tensor([0, 5]), torch.empty(2, 2)
    with pytest.raises(IndexError, match="index holds row 5, but the table has 5 rows"):
        gather_cuda(Gather(table, index, out), check=True)
    with pytest.raises(TypeError, match="out must be"):
        gather_cuda(Gather(table, index, out.half()))
    with pytest.raises(ValueError, match="index is on meta, but out is on cpu"):
        gather_cuda(Gather(table, index.to("meta"), out))
    with pytest.raises(ValueError, match="cannot read the table: it is on meta; move index and out"):
        gather_cuda(Gather(table.to("meta"), index, out))
    with pytest.raises(ValueError, match="must be contiguous"):
        gather_cuda(Gather(torch.randn(2, 5).t(), index, out))


@pytest.mark.slow
def test_without_triton_torch_gathers():
    code = (
        "import sys; sys.modules['triton'] = None; import torch; from lightning_gnn.ops import gather_triton as g;"
        "out = torch.empty(2, 3); g.gather_cuda(g.Gather(torch.arange(12.0).view(4, 3), torch.tensor([3, 0]), out));"
        "print(out.int().tolist())"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[[9, 10, 11], [0, 1, 2]]"


@pytest.mark.slow
def test_compiles_for_a100_and_h100_without_spills(compiled):
    rows = compiled("compile_gather")
    assert {row["sm"] for row in rows} == {80, 90}
    for row in rows:
        assert row.get("STACK", 0) == row.get("LOCAL", 0) == 0
        assert row.get("REG", 0) <= 128
        if (row["table"], row["columns"]) == ("i32", 100):
            assert any("v4" in load for load in row["loads"])  # 16 bytes at a time


@on_cuda
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("place", ["device", "pinned"])
@pytest.mark.parametrize("kind", ["float32", "float16", "int8"])
@pytest.mark.parametrize("columns", [1, 100, 602])
def test_on_a_device(kind, place, cached, columns):
    host = FeatureTable(torch.randn(5000, columns).to(torch.float16 if kind == "float16" else torch.float32))
    host = host.quantized() if kind == "int8" else host
    n_id = torch.randint(5000, (20_000,))
    if place == "pinned":
        table = host.pin_memory()
    else:
        table = FeatureTable(host.values.cuda(), scales=None if host.scales is None else host.scales.cuda())
    if cached:
        table = table.cached(top_accessed(torch.rand(5000), 1000), "cuda")
    out = table.gather(n_id.cuda())
    assert out.is_cuda
    assert torch.equal(out.cpu(), host.gather(n_id))


@on_cuda
def test_pageable_memory_is_refused():
    with pytest.raises(ValueError, match="pin it with pin_memory"):
        gather_rows(torch.randn(5, 2), torch.tensor([0]).cuda())
    with pytest.raises(ValueError, match="move index and out"):
        gather_rows(torch.randn(5, 2).cuda(), torch.tensor([0]))


@on_cuda
def test_offsets_beyond_32_bits():
    rows = 2**31 // 512 + 1000
    table = torch.zeros(rows, 512, dtype=torch.int8, device="cuda")
    table[-1] = 7
    cache = RowCache.build(table, torch.tensor([0]), "cuda")
    scales = torch.ones(rows, device="cuda")
    index = torch.tensor([rows - 1, 0], device="cuda")
    assert gather_rows(table, index, scales=scales, cache=cache)[:, 0].tolist() == [7, 0]
