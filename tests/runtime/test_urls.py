"""Graphs, parts, features and checkpoints at URLs: fetched once, complete and current, or refused in one line."""

import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch_geometric.data import Data

from lightning_gnn import FullInference, NeighborDataModule, PartitionedDataModule
from lightning_gnn.datasets import convert_tables, load_hetero_folder, registry, save_hetero_folder
from lightning_gnn.datasets.folder import load_folder, save_folder
from lightning_gnn.features import DiskFeatures, FeatureTable
from lightning_gnn.graph import CSCGraph
from lightning_gnn.nn.layer_files import layer_outputs
from lightning_gnn.partitioned import partition_graph
from lightning_gnn.runtime import store
from lightning_gnn.runtime.urls import cached_path, local_path
from tests.cli.command import NODE, lgnn, metrics_of
from tests.refusals import refuses
from tests.sampling.cases import make_plain_graph, make_typed_graph

OPTIONS = {"num_neighbors": [2, 2], "batch_size": 8, "seed": 1}


def make_graph():
    data = make_plain_graph()
    kept = {key: data[key] for key in ("x", "y", "edge_index", "train_mask", "val_mask")}
    return Data(**kept, test_mask=data.val_mask)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTNING_GNN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
    return tmp_path / "cache"


def put(folder, url):
    system, root = fsspec.url_to_fs(url)
    for path in filter(Path.is_file, Path(folder).rglob("*")):
        system.put_file(str(path), f"{root}/{path.relative_to(folder).as_posix()}")
    return url


def entries(cache):
    return store.entries(cache, "remote")


