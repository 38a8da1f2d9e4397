"""Published accuracies on Cora and CiteSeer (public split), trained on the compressed graph."""

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch_geometric.transforms as T
from torch_geometric.data import Data
from torch_geometric.datasets import Planetoid

from lightning_gnn.full_graph.datamodule import FullGraphDataModule
from lightning_gnn.nn import GAT, GCN, GraphSAGE, NodeClassifier
from tests.nn.quiet import trainer

RAW = Path(__file__).parents[2].parent / "shared" / "data" / "planetoid"

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not RAW.is_dir(), reason=f"no Planetoid files at {RAW}")]

# The GCN paper reports 81.5 and 70.3 %, the GAT paper 83.0 and 72.5 % after more epochs. Here, training uses few
# epochs and no input dropout, to save time. Single GAT runs on Cora range from 80 to 83 %; 64 runs on CiteSeer, half
# of them on edge_index and half on the compressed graph, had the mean 70.5 and the deviation 1.5 %.
GAT_OF_THE_PAPER = partial(GAT, hidden_channels=64, heads=8, output_heads=1, dropout=0.6, act="elu")
SETTINGS = {  # model, lr, weight decay, epochs, seeds, minimum mean accuracy
    ("GCN", "Cora"): (partial(GCN, hidden_channels=64, dropout=0.5), 0.01, 5e-4, 50, 5, 0.805),
    ("GCN", "CiteSeer"): (partial(GCN, hidden_channels=64, dropout=0.5), 0.01, 5e-4, 60, 5, 0.69),
    ("GraphSAGE", "Cora"): (partial(GraphSAGE, hidden_channels=64, dropout=0.5), 0.01, 5e-4, 40, 3, 0.785),
    ("GraphSAGE", "CiteSeer"): (partial(GraphSAGE, hidden_channels=64, dropout=0.5), 0.01, 5e-4, 25, 3, 0.675),
    ("GAT", "Cora"): (GAT_OF_THE_PAPER, 0.005, 5e-4, 150, 5, 0.81),
    ("GAT", "CiteSeer"): (GAT_OF_THE_PAPER, 0.01, 2e-3, 60, 5, 0.69),
}


@cache
def load_planetoid(name: str, root: Path) -> Data:
    (root / name).mkdir()
    (root / name / "raw").symlink_to(RAW / name / "raw")
    data: Data = Planetoid(str(root), name, transform=T.NormalizeFeatures())[0]
    return data


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("planetoid")


@pytest.mark.slow
@pytest.mark.parametrize(("model", "dataset"), SETTINGS)
def test_mean_test_accuracy(model: str, dataset: str, root: Path, record_property: Any) -> None:
    build, lr, weight_decay, epochs, seeds, expected = SETTINGS[model, dataset]
    data = load_planetoid(dataset, root)
    num_classes = int(data.y.max()) + 1
    datamodule = FullGraphDataModule(data)
    accuracies = []
    for seed in range(seeds):
        pl.seed_everything(seed, verbose=False)
        net = build(data.num_features, num_layers=2, out_channels=num_classes)
        module = NodeClassifier(net, num_classes, lr=lr, weight_decay=weight_decay)
        run = trainer(max_epochs=epochs, limit_val_batches=0)
        run.fit(module, datamodule)
        accuracies.append(run.test(module, datamodule, verbose=False)[0]["test_acc"])
    mean = sum(accuracies) / seeds
    record_property("mean_test_accuracy", mean)
    print(f"{model} on {dataset}: {mean:.4f}, {accuracies}")
    assert mean >= expected
