"""A full disk: one clear error before anything is lost, and no files left behind."""

import errno
import re
import shutil
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from torch_geometric.data import Data

from lightning_gnn.cli.command_line import UserError, raise_user_errors
from lightning_gnn.cli.commands import export, partition
from lightning_gnn.compressed.graph import CompressedGraph
from lightning_gnn.datasets.folder import save_folder
from lightning_gnn.datasets.topology_files import write_csc
from lightning_gnn.features import FeatureTable
from lightning_gnn.graph import CSCGraph
from lightning_gnn.nn import FullInference, GraphSAGE
from lightning_gnn.nn.inference import infer
from lightning_gnn.runtime.checkpoint_io import SafeCheckpointIO
from tests.cli.command import lgnn
from tests.full_graph.launch import run_script

resource = pytest.importorskip("resource", reason="no limits on the size of files here")

N = 20_000
EDGE_INDEX = torch.randint(N, (2, 4 * N), generator=torch.Generator().manual_seed(0))
X = torch.rand(N, 8)
DATA = Data(x=X, y=torch.zeros(N, dtype=torch.int64), edge_index=EDGE_INDEX)


@contextmanager
def limit_files(size=256 << 10):
    """Limit this process's files to ``size`` bytes: the system then reports a full disk."""
    before, writes_bytecode = resource.getrlimit(resource.RLIMIT_FSIZE), not sys.dont_write_bytecode
    # Python would truncate bytecode without an error, and other processes would fail to import it.
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sys.dont_write_bytecode = not writes_bytecode


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


class LimitFiles(pl.Callback):
    """Limits files from the second epoch on, until ``trainer.fit`` ends."""

    def __init__(self):
        self.limit = ExitStack()

    def on_train_epoch_start(self, trainer, *args):
        if trainer.current_epoch == 1:
            self.limit.enter_context(limit_files(4096))

    def on_exception(self, *args):
        self.limit.close()


@pytest.mark.slow
def test_a_run_whose_second_checkpoint_cannot_be_written(tmp_path, capfd):
    assert lgnn(tmp_path, "+callbacks.limit._target_=tests.faults.test_full_disk.LimitFiles", "logger=none") == 2
    error, *rest = capfd.readouterr().err.splitlines()
    said = (
        r"error: the checkpoint could not be written: File too large; it needs (\d+) bytes, and its disk has \d+ bytes "
        r"left: free disk space, or write elsewhere; the existing file is unchanged: '(\S+best\.ckpt|\S+last\.ckpt)'"
    )
    found = re.fullmatch(said, error)
    assert found, error
    assert 0.9 < int(found[1]) / (tmp_path / "checkpoints/last.ckpt").stat().st_size < 1.1
    assert rest[0] == "The last checkpoint can be resumed:"
    checkpoint = rest[1].rpartition("ckpt_path=")[2]
    assert SafeCheckpointIO().load_checkpoint(checkpoint)["epoch"] == 0
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt"}


@pytest.mark.slow
def test_commands_that_cannot_write_their_file(tmp_path, capfd):
    assert lgnn(tmp_path / "run", "trainer.max_epochs=1", "model=gcn", "model.hidden_channels=1024") == 0
    checkpoint = f"ckpt_path={tmp_path}/run/checkpoints/best.ckpt"
    capfd.readouterr()
    with limit_files(64 << 10):
        codes = [
            lgnn(tmp_path / "predict", "mode=predict", checkpoint, "data.num_nodes=6000", base=[]),
            export.main([checkpoint, f"--to={tmp_path}/model.pt2"]),
            partition.main(["data.num_nodes=9000", "parts=2", f"out={tmp_path}/parts", "method=random"]),
        ]
    assert codes == [2, 2, 2]
    error = capfd.readouterr().err
    for name in (r"predictions\.npy needs 72128 bytes and", r"model\.pt2", r"\S+\.npy needs \d+ bytes and"):
        end = r"cannot be written \(File too large\): its disk has \d+ bytes left; free disk space, or write elsewhere"
        assert re.search(rf"error: \S+{name} {end}\n", error), error
    assert [*tmp_path.rglob("predictions*"), *tmp_path.rglob("*.pt2"), *tmp_path.rglob("*.part")] == []


def write_archive(path):
    """Write by torch's writer of ZIP files, which replaces the system's error."""
    with path.open("wb") as file:
        torch.save(torch.rand(N), file)


def write_anywhere(path):
    with path.open("wb") as file:
        file.write(bytes(N))


@pytest.mark.parametrize("write", [write_archive, write_anywhere])
@pytest.mark.parametrize("shown", [False, True])
def test_writes_of_other_packages(write, shown, tmp_path):
    if shown:  # a configuration that Hydra keeps in this process, without a folder
        assert lgnn(tmp_path, "--cfg=job") == 0
    with limit_files(4096), pytest.raises(UserError) as raised, raise_user_errors(only_ours=True):
        write(tmp_path / "some.file")
    said = rf"a file cannot be written \(File too large\): \S+ \S+ in {Path.cwd()}, .* left; free disk space, or write"
    assert re.match(said, str(raised.value)), raised.value


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
