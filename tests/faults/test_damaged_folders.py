"""Damaged files of graphs: each loads to what it says, or gives one clear error that names it."""

import io
import os
import random
import shutil
import socket
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_gnn.graph import CSCGraph, FeatureTable
from lightning_gnn.graph.folder import load_folder

N, F, E = 40, 6, 200
Files = dict[str, bytes]


def npy(array: Any, version: tuple[int, int] | None = None) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, np.asarray(array), version)
    return file.getvalue()


def with_header(text: str, body: bytes = b"") -> bytes:
    header = text.encode("latin1")
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + body


def folder_files(sorted_edges: bool) -> Files:
    rng = np.random.default_rng(0)
    edge_index = rng.integers(N, size=(2, E))
    part = rng.integers(3, size=N)
    arrays = {
        "x": rng.random((N, F), dtype=np.float32),
        "y": rng.integers(-1, 5, size=N),
        "train_mask": part == 0,
        "val_idx": np.flatnonzero(part == 1),
        "test_mask": part == 2,
    }
    if sorted_edges:
        csc = CSCGraph.from_edge_index(torch.from_numpy(edge_index), N)
        arrays |= {name: getattr(csc, name).numpy() for name in ("indptr", "indices", "edge_ids")}
    else:
        arrays["edge_index"] = edge_index
    return {f"{name}.npy": npy(array) for name, array in arrays.items()}


def read_folder(root: Path, mmap: bool) -> dict[str, np.ndarray]:
    root.chmod(0o555)  # so that no sorted edges are kept
    try:
        data = load_folder(root, mmap)
    finally:
        root.chmod(0o755)
    found = {f"{key}.npy": data[key].numpy() for key in data.keys() if key != "graph"}  # noqa: SIM118
    csc = data.graph
    if (root / "edge_index.npy").exists():
        return found | {"edge_index.npy": csc.to_edge_index().numpy()}
    names = [name for name in ("indptr", "indices", "edge_ids") if getattr(csc, name) is not None]
    return found | {f"{name}.npy": getattr(csc, name).numpy() for name in names}


def table_files(dtype: str) -> Files:
    x = np.random.default_rng(0).standard_normal((N, F)) * 30
    files = {"x.npy": npy(x.astype(dtype))}
    return files | ({"x.scales.npy": npy(np.ones(N, np.float32))} if dtype == "int8" else {})


def read_table(root: Path, mmap: bool) -> dict[str, np.ndarray]:
    table = FeatureTable.load(root / "x.npy", mmap)
    found = {"x.npy": table.values.numpy()}
    return found if table.scales is None else found | {"x.scales.npy": table.scales.numpy()}


def flipped(rng: random.Random, content: bytes, start: int, end: int) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 8))):
        at = rng.randrange(start, min(end, len(content)))
        changed[at] = rng.choice((changed[at] ^ 1 << rng.randrange(8), rng.randrange(256)))
    return bytes(changed)


def special(path: Path, kind: str) -> None:
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "socket":
        here = os.getcwd()
        os.chdir(path.parent)  # the name of a socket must be short
        try:
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(path.name)
        finally:
            os.chdir(here)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to({"device": Path("/dev/zero"), "loop": path, "link to nothing": path.with_name("nothing")}[kind])


SPECIAL = ("FIFO", "socket", "folder", "device", "loop", "link to nothing")