def test_processes_fetch_once_and_again_after_a_change(cache, record_calls):
    system, fetched = fsspec.filesystem("memory"), record_calls(MemoryFileSystem, "get")
    system.pipe({"/folder/a": b"1" * 100, "/folder/deeper/b": b"22", "/other": b"3"})
    with ThreadPoolExecutor(4) as pool:
        folders = {*pool.map(cached_path, ["memory://folder", "memory://folder/", Path("memory://folder")] * 3)}
    assert len(folders) == len(fetched) == 1
    folder = folders.pop()
    assert {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == {
        "a": b"1" * 100,
        "b": b"22",
    }
    assert cached_path("memory://folder/deeper/b").read_bytes() == b"22"
    system.pipe("/folder/a", b"4" * 100)
    assert (cached_path("memory://folder") / "a").read_bytes() == b"4" * 100
    assert (folder / "a").read_bytes() == b"1" * 100  # as opened by a run that goes on


@pytest.mark.parametrize("failure", [OSError(5, "the network is gone"), None])
def test_a_copy_is_whole_or_absent(cache, monkeypatch, failure):
    fsspec.filesystem("memory").pipe({"/folder/a": b"1" * 100, "/folder/b": b"22"})
    get_file = MemoryFileSystem.get_file

    def break_down(self, remote, local, **more):
        if remote == "/folder/b" and failure is not None:
            raise failure
        get_file(self, remote, local, **more)
        Path(local).write_bytes(b"1")

    with monkeypatch.context() as patched:
        patched.setattr(MemoryFileSystem, "get_file", break_down)
        said = r"^memory://folder \(102 bytes\) cannot be fetched: .*(is gone|has 100 bytes, but 1 arrived)"
        refuses(RuntimeError, said, cached_path, "memory://folder")
    assert [*(cache / "remote").iterdir()] == []
    assert (cached_path("memory://folder") / "b").read_bytes() == b"22"


def test_what_cannot_be_read_is_said_in_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    refuses(ImportError, "^gs://bucket/x cannot be read: .*install gcsfs", cached_path, "gs://bucket/x")
    refuses(RuntimeError, "^nope://x cannot be read: Protocol not known: nope", cached_path, "nope://x")
    refuses(FileNotFoundError, "^memory://nowhere does not exist", load_folder, "memory://nowhere")
    fsspec.filesystem("memory").pipe("/folder/../../stolen", b"1")
    refuses(RuntimeError, r"a file contains '\.\.'", cached_path, "memory://folder")


WRITERS = {
    "save_folder": lambda url: save_folder(make_graph(), url),
    "FeatureTable.save": lambda url: FeatureTable(torch.ones(2, 1)).save(url),
    "partition_graph": lambda url: partition_graph(make_graph(), url, 2, "random"),
    "convert_tables": lambda url: convert_tables("edges.csv", url),
    "convert_tables source": lambda url: convert_tables(url, "out"),
    "FullInference": lambda url: layer_outputs(FullInference(folder=url).folder, False).__enter__(),
    "planetoid": lambda url: registry.planetoid(url),
    "mag240m": lambda url: registry.mag240m(url),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_local_folders_are_no_urls(writer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for url in ("s3://bucket/x", Path("s3://bucket/x")):
        refuses(ValueError, "^s3://bucket/x is a URL, but must be a local path", WRITERS[writer], url)
    assert [*tmp_path.iterdir()] == []
    assert local_path("file:///a/b") == local_path(Path("file:///a/b")) == Path("/a/b")


@pytest.mark.medium
def test_graphs_and_features_at_urls(tmp_path):
    plain, typed = make_graph(), make_typed_graph()
    url = put(save_folder(plain, tmp_path / "graph"), "memory://graph")
    expected = next(iter(NeighborDataModule(plain, **OPTIONS).train_dataloader()))
    for where in (url, f"file://{tmp_path}/graph"):
        found = next(iter(NeighborDataModule(load_folder(where), **OPTIONS).train_dataloader()))
        assert torch.equal(found.x, expected.x)
    file = f"{url}/x.npy"
    disk = NeighborDataModule(load_folder(url), **OPTIONS, memory="10MB", store=file)
    assert torch.equal(next(iter(disk.train_dataloader())).x, expected.x)
    assert torch.equal(DiskFeatures(file, "3MB").gather(torch.arange(3)), plain.x[:3])
    assert torch.equal(FeatureTable.load(file).values, plain.x)
    assert torch.equal(CSCGraph.load(url).indptr, CSCGraph.from_data(plain).indptr)
    hetero = load_hetero_folder(put(save_hetero_folder(typed, tmp_path / "typed"), "memory://typed"))
    assert hetero.node_types == typed.node_types


def test_a_rank_fetches_its_own_part(tmp_path, cache):
    partition_graph(make_graph(), tmp_path / "parts", 3, "random")
    module = PartitionedDataModule(put(tmp_path / "parts", "memory://parts"), **OPTIONS)
    assert len(entries(cache)) == 1  # common
    assert np.array_equal(module.partition.open(1).ids[0], PartitionedDataModule(
        f"file://{tmp_path}/parts", **OPTIONS).partition.open(1).ids[0])  # fmt: skip
    assert len(entries(cache)) == 2
    fsspec.filesystem("memory").pipe("/parts/part-00002/node0.ids.npy", b"other")
    refuses(ValueError, "part-00002 is damaged", module.partition.open, 2)
    refuses(FileNotFoundError, "^memory://none/common does not exist", PartitionedDataModule, "memory://none", [2])


@pytest.mark.slow
def test_the_command_reads_urls(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sampled = [item for item in NODE if not item.startswith("data.")]
    save_folder(make_graph(), tmp_path / "graph")
    where = [f"data.root={put('graph', 'memory://graph')}", "callbacks.best.dirpath=memory://kept"]
    where += [f"callbacks.last.dirpath=file://{tmp_path}/kept"]
    assert lgnn(tmp_path / "run", "data=custom", *where, base=sampled) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "graph", "kept", "run"]
    shutil.rmtree("graph")
    for url in (f"file://{tmp_path}/kept/last.ckpt", "memory://kept/best.ckpt"):
        assert lgnn(tmp_path / "test", "mode=test", f"ckpt_path={url}", base=[]) == 0
    assert metrics_of(tmp_path / "test")["test_acc"] == metrics_of(tmp_path / "run")["test_acc"]
    capfd.readouterr()
    assert lgnn(tmp_path / "run", "hydra.run.dir=s3://bucket/run", base=sampled) == 2
    assert "hydra.run.dir=s3://bucket/run must be a local path; " in capfd.readouterr().err
    assert lgnn(tmp_path / "run", "data=planetoid", "data.root=s3://bucket/x", base=[]) == 2
    assert (
        capfd.readouterr().err == "error: data: s3://bucket/x is a URL, but must be a local path: copy the files here\n"
    )


@pytest.mark.slow
def test_parts_on_s3(tmp_path, monkeypatch):
    server = pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    running = server.ThreadedMotoServer(port=0, verbose=False)
    running.start()
    try:
        host, port = running.get_host_and_port()
        for name, value in {
            "ENDPOINT_URL": f"http://{host}:{port}",
            "ACCESS_KEY_ID": "a",
            "SECRET_ACCESS_KEY": "b",
        }.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        refuses(
            (RuntimeError, FileNotFoundError), "^s3://bucket/parts/common ", PartitionedDataModule, "s3://bucket/parts"
        )
        fsspec.filesystem("s3").mkdir("bucket")
        partition_graph(make_graph(), tmp_path / "parts", 2, "random")
        where = [f"datamodule.root={put(tmp_path / 'parts', 's3://bucket/parts')}", "datamodule=partitioned"]
        assert lgnn(tmp_path / "run", *where, base=[item for item in NODE if not item.startswith("data.")]) == 0
    finally:
        running.stop()
        fsspec.filesystem("s3").clear_instance_cache()
