"""Small files in the layouts of published datasets, and stand-ins for the packages that read them."""

import gzip
import json
import pickle
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType

import numpy as np
import scipy.sparse
import torch
from torch_geometric.data import Data, InMemoryDataset

from lightning_gnn.datasets.registry import planetoid

SHARED = Path(__file__).parents[3] / "shared" / "data" / "planetoid"
PICKLED = ("x", "tx", "allx", "y", "ty", "ally", "graph")
N, KNOWN, TRAIN = 620, 580, 20


def assert_same(a, b):
    assert set(a.keys()) == set(b.keys())
    for key in a.keys():  # noqa: SIM118 (iterating over Data gives pairs)
        assert a[key].dtype == b[key].dtype, key
        assert torch.equal(a[key], b[key]), key


def cora(root, **options):
    return planetoid(root, "Cora", **options)


def make_planetoid_parts():
    rng = np.random.default_rng(0)
    x = scipy.sparse.csr_matrix((rng.random((N, 8)) < 0.3).astype(np.float32))
    y = np.eye(3, dtype=np.int32)[rng.integers(3, size=N)]
    graph = defaultdict(list, {v: rng.integers(N, size=3).tolist() for v in range(N)})
    parts = {"x": x[:TRAIN], "tx": x[KNOWN:], "allx": x[:KNOWN], "graph": graph}
    return parts | {"y": y[:TRAIN], "ty": y[KNOWN:], "ally": y[:KNOWN]}


def write_cora(root, protocol=2, **changes):
    raw = root / "Cora" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for suffix, part in {**make_planetoid_parts(), **changes}.items():
        (raw / f"ind.cora.{suffix}").write_bytes(pickle.dumps(part, protocol))
    order = np.random.default_rng(1).permutation(np.arange(KNOWN, N))
    np.savetxt(raw / "ind.cora.test.index", order, fmt="%d")


def write_reddit(root):
    (root / "raw").mkdir(parents=True)
    types = np.array([1, 1, 2, 3, 1, 3])
    np.savez(root / "raw" / "reddit_data.npz", feature=np.eye(6), label=np.arange(6) % 3, node_types=types)
    adj = scipy.sparse.coo_matrix((np.ones(4), ([0, 1, 2, 5], [1, 0, 3, 2])), (6, 6))
    scipy.sparse.save_npz(root / "raw" / "reddit_graph.npz", adj)


def write_flickr(root, labels=(0, 1, 0, 1)):
    raw = root / "raw"
    raw.mkdir(parents=True)
    adj = scipy.sparse.csr_matrix((np.ones(3), ([0, 1, 2], [1, 0, 3])), (4, 4))
    np.savez(raw / "adj_full.npz", data=adj.data, indices=adj.indices, indptr=adj.indptr, shape=adj.shape)
    np.save(raw / "feats.npy", np.eye(4))
    (raw / "class_map.json").write_text(json.dumps({str(i): label for i, label in enumerate(labels)}))
    (raw / "role.json").write_text(json.dumps({"tr": [0, 1], "va": [2], "te": [3]}))


class FakeOGB(InMemoryDataset):
    """Loads its files like ogb 1.3.6, in a way that torch 2.6 and later reject by default."""

    fails = None
    asks = {}  # noqa: RUF012
    """Options of ``torch.load``: other ogb versions may pass other options."""
    raw_file_names = ("edge.csv.gz", "node-feat.csv.gz")
    processed_file_names = "geometric_data_processed.pt"

    def __init__(self, name, root):
        super().__init__(str(Path(root) / name.replace("-", "_")))
        self.data, self.slices = torch.load(self.processed_paths[0], **self.asks)[:2]

    def download(self):
        if self.fails is not None:
            raise self.fails
        for path in self.raw_paths:
            Path(path).write_bytes(gzip.compress(b"0,1\n" * 100))

    def process(self):
        for path in self.raw_paths:
            gzip.decompress(Path(path).read_bytes())
        data = Data(x=torch.eye(4), edge_index=torch.tensor([[0, 1, 2], [1, 0, 3]]), y=torch.arange(4)[:, None])
        data.node_year, data.num_nodes = torch.zeros(4, 1), 4
        torch.save(self.collate([data]), self.processed_paths[0])

    def get_idx_split(self):
        path = Path(self.root) / "split" / "time" / "split_dict.pt"
        if path.exists():
            return torch.load(path, **self.asks)
        return {"train": torch.tensor([2, 0]), "valid": torch.tensor([1]), "test": torch.tensor([3])}


def install_ogb(monkeypatch):
    """Make ``import ogb`` return :class:`FakeOGB`."""
    module = ModuleType("ogb.nodeproppred")
    module.PygNodePropPredDataset = FakeOGB
    monkeypatch.setitem(sys.modules, "ogb", ModuleType("ogb"))
    monkeypatch.setitem(sys.modules, "ogb.nodeproppred", module)
