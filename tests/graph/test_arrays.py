"""Array files: larger than memory, address space limits, scattered reads, in-place writes, links, saving again."""

import errno
import gc
import io
import mmap
import os
import re
import warnings
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from lightning_gnn import NeighborDataModule
from lightning_gnn.datasets.folder import load_folder
from lightning_gnn.features import FeatureTable
from lightning_gnn.features.arrays import create_array, load_array, save_arrays
from lightning_gnn.graph import CSCGraph
from tests.refusals import refuses

WIDTH = 1 << 18
on_linux = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="reads the system's account of mappings")


def write_sparse_table(path, num_bytes):
    """Write a sparse file of zeros, which takes no disk space; return its number of rows."""
    rows = num_bytes // (4 * WIDTH)
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (rows, WIDTH)})
        file.truncate(file.tell() + 4 * rows * WIDTH)
    return rows


@pytest.fixture
def huge(tmp_path):
    """A table of twice the memory size."""
    overcommit = Path("/proc/sys/vm/overcommit_memory")
    if overcommit.exists() and overcommit.read_text().strip() == "2":
        pytest.skip("this system counts every mapping as memory")
    path = tmp_path / "x.npy"
    return path, write_sparse_table(path, 2 * psutil.virtual_memory().total)


def test_features_larger_than_memory_load_and_take_writes_in_place(huge):
    path, rows = huge
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table = FeatureTable.load(path)
    table.values[rows - 1, :3] = 7
    assert table.gather(torch.tensor([0, rows - 1]))[:, :4].tolist() == [[0, 0, 0, 0], [7, 7, 7, 0]]
    assert FeatureTable.load(path).values[rows - 1, 0] == 0  # the file is unchanged


def test_a_folder_with_features_larger_than_memory(huge):
    path, rows = huge
    np.save(path.parent / "edge_index.npy", np.array([[0, 1], [rows - 1, 0]]))
    data = load_folder(path.parent)
    assert data.num_nodes == rows
    assert data.x[data.graph.indices.long()].abs().sum() == 0
    batches = NeighborDataModule(data, torch.tensor([0]), num_neighbors=[1], check_features=True).train_dataloader()
    assert next(iter(batches)).x.shape == (2, WIDTH)


@contextmanager
def limit_resource(kind, more):
    """Limit a resource of this process to its current use plus ``more`` bytes."""
    import resource

    gc.collect()  # mappings of earlier tests that were released later would make room
    status = Path("/proc/self/status").read_text()
    field = {"RLIMIT_DATA": "VmData", "RLIMIT_AS": "VmSize"}[kind]
    match = re.search(rf"{field}:\s+(\d+) kB", status)
    assert match
    which = getattr(resource, kind)
    before = resource.getrlimit(which)
    resource.setrlimit(which, (1024 * int(match[1]) + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(which, before)


def can_map(size):
    """Return whether anonymous memory can be mapped."""
    try:
        mmap.mmap(-1, size).close()
    except OSError:
        return False
    return True


@on_linux
def test_no_address_space_is_not_a_damaged_file(tmp_path):
    write_sparse_table(tmp_path / "x.npy", 8 << 30)
    with limit_resource("RLIMIT_AS", 1 << 30):
        if can_map(2 << 30):
            pytest.skip("this system does not limit the address space, as emulators do not")
        with pytest.raises(OSError, match=r"x\.npy is intact, but .*address space.*ulimit -v") as caught:
            FeatureTable.load(tmp_path / "x.npy")
        with pytest.raises(MemoryError, match=r"x\.npy is intact, but its .* bytes do not fit into memory.* mmap=True"):
            FeatureTable.load(tmp_path / "x.npy", mmap=False)
    assert caught.value.errno == errno.ENOMEM
    assert "write it again" not in str(caught.value)


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=np.int32).reshape(3, 4),
        np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        np.array(5),
        np.zeros((0, 3)),
        np.zeros((3, 0, 2), np.float16),
        np.array([True, False]),
        np.arange(3, dtype=np.uint16),
        np.array([1j]),
    ],
    ids=str,
)
def test_arrays_come_back_as_they_were(tmp_path, array, mmap):
    np.save(tmp_path / "a.npy", array)
    save_arrays(tmp_path / "b", {"a": array})
    assert (tmp_path / "b" / "a.npy").read_bytes() == (tmp_path / "a.npy").read_bytes()
    loaded = load_array(tmp_path / "a.npy", mmap)
    assert torch.equal(loaded, torch.from_numpy(array))
    assert loaded.is_contiguous() == torch.from_numpy(array).is_contiguous()


