"""A tensor that shows a file is mapped from it again, and only as long as it shows what the file holds."""

import numpy as np
import pytest
import torch

from lightning_gnn.distributed.notebook_launcher import _pack
from lightning_gnn.features.arrays import expect_scattered_reads, load_array
from lightning_gnn.runtime.mapped_files import LEAST
from lightning_gnn.runtime.shared_arrays import file_in_memory


@pytest.fixture
def path(tmp_path):
    found = tmp_path / "a file.npy"
    np.save(found, np.arange(LEAST, dtype=np.float32).reshape(-1, 8))
    return found


def send(content):
    """Return an object as a rank gets it, and the size of the file in memory."""
    with file_in_memory() as file:
        path = f"/proc/self/fd/{file.fileno()}"
        _pack(content, path)
        there = torch.load(path, mmap=True, weights_only=False)
        return there, file.seek(0, 2)


def arrives(tensor):
    """Say whether a tensor arrives as it is, from its file."""
    (there,), size = send([tensor])
    assert torch.equal(there, tensor)
    assert there.dtype == tensor.dtype
    return size < LEAST


@pytest.mark.parametrize("load", [load_array, lambda path: torch.from_numpy(np.load(path, mmap_mode="c"))])
def test_what_shows_a_file_is_not_copied(path, load):
    tensor = load(path)
    assert arrives(tensor)
    assert arrives(tensor[100:200, ::2])
    assert arrives(tensor.t())
    assert arrives(expect_scattered_reads(tensor))  # which the system manages as regions of their own
    assert arrives(torch.from_numpy(tensor.numpy()))
    assert not arrives(tensor.clone())
    assert not arrives(tensor * 2)


def test_writes_stay_where_they_are_made(path):
    tensor = load_array(path)
    there, _ = send(tensor)
    there[0] = -1
    assert torch.equal(load_array(path), tensor)
    tensor[5] = 7
    assert not arrives(tensor)
    assert not torch.equal(load_array(path), tensor)


def test_a_file_that_is_another_or_gone_is_not_taken_for_it(path):
    tensor = load_array(path)
    path.rename(path.with_suffix(".old"))
    assert arrives(tensor)  # by its new name
    np.save(path, np.zeros(2 * LEAST, np.float32))
    path.with_suffix(".old").unlink()
    assert not arrives(tensor)


def test_ranks_map_one_file_and_what_one_writes_is_its_own():
    whole = torch.arange(1000.0)
    with file_in_memory() as file:
        path = f"/proc/self/fd/{file.fileno()}"
        _pack({"whole": whole, "part": whole[10:20]}, path)
        one, other = (torch.load(path, mmap=True, weights_only=False) for _ in range(2))
    one["part"].fill_(-1)
    assert (one["whole"][10:20] == -1).all()
    assert torch.equal(other["whole"], whole)
    assert torch.equal(whole, torch.arange(1000.0))
