"""A tensor that maps a file is sent to another process as a mapping, as long as it equals the file's content."""

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
    """Return an object as a rank receives it, and the size of the file in memory."""
    with file_in_memory() as file:
        path = f"/proc/self/fd/{file.fileno()}"
        _pack(content, path)
        received = torch.load(path, mmap=True, weights_only=False)
        return received, file.seek(0, 2)


def is_mapped_after_sending(tensor):
    """Return whether a tensor is unchanged after sending, and mapped from its file."""
    (received,), size = send([tensor])
    assert torch.equal(received, tensor)
    assert received.dtype == tensor.dtype
    return size < LEAST


@pytest.mark.medium
@pytest.mark.parametrize("load", [load_array, lambda path: torch.from_numpy(np.load(path, mmap_mode="c"))])
def test_what_shows_a_file_is_not_copied(path, load):
    tensor = load(path)
    assert is_mapped_after_sending(tensor)
    assert is_mapped_after_sending(tensor[100:200, ::2])
    assert is_mapped_after_sending(tensor.t())
    assert is_mapped_after_sending(expect_scattered_reads(tensor))  # the kernel splits this mapping into regions
    assert is_mapped_after_sending(torch.from_numpy(tensor.numpy()))
    assert not is_mapped_after_sending(tensor.clone())
    assert not is_mapped_after_sending(tensor * 2)


def test_writes_stay_where_they_are_made(path):
    tensor = load_array(path)
    received, _ = send(tensor)
    received[0] = -1
    assert torch.equal(load_array(path), tensor)
    tensor[5] = 7
    assert not is_mapped_after_sending(tensor)
    assert not torch.equal(load_array(path), tensor)


def test_a_file_that_is_another_or_gone_is_not_taken_for_it(path):
    tensor = load_array(path)
    path.rename(path.with_suffix(".old"))
    assert is_mapped_after_sending(tensor)  # under its new name
    np.save(path, np.zeros(2 * LEAST, np.float32))
    path.with_suffix(".old").unlink()
    assert not is_mapped_after_sending(tensor)


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
