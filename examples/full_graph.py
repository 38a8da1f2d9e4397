"""Train on the whole graph, also in several processes that share the columns out.

python examples/full_graph.py
python examples/full_graph.py --model gat --devices 2
python examples/full_graph.py --accelerator npu --devices 8
"""

import argparse

import pytorch_lightning as pl

from lightning_gnn import FullGraphDataModule
from lightning_gnn.callbacks import Throughput
from lightning_gnn.datasets.synthetic import planted_power_law
from lightning_gnn.nn import GAT, GCN, GraphSAGE, NodeClassifier

MODELS = {"gcn": GCN, "sage": GraphSAGE, "gat": GAT}


def main() -> None:
    """Train, then say how fast it went."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="gcn")
    parser.add_argument("--num-nodes", type=int, default=20_000)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--devices", type=int, default=1, help="processes; each takes a slice of the columns")
    args = parser.parse_args()

    pl.seed_everything(1, verbose=False)
    data = planted_power_law(args.num_nodes, 20 * args.num_nodes)
    datamodule = FullGraphDataModule(data)
    num_classes = int(data.y.max()) + 1
    model = MODELS[args.model](data.num_features, args.hidden, num_layers=2, out_channels=num_classes, dropout=0.5)
    trainer = pl.Trainer(
        accelerator=args.accelerator,
        devices=args.devices,
        strategy="ascend_hybrid",
        max_epochs=args.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=[throughput := Throughput()],
    )
    module = NodeClassifier(model, num_classes)
    trainer.fit(module, datamodule)
    accuracy = trainer.test(module, datamodule, verbose=False)[0]["test_acc"]
    if trainer.is_global_zero:
        print(f"{args.model}: {throughput.summary().epoch_time_s * 1e3:.0f} ms per epoch, test accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
