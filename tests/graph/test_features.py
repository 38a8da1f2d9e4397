import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lightning_gnn.ops  # noqa: F401  registers the operators
from lightning_gnn.graph import FeatureTable
from lightning_gnn.graph.buffers import BufferPool


@given(
    st.integers(1, 40),
    st.integers(0, 9),
    st.sampled_from([torch.float32, torch.float16]),
    st.lists(st.integers(0, 10**6), max_size=60),
)
def test_gather_equals_indexing(rows, columns, dtype, index):
    table = FeatureTable(torch.randn(rows, columns).to(dtype))
    n_id = torch.tensor(index, dtype=torch.int64) % rows
    out = torch.empty(n_id.numel(), columns, dtype=dtype)
    assert table.gather(n_id, out=out) is out
    assert torch.equal(out, table.values[n_id])
    assert torch.equal(table.gather(n_id), out)


def test_memory_mapped_table(tmp_path):
    table = FeatureTable(torch.randn(100, 7))
    mapped = FeatureTable.load(table.save(tmp_path / "x.npy"))
    n_id = torch.tensor([99, 0, 0, 42])
    assert torch.equal(mapped.gather(n_id), table.values[n_id])
    (tmp_path / "x.npy").write_bytes((tmp_path / "x.npy").read_bytes()[:500])
    with pytest.raises(ValueError, match=r"x\.npy is not a complete"):
        FeatureTable.load(tmp_path / "x.npy")


def test_bad_tables_and_rows():
    with pytest.raises(TypeError, match=r"float32 or float16, but are torch\.float64"):
        FeatureTable(torch.ones(3, 2, dtype=torch.float64))
    with pytest.raises(ValueError, match="shape"):
        FeatureTable(torch.ones(3))
    bad = torch.ones(200_000, 2)
    bad[150_000, 1] = float("nan")
    with pytest.raises(ValueError, match="x of node 150000 holds NaN"):
        FeatureTable(bad, check_finite=True)
    table = FeatureTable(torch.ones(3, 2))
    with pytest.raises(IndexError, match="holds row 3, but the table has 3 rows"):
        table.gather(torch.tensor([0, 3]))
    with pytest.raises(IndexError, match="holds row -1"):
        table.gather(torch.tensor([-1]))
    with pytest.raises(TypeError, match="index must be int64"):
        table.gather(torch.tensor([0.0]))
    with pytest.raises(ValueError, match="out must be contiguous"):
        table.gather(torch.tensor([0]), out=torch.empty(2, 2))
    with pytest.raises(TypeError, match="out must be"):
        table.gather(torch.tensor([0]), out=torch.empty(1, 2, dtype=torch.float16))


def test_buffers_return_only_when_nothing_looks_at_them():
    pool = BufferPool()
    first = pool.empty((1000, 100), torch.float32)
    first.fill_(7)
    view = first[10:20]
    address = first.data_ptr()
    del first
    gc.collect()
    assert pool.idle_bytes() == 0
    other = pool.empty((1000, 100), torch.float32)
    other.fill_(1)
    assert bool((view == 7).all())
    del view
    gc.collect()
    assert pool.idle_bytes() >= 400_000
    assert pool.empty((1000, 99), torch.float32).data_ptr() == address


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
