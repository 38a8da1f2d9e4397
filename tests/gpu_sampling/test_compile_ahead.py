"""All sampling kernels of a run are compiled before it begins; ``lgnn warmup --arch`` compiles them in advance."""

import os
import subprocess
import sys

import pytest

from lightning_gnn.cli.commands import warmup
from tests.cli.command import ROOT
from tests.patience import PATIENCE

pytest.importorskip("triton", reason="Triton exists on Linux only")

EPOCHS = """
import torch, triton
from torch_geometric.data import Data
from lightning_gnn import PersistentSamplerDataModule
from lightning_gnn.gpu_sampling import sampler
from lightning_gnn.ops.sample import compile_ahead
from lightning_gnn.runtime.kernels import num_compiled, say_when_compiling
from lightning_gnn.triton_kernels.sample import TritonNeighborSampler

def fetch(sampler, words):
    copy = compile_ahead._AbsentSampler.fetch(sampler, words)
    copy.words[copy.words > 0] = 64
    return copy

triton.runtime.driver.set_active(compile_ahead._AbsentGPU(90))
sampler.runs_triton = lambda device: True
torch.empty, TritonNeighborSampler.fetch = torch.zeros, fetch  # no launch writes: all nodes are node 0
TritonNeighborSampler.fit_grid = lambda *launch: 1
say_when_compiling()
data = Data(x=torch.eye(40), edge_index=torch.arange(160).view(2, 80) % 40)
seeds = dict(input_train_nodes=torch.arange(28), input_val_nodes=torch.arange(12))
datamodule = PersistentSamplerDataModule(
    data, num_neighbors=[3, 2], batch_size=4, bulk=3, device="cpu", eval_loader_kwargs={"num_neighbors": [8]}, **seeds
)
before = num_compiled()  # on the CPU
loaders = datamodule.train_dataloader(), datamodule.val_dataloader()
ahead = num_compiled()
batches = [batch.num_nodes for loader in loaders for batch in loader]
print(batches, ahead - before >= 6, num_compiled() - ahead)
"""
COMMAND = "import sys; from lightning_gnn.cli.commands.warmup import main; sys.exit(main(sys.argv[1:]))"


def run(tmp_path, *arguments):
    """Run code in a process without the interpreter, with a cache below ``tmp_path``; return its last line."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE, check=False,
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path / "triton"), "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_training_and_validation_compile_nothing_more(tmp_path):
    # Two kernels of hops for training, two for validation, and two that copy the samples.
    # A bulk of the sizes that the driver makes up has no nodes; the last mini-batch of the epoch is alone.
    assert run(tmp_path, EPOCHS) == f"{[0] * 6 + [64] + [0] * 3} True 0"


@pytest.mark.slow
def test_the_command_compiles_for_a_gpu_that_is_not_there(tmp_path):
    command = (COMMAND, "--arch", "80", "datamodule.num_neighbors=[4]")
    assert run(tmp_path, *command).startswith("4 kernels compiled in ")
    assert run(tmp_path, *command).startswith("0 kernels compiled in ")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [(["datamodule=full"], "no fanouts"), (["datamodule.num_neighbors=[4]"], "TRITON_INTERPRET is set")],
)
def test_what_cannot_be_compiled_is_said_in_one_line(overrides, message, monkeypatch, capfd):
    monkeypatch.setattr("triton.knobs.runtime.interpret", True)
    assert warmup.main(["--arch", "90", *overrides]) == 2
    assert message in capfd.readouterr().err
