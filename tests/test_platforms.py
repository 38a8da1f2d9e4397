"""Importing the package and training on a CPU need neither Triton nor Linux-specific functions."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CODE = """
import mmap, os, pkgutil, platform, signal, sys, warnings

# First what others need: they know their platforms.
import cloudpickle, filelock, hydra, matplotlib.figure, numba, omegaconf, platformdirs, psutil, pytorch_lightning as pl
import rich.progress, rich.table, scipy.sparse, torch, torch.distributed, torch.utils.data, torchmetrics, yaml
import torch_geometric.datasets, torch_geometric.loader, torch_geometric.nn
import pytorch_lightning.strategies.launchers.multiprocessing, torch.multiprocessing

ABSENT = {
    os: ["fork", "geteuid", "getuid", "getpgid", "killpg", "memfd_create", "posix_fallocate", "pwrite", "pread",
         "register_at_fork", "sched_getaffinity", "sched_setaffinity", "setsid", "statvfs", "sysconf", "uname"],
    mmap: ["MAP_PRIVATE", "MAP_SHARED", "MAP_ANONYMOUS", "MAP_NORESERVE", "PROT_READ", "PROT_WRITE"],
    signal: ["SIGPIPE", "SIGALRM", "SIGHUP", "pthread_sigmask", "setitimer"],
}
for module, names in ABSENT.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
for name in ("fcntl", "grp", "pwd", "resource", "termios", "triton"):
    sys.modules[name] = None
platform.system = lambda: "Elsewhere"

import lightning_gnn
import lightning_gnn.ascend_ops
packages = (lightning_gnn, lightning_gnn.ascend_ops)
MODULES = [found.name for one in packages for found in pkgutil.walk_packages(one.__path__, one.__name__ + ".")]
# Imported only with what they need: Triton, or Ray.
optional = ("lightning_gnn.triton_kernels.", "lightning_gnn.ops.sample.compile_ahead", "lightning_gnn.ray")
for module in MODULES:
    if not module.startswith(optional) and not module.endswith("__main__"):
        __import__(module)

from lightning_gnn.callbacks import Throughput
from lightning_gnn.datasets.synthetic import planted_power_law
from lightning_gnn.nn import GraphSAGE, NodeClassifier

warnings.simplefilter("ignore")
data = planted_power_law(400, 4000, num_classes=4, num_features=8, split=(0.5, 0.2, 0.2))
sizes = {"num_neighbors": [4, 4], "batch_size": 50, "num_workers": 2, "seed": 1}
runs = {
    "neighbor": (lightning_gnn.NeighborDataModule(data, **sizes), "auto"),
    "exact": (lightning_gnn.NeighborDataModule(data, **sizes, inference="full"), "auto"),
    "persistent": (lightning_gnn.PersistentSamplerDataModule(data, **sizes), "auto"),
    "collective": (lightning_gnn.CollectiveDataModule(data, **sizes, gpu_route="cpu", profile_batches=1), "auto"),
    "hyscale": (lightning_gnn.NeighborDataModule(data, **sizes), "hyscale"),
    "full": (lightning_gnn.FullGraphDataModule(data), "ascend_hybrid"),
}
weights = {}
for name, (datamodule, strategy) in runs.items():
    pl.seed_everything(1, verbose=False)
    module = NodeClassifier(GraphSAGE(8, 16, num_layers=2, out_channels=4), 4)
    trainer = pl.Trainer(
        accelerator="cpu", strategy=strategy, max_epochs=2, callbacks=[Throughput()],
        logger=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(module, datamodule)
    trainer.test(module, datamodule, verbose=False)
    weights[name] = [parameter.detach().clone() for parameter in module.parameters()]
for name in ("exact", "persistent", "collective", "hyscale"):
    assert all(map(torch.equal, weights[name], weights["neighbor"])), name
assert not any(map(torch.equal, weights["full"], weights["neighbor"]))
print("done")
"""


@pytest.mark.slow
def test_a_cpu_trains_where_there_is_neither_triton_nor_what_linux_alone_has(tmp_path):
    caches = {"LIGHTNING_GNN_CACHE": str(tmp_path / "cache"), "MPLCONFIGDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CODE],
        env={**os.environ, "PYTHONPATH": str(ROOT), **caches},
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.strip().splitlines()[-1:] == ["done"], done.stderr
