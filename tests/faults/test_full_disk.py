"""A disk without room: one clear error before anything is lost, and nothing left behind."""

import errno
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch_geometric.data import Data

from lightning_gnn.graph import CSCGraph, FeatureTable
from lightning_gnn.graph.compress import CompressedGraph
from lightning_gnn.graph.folder import save_folder
from lightning_gnn.graph.topology_files import write_csc
from lightning_gnn.nn import FullInference, GraphSAGE
from lightning_gnn.nn.inference import infer
from tests.full_graph.launch import run_script

resource = pytest.importorskip("resource", reason="no limits on the size of files here")

N = 20_000
LIMIT = 256 << 10
EDGE_INDEX = torch.randint(N, (2, 4 * N), generator=torch.Generator().manual_seed(0))
GRAPH = CSCGraph.from_edge_index(EDGE_INDEX, N)


@contextmanager
def small_files() -> Iterator[None]:
    """Let no file of this process grow beyond 256 KB: the system answers as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)]
    try:
        made = subprocess.run(mount, capture_output=True, check=False)
    except OSError as error:
        pytest.skip(f"no disk can be mounted: {error}")
    if made.returncode != 0:
        pytest.skip(f"no disk can be mounted: {made.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=False)


def data() -> Data:
    return Data(x=torch.rand(N, 8), y=torch.zeros(N, dtype=torch.int64), edge_index=EDGE_INDEX)


SAVES: dict[str, Callable[[Path], object]] = {
    "feature table": lambda folder: FeatureTable(torch.rand(N, 16)).save(folder / "x.npy"),
    "int8 table": lambda folder: FeatureTable(torch.rand(N, 64)).quantized().save(folder / "x.npy"),
    "graph": lambda folder: GRAPH.save(folder),
    "folder": lambda folder: save_folder(data(), folder),
    "compressed graph": lambda folder: CompressedGraph.from_edge_index(EDGE_INDEX, N).save(folder),
    "sorted edges": lambda folder: write_csc(EDGE_INDEX, N, folder / "csc"),
}


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", SAVES)
def test_a_file_that_cannot_grow(tmp_path: Path, kind: str) -> None:
    (tmp_path / "x.npy").write_bytes(b"from before") if "table" in kind else None
    before = tree(tmp_path)
    with small_files(), pytest.raises(OSError, match=r"\.npy needs \d+ bytes and cannot be written \(File too la") as e:
        SAVES[kind](tmp_path)
    assert e.value.errno == errno.EFBIG
    assert str(e.value).endswith("bytes left; make room, or write elsewhere")
    assert str(e.value).count("needs") == 1
    assert tree(tmp_path) == before
    (tmp_path / "x.npy").unlink(missing_ok=True)
    shutil.rmtree(tmp_path / "csc", ignore_errors=True)
    SAVES[kind](tmp_path)  # with room again


@pytest.mark.parametrize("kind", SAVES)
def test_a_full_disk(small_disk: Path, kind: str) -> None:
    (small_disk / "filler").write_bytes(bytes(700 << 10))
    before = tree(small_disk)
    with pytest.raises(
        OSError, match=r"needs \d+ bytes and cannot be written \(No space left.*: its disk has \d+ b"
    ) as e:
        SAVES[kind](small_disk)
    assert e.value.errno == errno.ENOSPC
    assert str(small_disk) in str(e.value)
    assert tree(small_disk) == before


def test_a_disk_that_fills_up_while_a_table_is_written(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fallocate")  # as on a file system that reserves nothing
    usage = type("Usage", (), {"free": 1 << 30})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match=r"x\.npy needs 1280128 bytes and cannot be written"):
        FeatureTable(torch.rand(N, 16)).save(small_disk / "x.npy")
    assert list(small_disk.iterdir()) == []


MODEL = GraphSAGE(8, 16, num_layers=2, out_channels=4)
X = torch.rand(N, 8)


def streamed(folder: Path | None, **options: object) -> torch.Tensor:
    graph = CompressedGraph.from_edge_index(EDGE_INDEX, N)
    settings = FullInference(folder=folder, memory_limit=0, progress=False, **options)  # type: ignore[arg-type]
    return infer(MODEL.eval(), X, graph, settings=settings)


def test_streamed_inference_where_a_layer_cannot_be_reserved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_GNN_CACHE", str(tmp_path))
    with small_files(), pytest.raises(OSError, match=r"layer_0\.npy needs 1280128 bytes and cannot be written"):
        streamed(None)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    with small_files(), pytest.raises(OSError, match=r"layer_0\.npy needs 1280128 bytes and cannot be written"):
        streamed(tmp_path / "mine")
    assert not list((tmp_path / "mine").glob("layer_*"))
    assert torch.allclose(streamed(tmp_path / "mine"), MODEL(X, EDGE_INDEX), atol=1e-5)


def test_streamed_inference_looks_at_the_disk_before_it_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 1_500_000  # enough for each layer alone, not for both
    usage = type("Usage", (), {"free": free})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    computed: list[int] = []
    MODEL.convs[0].register_forward_hook(lambda *_: computed.append(1))
    with pytest.raises(OSError, match=rf"layer_1\.npy needs 1600000 bytes .*: its disk has {free} bytes left"):
        streamed(tmp_path)
    assert not computed


def test_outputs_of_a_run_before_count_as_room(tmp_path: Path) -> None:
    first = streamed(tmp_path)
    kept = first.clone()
    MODEL.convs[0].lin_r.weight.data += 1
    second = streamed(tmp_path)
    MODEL.convs[0].lin_r.weight.data -= 1
    assert not torch.allclose(second, kept)
    assert torch.equal(first, kept)  # mapped from a file that has been replaced since


SCRIPT = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
from pathlib import Path
from lightning_gnn.graph.compress import CompressedGraph
from lightning_gnn.nn import FullInference, GraphSAGE
from lightning_gnn.nn.inference import infer
n = 20_000
edge_index = torch.randint(n, (2, n))
settings = FullInference(folder=Path(sys.argv[1]), memory_limit=0, progress=False)
graph = CompressedGraph.from_edge_index(edge_index, n)
infer(GraphSAGE(8, 64, num_layers=2, out_channels=4).eval(), torch.rand(n, 8), graph, settings=settings)
"""


@pytest.mark.slow
def test_streamed_inference_on_a_full_disk_ends_with_a_message(small_disk: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run_script(tmp_path / "script.py", str(small_disk / "layers"))
    assert done.returncode == 1, done.stderr[-2000:]  # and no signal
    assert re.search(
        r"OSError: \[Errno 28\] \S+layer_0\.npy needs \d+ bytes and cannot be written \(No space left on device\): "
        r"its disk has \d+ bytes left; make room, or write elsewhere\n$",
        done.stderr,
    )
    assert not list(small_disk.rglob("layer_*"))
