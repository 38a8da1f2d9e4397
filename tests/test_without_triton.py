"""Without Triton, as with a CPU build of torch, all works on a CPU; what needs a GPU says how to get Triton."""

import subprocess
import sys

import pytest

CODE = """
import sys, warnings
sys.modules["triton"] = None
import torch
import lightning_gnn
from tests.test_layers import MODULES
for module in MODULES:
    if not module.startswith("lightning_gnn.triton_kernels.") and not module.endswith("__main__"):
        __import__(module)
assert not any(name.startswith("triton.") for name in sys.modules)

from torch_geometric.data import Data
from lightning_gnn import PersistentNeighborSampler, PersistentSamplerDataModule, ops
from lightning_gnn.graph import CompressedGraph, CSCGraph
from lightning_gnn.ops.library import triton_installed

assert not triton_installed()
edge_index = torch.tensor([[1, 2, 0], [0, 1, 2]])
data = Data(x=torch.arange(6.0).view(3, 2), y=torch.zeros(3), edge_index=edge_index, num_nodes=3)
graph = CSCGraph.from_edge_index(edge_index, 3)
wanted = ops.sample_neighbors(graph, torch.tensor([0]), [1, 1], 1, backend="reference")
sample = ops.sample_neighbors(graph, torch.tensor([0]), [1, 1], 1)
assert torch.equal(sample.node, wanted.node) and torch.equal(sample.edge_index, wanted.edge_index)
out = torch.empty(2, 2)
ops.gather_rows(data.x, torch.tensor([2, 0]), out)
assert out.tolist() == [[4, 5], [0, 1]]
summed = ops.aggregate(CompressedGraph.from_edge_index(edge_index, 3), data.x.view(3, 1, 2))
assert summed.flatten().tolist() == [2, 3, 4, 5, 0, 1]


def refused(call):
    try:
        call()
    except ValueError as error:
        return str(error)
    raise AssertionError("not refused")


assert "lightning-gnn[gpu]" in refused(lambda: ops.sample_neighbors(graph, torch.tensor([0]), [1], backend="triton"))
# Without a GPU: the same mini-batches on the CPU, with one line that says so, as with Triton.
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    sampler = PersistentNeighborSampler(data, [1, 1], seed=1)
    module = PersistentSamplerDataModule(data, torch.tensor([0, 1]), num_neighbors=[1, 1], batch_size=1)
    nodes = [batch.n_id.numel() for batch in module.train_dataloader()]
assert sampler.device is None and nodes == [3, 3]
assert sum("No GPU for the persistent sampler" in str(warning.message) for warning in caught) == 2
# With one: nobody samples on the CPU without having been told.
torch.cuda.is_available, torch.cuda.current_device = lambda: True, lambda: 0
for call in (
    lambda: PersistentNeighborSampler(data, [1, 1]),
    lambda: PersistentNeighborSampler(data, [1, 1], device="cuda:0"),
    lambda: PersistentSamplerDataModule(data, torch.tensor([0]), num_neighbors=[1], batch_size=1).train_dataloader(),
):
    message = refused(call)
    assert message.startswith("sampling on cuda:0 needs") and "pip install 'lightning-gnn[gpu]'" in message
print("done")
"""


@pytest.mark.slow
def test_all_but_gpu_kernels_works_without_triton():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", CODE], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "done", done.stderr
