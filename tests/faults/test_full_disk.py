"""A full disk: one clear error before anything is lost, and no files left behind."""

import errno
import re
import shutil
import subprocess
from contextlib import contextmanager

import pytest
import torch
from torch_geometric.data import Data

from lightning_gnn.compressed.graph import CompressedGraph
from lightning_gnn.datasets.folder import save_folder
from lightning_gnn.datasets.topology_files import write_csc
from lightning_gnn.features import FeatureTable
from lightning_gnn.graph import CSCGraph
from lightning_gnn.nn import FullInference, GraphSAGE
from lightning_gnn.nn.inference import infer
from tests.full_graph.launch import run_script

resource = pytest.importorskip("resource", reason="no limits on the size of files here")

N = 20_000
EDGE_INDEX = torch.randint(N, (2, 4 * N), generator=torch.Generator().manual_seed(0))
X = torch.rand(N, 8)
DATA = Data(x=X, y=torch.zeros(N, dtype=torch.int64), edge_index=EDGE_INDEX)


@contextmanager
def limit_files():
    """Limit this process's files to 256 KB: the system then reports a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (256 << 10, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)]
    try:
        subprocess.run(mount, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no disk can be mounted: {error}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=False)


SAVES = {
    "feature table": lambda folder: FeatureTable(torch.rand(N, 16)).save(folder / "x.npy"),
    "int8 table": lambda folder: FeatureTable(torch.rand(N, 64)).quantized().save(folder / "x.npy"),
    "graph": lambda folder: CSCGraph.from_edge_index(EDGE_INDEX, N).save(folder),
    "folder": lambda folder: save_folder(DATA, folder),
    "sorted edges": lambda folder: write_csc(EDGE_INDEX, N, folder / "csc"),
}


def read_files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", SAVES)
def test_a_file_that_cannot_grow(tmp_path, kind):
    (tmp_path / "x.npy").write_bytes(b"from before") if "table" in kind else None
    before = read_files(tmp_path)
    with limit_files(), pytest.raises(OSError, match=r"\.npy needs \d+ bytes and cannot be written \(File too la") as e:
        SAVES[kind](tmp_path)
    assert e.value.errno == errno.EFBIG
    assert str(e.value).endswith("bytes left; free disk space, or write elsewhere")
    assert str(e.value).count("needs") == 1
    assert read_files(tmp_path) == before
    (tmp_path / "x.npy").unlink(missing_ok=True)
    shutil.rmtree(tmp_path / "csc", ignore_errors=True)
    SAVES[kind](tmp_path)  # after space is available again


MODEL = GraphSAGE(8, 16, num_layers=2, out_channels=4).eval()


def infer_streamed(folder):
    graph = CompressedGraph.from_edge_index(EDGE_INDEX, N)
    return infer(MODEL, X, graph, settings=FullInference(folder=folder, memory_limit=0, progress=False))


def test_streamed_inference_where_a_layer_cannot_be_reserved(tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTNING_GNN_CACHE", str(tmp_path))
    for folder in (None, tmp_path / "mine"):
        with limit_files(), pytest.raises(OSError, match=r"layer_0\.npy needs 1280128 bytes and cannot be written"):
            infer_streamed(folder)
        assert {path.name for path in tmp_path.rglob("*") if path.is_file()} <= {"lock"}
    assert torch.allclose(infer_streamed(tmp_path / "mine"), MODEL(X, EDGE_INDEX), atol=1e-5)


SCRIPT = """
import sys, warnings
warnings.simplefilter("ignore")
from pathlib import Path
from tests.faults.test_full_disk import infer_streamed
infer_streamed(Path(sys.argv[1]))
"""


@pytest.mark.slow
def test_streamed_inference_on_a_full_disk_ends_with_a_message(small_disk, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run_script(tmp_path / "script.py", str(small_disk / "layers"))
    assert done.returncode == 1, done.stderr[-2000:]  # not killed by a signal
    said = (
        r"OSError: \[Errno 28\] \S+layer_0\.npy needs \d+ bytes and cannot be written \(No space left on device\): "
        r"its disk has \d+ bytes left; free disk space, or write elsewhere\n$"
    )
    assert re.search(said, done.stderr), done.stderr[-2000:]
    assert not list(small_disk.rglob("layer_*"))
