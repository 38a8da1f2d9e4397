from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lightning_gnn.ops import gather_rows
from tests.patience import PATIENCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.bool, torch.bfloat16])
@pytest.mark.parametrize("shape", [(50,), (50, 3), (50, 129), (50, 2, 5), (50, 0)])
def test_worker_threads_and_the_main_thread_copy_the_same(dtype, shape):
    table = (torch.randn(shape) * 100).to(dtype)
    index = torch.randint(50, (1000,))
    with ThreadPoolExecutor(1) as thread:
        in_worker = thread.submit(gather_rows, table, index).result(timeout=PATIENCE)
    assert torch.equal(gather_rows(table, index), table[index])
    assert torch.equal(in_worker, table[index])


def test_strided_tables_and_int32_indices():
    table = torch.randn(40, 16)[:, ::2]
    index = torch.randint(40, (100,), dtype=torch.int32)
    with ThreadPoolExecutor(1) as thread:
        in_worker = thread.submit(gather_rows, table, index).result(timeout=PATIENCE)
    assert torch.equal(in_worker, table[index])


def test_an_error_in_a_worker_is_an_error():
    with ThreadPoolExecutor(1) as thread, pytest.raises(IndexError, match="holds row 50"):
        thread.submit(gather_rows, torch.randn(50, 4), torch.tensor([50])).result(timeout=PATIENCE)
