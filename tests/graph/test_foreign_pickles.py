"""Foreign files that are pickles: their code is not run unless the user allows it."""

import ast
import os
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.datasets import Planetoid

import lightning_gnn
from lightning_gnn.datasets.registry import flickr, ogbn, reddit
from tests.graph.published import (
    PICKLED,
    FakeOGB,
    assert_same,
    cora,
    install_ogb,
    write_cora,
    write_flickr,
    write_reddit,
)
from tests.refusals import refuses


class Evil:
    """Creates a folder when unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return exec, (f"import os; os.mkdir({str(self.marker)!r})",)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def marker(tmp_path):
    return tmp_path / "code was run"


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_raw_planetoid_files_are_read_as_pyg_reads_them(tmp_path, protocol):
    write_cora(tmp_path, protocol)
    ours = cora(tmp_path, normalize_features=False)
    shutil.rmtree(tmp_path / "Cora" / "processed")
    assert_same(ours, Planetoid(str(tmp_path), "Cora")[0])


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("suffix", PICKLED)
def test_a_raw_planetoid_file_runs_no_code(tmp_path, marker, suffix, trust):
    write_cora(tmp_path, **{suffix: Evil(marker)})
    with pytest.raises(ValueError, match=rf"again: .*/Cora \(.*ind\.cora\.{suffix}: .*asks for \w+\.exec, which a fi"):
        cora(tmp_path, trust=trust)
    assert not marker.exists()


@pytest.mark.medium
@pytest.mark.parametrize("suffix", [*PICKLED, "test.index"])
def test_a_damaged_raw_file_is_an_error_or_leaves_a_graph_that_is_valid(tmp_path, suffix):
    write_cora(tmp_path)
    path = tmp_path / "Cora" / "raw" / f"ind.cora.{suffix}"
    whole, rng, refused = path.read_bytes(), np.random.default_rng(len(suffix)), []
    for case in range(24):
        damaged = bytearray(whole)
        for at in rng.integers(0, min(300, len(whole)) if case % 2 else len(whole), size=1 + case % 4):
            damaged[at] = rng.integers(256)
        path.write_bytes(damaged if case % 3 else damaged[: rng.integers(len(whole))])
        shutil.rmtree(tmp_path / "Cora" / "processed", ignore_errors=True)
        try:
            assert cora(tmp_path).validate()
        except ValueError as error:
            refused.append(str(error))
    assert len(refused) >= 8
    assert all(message.startswith(f"delete and load again: {tmp_path / 'Cora'} (") for message in refused)


@pytest.mark.parametrize(
    ("write", "load", "folder", "file"),
    [
        (write_cora, cora, "Cora", "data.pt"),
        (write_cora, cora, "Cora", "pre_transform.pt"),
        (write_reddit, reddit, ".", "data.pt"),
        (write_flickr, flickr, ".", "pre_filter.pt"),
    ],
)
def test_a_processed_file_runs_no_code_unless_it_is_trusted(tmp_path, marker, write, load, folder, file):
    write(tmp_path)
    data = Data(x=torch.eye(3), edge_index=torch.tensor([[0], [1]]), y=torch.arange(3))
    processed = tmp_path / folder / "processed"
    processed.mkdir()
    torch.save((data.to_dict(), None, Data), processed / "data.pt")
    safe = load(tmp_path)
    assert safe.num_nodes == 3
    evil = Evil(marker)
    torch.save(({**data.to_dict(), "more": evil}, None, Data) if file == "data.pt" else evil, processed / file)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match=r"again: .* \(a file holds more than .*exec.*trust=True") as caught:
            load(tmp_path)
    assert "data.trust=true" in str(caught.value)
    assert caught.value.__suppress_context__
    assert not marker.exists()
    assert not os.environ.keys() & {"TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(load(tmp_path, trust=True).x, safe.x)
    assert marker.is_dir()


def test_torchs_own_switch_opens_nothing(tmp_path, marker, monkeypatch):
    write_cora(tmp_path)
    cora(tmp_path)
    path = tmp_path / "Cora" / "processed" / "data.pt"
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # a user's own setting does not allow foreign files
    torch.save(Evil(marker), path)
    refuses(ValueError, "trust=True", cora, tmp_path)
    assert not marker.exists()
    assert os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] == "1"


@pytest.mark.parametrize("asks", [{}, {"weights_only": False}], ids=["for the default", "for anything"])
@pytest.mark.parametrize("file", ["processed/geometric_data_processed.pt", "split/time/split_dict.pt"])
def test_ogbs_files_run_no_code_unless_they_are_trusted(tmp_path, marker, monkeypatch, asks, file):
    install_ogb(monkeypatch)
    monkeypatch.setattr(FakeOGB, "asks", asks)
    first = ogbn(tmp_path, "ogbn-arxiv")
    path = tmp_path / "ogbn_arxiv" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    if file.startswith("split"):
        stored = {name: torch.tensor([0]) for name in ("train", "valid", "test")} | {"more": Evil(marker)}
    else:
        stored = (*torch.load(path, weights_only=False), Evil(marker))
    torch.save(stored, path)
    refuses(ValueError, r"arxiv \(a file holds more than tensors .*exec.*trust=True", ogbn, tmp_path, "ogbn-arxiv")
    assert not marker.exists()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(ogbn(tmp_path, "ogbn-arxiv", trust=True).x, first.x)
    assert marker.is_dir()


@pytest.mark.slow
def test_nothing_of_ours_unpickles_anything():
    root = Path(lightning_gnn.__file__).parent
    found = set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "pickle.load", "pickle.loads"):
                safe = any(word.arg == "weights_only" and ast.unparse(word.value) == "True" for word in node.keywords)
                found.add((path.name, safe))
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                assert ast.unparse(node.value) == "False", path
    # Objects that a notebook sends to its ranks are not foreign.
    assert {name for name, safe in found if not safe} == {"notebook_launcher.py"}
