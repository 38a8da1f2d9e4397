"""Mini-batches born on the GPU: the same training, with the CPU's sampler and with the GPU's.

On a machine without a GPU both run on the CPU, and the second is named so; the mini-batches are the same in any case.

    python examples/gpu_sampling.py
    python examples/gpu_sampling.py --num-nodes 1000000 --features pinned --cache-bytes 50MB
"""

import argparse
import time

import pytorch_lightning as pl
import torch

from lightning_gnn import NeighborDataModule, PersistentSamplerDataModule
from lightning_gnn.datasets.synthetic import planted_power_law
from lightning_gnn.nn import GraphSAGE, NodeClassifier


def train(datamodule: pl.LightningDataModule, num_features: int, num_classes: int, epochs: int) -> tuple[float, float]:
    """Train and return (seconds, test accuracy)."""
    pl.seed_everything(1, verbose=False)
    model = NodeClassifier(GraphSAGE(num_features, 64, num_layers=2, out_channels=num_classes), num_classes)
    trainer = pl.Trainer(max_epochs=epochs, logger=False, enable_checkpointing=False, enable_model_summary=False)
    start = time.perf_counter()
    trainer.fit(model, datamodule)
    seconds = time.perf_counter() - start
    return seconds, trainer.test(model, datamodule, verbose=False)[0]["test_acc"]


def main() -> None:
    """Train twice and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-nodes", type=int, default=20_000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--features", choices=["auto", "device", "pinned"], default="auto")
    parser.add_argument("--cache-bytes", default="0", help="memory for hot rows of pinned features: 4GB, or auto")
    args = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    data = planted_power_law(args.num_nodes, 20 * args.num_nodes)
    sizes = {"num_neighbors": [15, 10], "batch_size": 1024, "num_workers": 1, "seed": 1}
    contestants = {
        "CPU sampler": NeighborDataModule(data, **sizes),
        "GPU sampler" if on_gpu else "GPU sampler's stand-in on the CPU": PersistentSamplerDataModule(
            data, **sizes, features=args.features, cache_bytes=args.cache_bytes
        ),
    }
    for name, datamodule in contestants.items():
        seconds, accuracy = train(datamodule, data.num_features, int(data.y.max()) + 1, args.epochs)
        print(f"{name}: {seconds:.1f} s, test accuracy {accuracy:.3f}")
    if not on_gpu:
        print("There is no GPU here: these times compare the CPU with itself.")


if __name__ == "__main__":
    main()
