"""CPU and GPU prepare mini-batches together: the same training as on the CPU alone, planned by itself.

python examples/collective.py
python examples/collective.py --gpu-route cpu

Without a GPU the CPU prepares all mini-batches, and says so; ``--gpu-route cpu`` lets it play the GPU's part, which
shows how the schedule works, not how fast it is.
"""

import argparse

import pytorch_lightning as pl

from lightning_gnn import CollectiveDataModule, NeighborDataModule
from lightning_gnn.callbacks import Throughput
from lightning_gnn.datasets.synthetic import planted_power_law
from lightning_gnn.nn import GraphSAGE, NodeClassifier


def train(datamodule: pl.LightningDataModule, sizes: tuple[int, int], epochs: int) -> str:
    """Train and return what came of it."""
    pl.seed_everything(1, verbose=False)
    module = NodeClassifier(GraphSAGE(sizes[0], 64, num_layers=2, out_channels=sizes[1], dropout=0.3), sizes[1])
    throughput = Throughput()
    trainer = pl.Trainer(
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        callbacks=[throughput],
    )
    trainer.fit(module, datamodule)
    accuracy = trainer.test(module, datamodule, verbose=False)[0]["test_acc"]
    return f"{throughput.epochs[-1].epoch_time_s:.2f} s for the last epoch, test accuracy {accuracy:.4f}"


def main() -> None:
    """Train twice, and show the plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-nodes", type=int, default=50_000)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--gpu-route", choices=["auto", "cpu"], default="auto", help="who prepares the GPU's part")
    parser.add_argument("--gpu-buffer-size", type=int, default=4, help="mini-batches that the GPU holds ready")
    args = parser.parse_args()

    data = planted_power_law(args.num_nodes, 20 * args.num_nodes)
    kwargs = {"num_neighbors": [15, 10], "batch_size": args.batch_size, "num_workers": 1, "seed": 1}
    sizes = data.num_features, int(data.y.max()) + 1
    print("CPU alone:", train(NeighborDataModule(data, **kwargs), sizes, args.epochs))
    collective = CollectiveDataModule(
        data, **kwargs, gpu_route=args.gpu_route, gpu_buffer_size=args.gpu_buffer_size, profile_batches=8
    )
    print("together:", train(collective, sizes, args.epochs))
    print(collective.plan)


if __name__ == "__main__":
    main()
