"""Train on the CPU and the accelerators of a machine together; see how they share the work out.

python examples/hybrid.py
python examples/hybrid.py --cpu-share 0.1 --epochs 5
python examples/hybrid.py --static --prefetch 0

Without an accelerator the CPU stands for one, so that there are two trainers. That shows how it works, not how fast.
Each trainer is a process, which runs this script again; only the first one speaks.
"""

import argparse

import pytorch_lightning as pl
import torch

from lightning_gnn import HyScaleStrategy, NeighborDataModule
from lightning_gnn.callbacks import Throughput
from lightning_gnn.datasets.synthetic import planted_power_law
from lightning_gnn.nn import GraphSAGE, NodeClassifier


def main() -> None:
    """Train, then say who did what and how fast it went."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-nodes", type=int, default=50_000)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=256, help="seeds of an iteration, all trainers together")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--cpu-trainers", type=int, default=1)
    parser.add_argument("--cpu-share", type=float, help="the CPU's part to begin with; by default what is measured")
    parser.add_argument("--prefetch", type=int, choices=(0, 1, 2), default=2)
    parser.add_argument("--static", action="store_true", help="leave the shares as they are at the start")
    args = parser.parse_args()

    pl.seed_everything(1, verbose=False)
    data = planted_power_law(args.num_nodes, 20 * args.num_nodes)
    datamodule = NeighborDataModule(data, num_neighbors=[15, 10], batch_size=args.batch_size, num_workers=2)
    num_classes = int(data.y.max()) + 1
    module = NodeClassifier(GraphSAGE(data.num_features, args.hidden, 2, num_classes, dropout=0.3), num_classes)
    strategy = HyScaleStrategy(
        cpu_trainers=args.cpu_trainers,
        cpu_share="auto" if args.cpu_share is None else args.cpu_share,
        drm=not args.static,
        prefetch=args.prefetch,
        devices=None if torch.accelerator.is_available() else ["cpu"],
    )
    trainer = pl.Trainer(
        strategy=strategy,  # strategy="hyscale" for the defaults
        max_epochs=args.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        callbacks=[throughput := Throughput()],
    )
    trainer.fit(module, datamodule)
    accuracy = trainer.test(module, datamodule, verbose=False)[0]["test_acc"]
    if not trainer.is_global_zero:
        return

    print("trainers:", ", ".join(strategy.trainers.names))
    manager = strategy.balance.manager
    for decision in manager.log if manager is not None else ():
        print(decision)
    history = [times for times, _ in strategy.balance.history]
    length = len(history) // args.epochs
    for epoch in range(args.epochs):
        times = history[epoch * length : (epoch + 1) * length]
        total = sum(sum(one.seeds) for one in times)
        shares = [sum(one.seeds[trainer] for one in times) / total for trainer in range(len(times[0].seeds))]
        done = throughput.epochs[epoch]
        print(
            f"epoch {epoch}: shares {' / '.join(f'{share:.0%}' for share in shares)}, "
            f"{1e3 * done.epoch_time_s / done.batches:.1f} ms per iteration, {done.mteps:.2f} MTEPS"
        )
    print(f"test accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
