from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lightning_gnn.ops  # noqa: F401  registers the operators
from lightning_gnn.features import FeatureTable
from lightning_gnn.features.memory_pool import BufferPool
from tests.patience import PATIENCE
from tests.refusals import refuses


@given(
    st.integers(1, 40),
    st.integers(0, 9),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    st.lists(st.integers(0, 10**6), max_size=60),
)
def test_gather_equals_indexing(rows, columns, dtype, index):
    table = FeatureTable(torch.randn(rows, columns).to(dtype))
    n_id = torch.tensor(index, dtype=torch.int64) % rows
    out = torch.empty(n_id.numel(), columns, dtype=dtype)
    assert table.gather(n_id, out=out) is out
    assert torch.equal(out, table.values[n_id])
    assert torch.equal(table.gather(n_id), out)


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("rows", [100, 70_000, 0])
def test_bfloat16_is_kept_in_half_of_the_memory(tmp_path, mmap, rows):
    values = torch.randn(rows, 7)
    table = FeatureTable(values, dtype=torch.bfloat16)
    assert torch.equal(table.values, values.bfloat16())
    assert FeatureTable(table.values, dtype=torch.bfloat16).values is table.values
    loaded = FeatureTable.load(table.save(tmp_path / "x.npy"), mmap)
    assert (tmp_path / "x.npy").stat().st_size == rows * 7 * 2 + 128
    assert np.load(tmp_path / "x.npy").dtype == np.dtype("V2")
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(loaded.values, table.values)
    n_id = torch.tensor([99, 0, 0, 42])[:rows]
    assert torch.equal(loaded.gather(n_id), table.values[n_id])
    wide = loaded.gather(n_id, out=torch.empty(n_id.numel(), 7))
    assert torch.equal(wide, table.values[n_id].float())


def nan_at(at, size=200_000):
    values = torch.ones(size, 2)
    values[at, 1] = float("nan")
    return values


ONES, INTS = torch.ones(3, 2), torch.ones(3, 2, dtype=torch.int8)
QUANTISED = {"values": INTS, "scales": torch.ones(3)}
SCALES = "scales must be float32, for int8 features"


@pytest.mark.parametrize(
    ("table", "error", "said"),
    [
        ({"values": ONES, "dtype": torch.int32}, TypeError, "cannot be stored as"),
        ({"values": ONES, "dtype": "bfloat16"}, TypeError, "cannot be stored as"),
        ({**QUANTISED, "dtype": torch.bfloat16}, TypeError, "cannot be stored as"),
        ({"values": ONES.double()}, TypeError, r"float32, float16 or bfloat16, but are torch\.float64"),
        ({"values": torch.ones(3)}, ValueError, "shape"),
        ({"values": nan_at(150_000), "check_finite": True}, ValueError, r"x holds .* 1 of 200000 rows \(node 150000\)"),
        ({"values": INTS}, TypeError, "int8 without scales"),
        ({"values": ONES, "scales": torch.ones(3)}, TypeError, SCALES),
        ({"values": ONES, "scales": torch.ones(3).double()}, TypeError, SCALES),
        ({"values": INTS, "scales": torch.ones(2)}, ValueError, r"scales must have the shape \[3\]"),
    ],
)
def test_bad_tables(table, error, said):
    refuses(error, said, FeatureTable, **table)
    refuses(ValueError, r"x holds NaN or infinity in 1 of 2 rows \(node 1\)", FeatureTable(nan_at(1, 2)).quantized)


@pytest.mark.parametrize(
    ("table", "index", "out", "error", "said"),
    [
        ({"values": ONES}, [0, 3], None, IndexError, "holds row 3, but the table has 3 rows"),
        ({"values": ONES}, [-1], None, IndexError, "holds row -1"),
        (QUANTISED, [3], None, IndexError, "holds row 3"),
        ({"values": ONES}, [0.0], None, TypeError, "index must be int64"),
        ({"values": ONES}, [0], torch.empty(2, 2), ValueError, "out must be contiguous"),
        ({"values": ONES}, [0], torch.empty(1, 2).half(), TypeError, "out must be"),
        (QUANTISED, [0], torch.empty(1, 2).to(torch.int8), TypeError, "out must be float32 or float16"),
    ],
)
def test_bad_rows(table, index, out, error, said):
    refuses(error, said, FeatureTable(**table).gather, torch.tensor(index), out)


def test_autograd_keeps_a_buffer_alive():
    pool = BufferPool()
    x = pool.empty((512, 64), torch.float32)
    x.fill_(2)
    weight = torch.ones(64, 1, requires_grad=True)
    loss = (x @ weight).sum()
    del x
    pool.empty((512, 64), torch.float32).fill_(-1)
    loss.backward()
    assert bool((weight.grad == 2 * 512).all())


@given(
    st.integers(0, 12), st.integers(0, 9), st.sampled_from([1e-44, 1e-38, 1e-20, 1.0, 3e4, 3e38]), st.integers(0, 2**32)
)
def test_quantised_features_are_within_half_a_scale(rows, columns, size, seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(rows, columns, generator=generator).mul_(2).sub_(1).mul_(size)
    values[::3] = 0
    table = FeatureTable(values).quantized()
    n_id = torch.arange(rows)
    assert table.values.dtype == torch.int8
    error = (table.gather(n_id).double() - values.double()).abs()
    scales = table.scales.double()[:, None]
    assert bool((error <= scales * (0.5 + 3e-5)).all())
    assert bool((table.gather(n_id)[::3] == 0).all())
    if rows and columns and size >= 1e-30:
        assert torch.allclose(scales[:, 0], values.abs().amax(dim=1).double() / 127, rtol=1e-5, atol=1e-37)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tables_gather_into_other_dtypes_and_from_worker_threads(dtype):
    table = FeatureTable(torch.randn(60, 11).to(dtype))
    n_id = torch.randint(60, (100,), dtype=torch.int32)
    small = table.quantized()
    expected = small.values[n_id.long()] * small.scales[n_id.long()][:, None]
    assert small.dtype == torch.float32
    assert torch.equal(small.gather(n_id), expected)
    assert torch.equal(small.gather(n_id, torch.empty(100, 11, dtype=torch.float16)), expected.half())
    wide = table.gather(n_id, torch.empty(100, 11))
    assert torch.equal(wide, table.values[n_id.long()].float())
    with ThreadPoolExecutor(1) as thread:
        assert torch.equal(thread.submit(small.gather, n_id).result(timeout=PATIENCE), expected)
        out = torch.empty(100, 11)
        assert torch.equal(thread.submit(table.gather, n_id, out).result(timeout=PATIENCE), wide)


def test_cached_rows_come_from_the_cache():
    for table in (FeatureTable(torch.randn(20, 3)), FeatureTable(torch.randn(20, 3)).quantized()):
        nodes = torch.tensor([19, 4, 7])
        cached = table.cached(nodes, "cpu")
        n_id = torch.tensor([4, 0, 19, 4, 7, 1])
        assert cached.cache_rows == 3
        assert torch.equal(cached.gather(n_id), table.gather(n_id))
        cached.cache.rows.zero_()
        assert cached.gather(n_id).any(dim=1).tolist() == [False, True, False, False, False, True]
        assert "cache_rows=3" in repr(cached)
        assert table.cache_rows == 0