def damages(rng: random.Random, files: Files, flips: int) -> Iterator[tuple[str, str, bytes | str]]:
    """Yield kinds of damage, the file, and its new content or the name of what stands in its place."""
    for name, content in files.items():
        for _ in range(flips):
            yield "flipped in the header", name, flipped(rng, content, 0, 128)
            yield "flipped in the body", name, flipped(rng, content, 128, len(content))
            yield "cut off", name, content[: rng.randrange(len(content))]
        yield "cut off", name, b""
        yield "too long", name, content + rng.randbytes(rng.choice((1, 8, 64)))
        yield "noise", name, rng.randbytes(len(content))
        for kind in SPECIAL:
            yield kind, name, kind
        for other in files:
            if other != name:
                yield "swapped", name, files[other]
        array = np.load(io.BytesIO(content))
        for dtype in (
            "int8",
            "uint16",
            "int64",
            "float64",
            "complex64",
            "bool",
            "U3",
            "M8[s]",
            "O",
            "f4,i4",
            ">i4",
        ):
            yield (
                "dtype",
                name,
                npy(array.astype(">i4" if dtype == ">i4" else dtype))
                if dtype != "O"
                else (
                    with_header(f"{{'descr': '|O', 'fortran_order': False, 'shape': {array.shape}}}", b"\x80\x02]q.")
                ),
            )
        for changed in (array[:-1], array[:0], array[None], array[..., None], array.reshape(-1), array.T):
            yield "shape", name, npy(np.ascontiguousarray(changed))
        yield "order", name, npy(np.asfortranarray(array))
        yield "version", name, npy(array, (2, 0))
        yield "version", name, npy(array, (3, 0))
        for shape in (
            "(-40, 6)",
            "(-1,)",
            f"({2**62}, 6)",
            f"(0, {2**70})",
            f"({10**12},)",
            "(1, " * 60,
            "40",
            "()",
        ):
            header = f"{{'descr': '{array.dtype.str}', 'fortran_order': False, 'shape': {shape}}}"
            yield "header", name, with_header(header, content[128:])
        for text in (
            "",
            "(" * 5000,
            "{'descr': '<f4'",
            "{'descr': '<f4', 'shape': (4,), 'x': \"\"\"",
            "é\xff{",
            "\t\n {}",
        ):
            yield "header", name, with_header(text, content[128:])


def expected(name: str, content: bytes) -> np.ndarray:
    array = np.load(io.BytesIO(content), allow_pickle=False)
    if name.endswith("_mask.npy"):
        return array.reshape(-1)  # [N, 1] will do
    if name == "y.npy":
        array = array.reshape(-1)
        return np.where(np.isnan(array), -1, array).astype(np.int64) if array.dtype.kind == "f" else array
    return array


def outcome(
    root: Path, files: Files, whole: dict[str, np.ndarray], read: Callable, name: str, damage: bytes | str, mmap: bool
) -> str:
    """Damage one file, load the folder, mend the file; returns ``loaded``, ``error`` or what is wrong."""
    path = root / name
    path.unlink()
    if isinstance(damage, bytes):
        path.write_bytes(damage)
    else:
        special(path, damage)
    try:
        found = read(root, mmap)
    except (OSError, TypeError, ValueError) as error:
        # TypeError is what is documented for an array of another dtype.
        named = path.stem.split(".")[-1] in str(error) and str(path.parent) in str(error)
        return "error" if named else f"nameless {type(error).__name__}: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        path.write_bytes(files[name])
        shutil.rmtree(root / "csc", ignore_errors=True)
    if not isinstance(damage, bytes):
        return f"wrong: loaded from a {damage}"
    should = whole | {name: expected(name, damage)}
    same = all(np.array_equal(found[key], should[key].astype(found[key].dtype), equal_nan=True) for key in found)
    return "loaded" if same and found.keys() == should.keys() else "wrong: other values"


CAMPAIGNS: dict[str, tuple[Callable[[], Files], Callable, int]] = {
    "folder in CSC order": (lambda: folder_files(True), read_folder, 20),
    "folder of edges": (lambda: folder_files(False), read_folder, 12),
    "float32 table": (lambda: table_files("float32"), read_table, 60),
    "int8 table": (lambda: table_files("int8"), read_table, 60),
}


def cases(campaign: str) -> list[tuple[str, str, bytes | str]]:
    make, _, flips = CAMPAIGNS[campaign]
    return list(damages(random.Random(f"damage {campaign}"), make(), flips))


def write(root: Path, files: Files) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs FIFOs and sockets in folders")
@pytest.mark.parametrize("campaign", CAMPAIGNS)
def test_each_damaged_file_loads_to_what_it_says_or_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, campaign: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make, read, _ = CAMPAIGNS[campaign]
    files, root = make(), tmp_path / "data"
    write(root, files)
    whole = read(root, True)
    counts: Counter[str] = Counter()
    wrong = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of NumPy, about headers that are odd
        for i, (kind, name, damage) in enumerate(cases(campaign)):
            found = outcome(root, files, whole, read, name, damage, mmap=i % 2 == 0)
            counts[found] += 1
            if found not in ("loaded", "error"):
                wrong.append((i, kind, name, found))
    assert not wrong, f"{len(wrong)} of {counts.total()}: {wrong[:10]}"
    assert counts["error"] > 20
    assert counts["loaded"] > 5


def test_the_campaign_is_large() -> None:
    assert sum(len(cases(campaign)) for campaign in CAMPAIGNS) >= 1500
