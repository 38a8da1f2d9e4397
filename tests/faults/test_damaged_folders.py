"""Damaged graph files: each loads with the content it declares, or gives one clear error that names it."""

import io
import os
import random
import shutil
import socket
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_gnn.datasets.folder import load_folder
from lightning_gnn.graph import CSCGraph

N, F, E = 40, 6, 200


def to_npy(array, version=None):
    file = io.BytesIO()
    np.lib.format.write_array(file, np.asarray(array), version)
    return file.getvalue()


def make_npy(text, body=b""):
    header = text.encode("latin1")
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + body


def make_header(kind, shape):
    return f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}}}"


def make_files(sorted_edges):
    rng = np.random.default_rng(0)
    edge_index, part = rng.integers(N, size=(2, E)), rng.integers(3, size=N)
    arrays = {"x": rng.random((N, F), dtype=np.float32), "y": rng.integers(-1, 5, size=N), "train_mask": part == 0}
    arrays |= {"val_idx": np.flatnonzero(part == 1), "test_mask": part == 2}
    if sorted_edges:
        csc = CSCGraph.from_edge_index(torch.from_numpy(edge_index), N)
        arrays |= {name: getattr(csc, name).numpy() for name in ("indptr", "indices", "edge_ids")}
    else:
        arrays["edge_index"] = edge_index
    return {f"{name}.npy": to_npy(array) for name, array in arrays.items()}


def read_folder(root, mmap):
    root.chmod(0o555)  # disables the cache of sorted edges
    try:
        data = load_folder(root, mmap)
    finally:
        root.chmod(0o755)
    found = {f"{key}.npy": data[key].numpy() for key in data.keys() if key != "graph"}  # noqa: SIM118
    if (root / "edge_index.npy").exists():
        return found | {"edge_index.npy": data.graph.to_edge_index().numpy()}
    parts = {name: getattr(data.graph, name) for name in ("indptr", "indices", "edge_ids")}
    return found | {f"{name}.npy": part.numpy() for name, part in parts.items() if part is not None}


def flip_bits(rng, content, start, end):
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 8))):
        at = rng.randrange(start, min(end, len(content)))
        changed[at] = rng.choice((changed[at] ^ 1 << rng.randrange(8), rng.randrange(256)))
    return bytes(changed)


def create_socket(path):
    cwd = os.getcwd()
    os.chdir(path.parent)  # socket paths must be short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(cwd)


SPECIAL = {
    "FIFO": lambda path: os.mkfifo(path),
    "socket": create_socket,
    "folder": Path.mkdir,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "loop": lambda path: path.symlink_to(path),
    "link to nothing": lambda path: path.symlink_to(path.with_name("nothing")),
}
DTYPES = ["int8", "uint16", "int64", "float64", "complex64", "bool", "U3", "M8[s]", "f4,i4", ">i4"]
SHAPES = ["(-40, 6)", "(-1,)", f"({2**62}, 6)", f"(0, {2**70})", f"({10**12},)", "(1, " * 60, "40", "()"]
TEXTS = ["", "(" * 5000, "{'descr': '<f4'", "{'descr': '<f4', 'shape': (4,), 'x': \"\"\"", "é\xff{", "\t\n {}"]


def draw_damages(rng, files, flips):
    """Yield damaged files, each with its new content or the kind of object that replaces it."""
    for name, content in files.items():
        array, body = np.load(io.BytesIO(content)), content[128:]
        found = [b"", content + rng.randbytes(rng.choice((1, 8, 64))), rng.randbytes(len(content)), *SPECIAL]
        for _ in range(flips):
            found += [flip_bits(rng, content, 0, 128), flip_bits(rng, content, 128, len(content))]
            found.append(content[: rng.randrange(len(content))])
        found += [files[other] for other in files if other != name]
        found += [to_npy(array.astype(dtype)) for dtype in DTYPES]
        found.append(make_npy(make_header("|O", array.shape), b"\x80\x02]q."))
        shapes = array[:-1], array[:0], array[None], array[..., None], array.reshape(-1), array.T
        found += [to_npy(np.ascontiguousarray(changed)) for changed in shapes]
        found += [to_npy(np.asfortranarray(array)), to_npy(array, (2, 0)), to_npy(array, (3, 0))]
        found += [make_npy(text, body) for text in (*TEXTS, *(make_header(array.dtype.str, size) for size in SHAPES))]
        yield from ((name, damage) for damage in found)


def read_expected(name, content):
    array = np.load(io.BytesIO(content), allow_pickle=False)
    if name.endswith("_mask.npy"):
        return array.reshape(-1)  # [N, 1] is accepted
    if name == "y.npy":
        array = array.reshape(-1)
        return np.where(np.isnan(array), -1, array).astype(np.int64) if array.dtype.kind == "f" else array
    return array


def check_damage(root, files, whole, name, damage, mmap):
    """Damage one file, load the folder, restore it; return ``loaded``, ``error`` or a description of the fault."""
    path = root / name
    path.unlink()
    path.write_bytes(damage) if isinstance(damage, bytes) else SPECIAL[damage](path)
    try:
        found = read_folder(root, mmap)
    except (OSError, TypeError, ValueError) as error:
        # TypeError is documented for arrays of another dtype.
        named = path.stem.split(".")[-1] in str(error) and str(path.parent) in str(error)
        return "error" if named else f"nameless {type(error).__name__}: {error}"
    finally:
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        path.write_bytes(files[name])
        shutil.rmtree(root / "csc", ignore_errors=True)
    if not isinstance(damage, bytes):
        return f"wrong: loaded from a {damage}"
    should = whole | {name: read_expected(name, damage)}
    same = all(np.array_equal(found[key], should[key].astype(found[key].dtype), equal_nan=True) for key in found)
    return "loaded" if same and found.keys() == should.keys() else "wrong: other values"


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs FIFOs and sockets in folders")
@pytest.mark.parametrize(("sorted_edges", "flips"), [(True, 20), (False, 12)], ids=["in CSC order", "of edges"])
def test_each_damaged_file_loads_to_what_it_says_or_is_named(tmp_path, monkeypatch, sorted_edges, flips):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files, root = make_files(sorted_edges), tmp_path / "data"
    root.mkdir()
    for name, content in files.items():
        (root / name).write_bytes(content)
    whole = read_folder(root, True)
    counts, wrong = Counter(), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy's, about unusual headers
        for i, (name, damage) in enumerate(draw_damages(random.Random(f"folder_files {sorted_edges}"), files, flips)):
            found = check_damage(root, files, whole, name, damage, mmap=i % 2 == 0)
            counts[found] += 1
            if found not in ("loaded", "error"):
                wrong.append((i, name, found))
    assert not wrong, f"{len(wrong)} of {counts.total()}: {wrong[:10]}"
    assert counts["error"] > 20
    assert counts["loaded"] > 5