@pytest.mark.parametrize("mmap", [True, False])
def test_arrays_behind_an_odd_header_are_aligned(tmp_path, mmap):
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (2,), }\n"
    start = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    (tmp_path / "a.npy").write_bytes(start + np.array([1.5, 2.5]).tobytes())
    loaded = load_array(tmp_path / "a.npy", mmap)
    assert loaded.tolist() == [1.5, 2.5]
    assert loaded.data_ptr() % 8 == 0


def to_npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


WHOLE = to_npy(np.arange(4, dtype=np.int32))
NO_NUMBERS = "is not a complete .npy file of numbers"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (to_npy(np.arange(4, dtype=">i4")), r"not in native byte order: use array.astype\('i4'\)"),
        (to_npy(np.array([{}], dtype=object)), r"holds Python objects \(object\), shape \[1\], instead of numbers"),
        (to_npy(np.array(["a", "bc"])), r"holds texts \(<U2\), shape \[2\], instead of numbers"),
        (
            to_npy(np.zeros(2, [("s", "i8"), ("t", "f4")])),
            r"structured .* fields s \(int64\), t \(float32\), shape \[2\]",
        ),
        (to_npy(np.zeros(2, [("源", "i8")])), r"structured array with the fields 源 \(int64\), shape \[2\]"),
        (WHOLE + b"more", r"its header declares int32 \[4\], 144 bytes in all, but it has 148"),
        (WHOLE[:20], NO_NUMBERS),
        (WHOLE.replace(b"'shape': (4,)", b"'shape': ((((").replace(b"}", b" "), NO_NUMBERS),
        (to_npy(np.array([True, False]))[:-1] + b"A", "contains bool bytes other than 0 and 1"),
    ],
)
def test_messages_of_damaged_files(tmp_path, content, said):
    (tmp_path / "a.npy").write_bytes(content)
    refuses(ValueError, rf"a\.npy.*{said}", load_array, tmp_path / "a.npy")


def test_what_is_no_file_is_not_waited_for(tmp_path):
    path = tmp_path / "x.npy"
    refuses(FileNotFoundError, r"x\.npy does not exist$", load_array, path)
    path.mkdir()
    refuses(ValueError, r"x\.npy must be a file, but is a folder", load_array, path)
    path.rmdir()
    path.symlink_to(tmp_path / "gone.npy")
    refuses(FileNotFoundError, r"x\.npy is a broken symbolic link", load_array, path)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "gone.npy")
        refuses(ValueError, r"x\.npy must .* FIFO", load_array, path)


def test_a_link_to_nothing_is_not_the_same_as_no_labels(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((3, 2), np.float32))
    np.save(tmp_path / "edge_index.npy", np.array([[0, 1], [1, 2]]))
    assert "y" not in load_folder(tmp_path)
    for name in ("y", "val_mask", "edge_index"):
        path = tmp_path / f"{name}.npy"
        path.unlink(missing_ok=True)
        path.symlink_to(tmp_path / "unmounted" / "a.npy")
        refuses(FileNotFoundError, rf"{name}\.npy is a broken symbolic link", load_folder, tmp_path)
        path.unlink()


def test_saving_over_a_graph_leaves_nothing_of_it(tmp_path):
    unsorted = CSCGraph.from_edge_index(torch.tensor([[0, 1, 2], [2, 1, 0]]))
    in_order = CSCGraph.from_edge_index(torch.tensor([[0, 1, 2], [0, 1, 2]]))
    unsorted.save(tmp_path)
    held = CSCGraph.load(tmp_path)
    in_order.save(tmp_path)
    assert torch.equal(CSCGraph.load(tmp_path).to_edge_index(), in_order.to_edge_index())
    assert torch.equal(held.to_edge_index(), unsorted.to_edge_index())  # it maps the previous files


def test_making_a_file_again_leaves_the_mapped_one_alone(tmp_path):
    create_array(tmp_path / "a.npy", "float32", (3,))[:] = 1
    held = load_array(tmp_path / "a.npy")
    create_array(tmp_path / "a.npy", "float32", (3,))[:] = 2
    assert held.tolist() == [1, 1, 1]
    assert load_array(tmp_path / "a.npy").tolist() == [2, 2, 2]
