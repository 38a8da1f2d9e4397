"""Layers run one by one give the outputs of the model, also where their sources come from elsewhere."""

import pytest
import torch
from torch_geometric.nn.models import GCN as PyGGCN

from lightning_gnn.nn import GAT, GCN, GIN, GraphSAGE, LayerBlock, activate, run_layers
from tests.refusals import refuses

NODES = 60
EDGES = torch.randint(NODES, (2, 400), generator=torch.Generator().manual_seed(0))
X = torch.randn(NODES, 6, generator=torch.Generator().manual_seed(1))
ROW_WISE = {"mode": "node"}
MODELS = {
    "gcn": lambda **more: GCN(6, 8, 3, 4, normalize=False, **more),
    "sage": lambda **more: GraphSAGE(6, 8, 3, 4, **more),
    "maximum": lambda **more: GraphSAGE(6, 8, 2, 4, aggr="max", norm="layer_norm", norm_kwargs=ROW_WISE, **more),
    "gin": lambda **more: GIN(6, 8, 2, 4, **more),
    "gat": lambda **more: GAT(6, 8, 3, 4, heads=2, **more),
}
every_model = pytest.mark.parametrize("name", MODELS)


def make_block(targets):
    """Return the sources of some targets, themselves first, and the edges into them."""
    chosen = EDGES[:, torch.isin(EDGES[1], targets)]
    others = torch.tensor(sorted({*chosen[0].tolist()} - {*targets.tolist()}), dtype=torch.int64)
    sources = torch.cat([targets, others])
    position = torch.empty(NODES, dtype=torch.int64)
    position[sources] = torch.arange(sources.numel())
    return sources, LayerBlock(targets.numel(), position[chosen], torch.ones(chosen.size(1)))


@every_model
@pytest.mark.parametrize("jk", [None, "last"])
@pytest.mark.parametrize("exchanged", [False, True])
def test_blocks_of_all_edges_give_the_outputs_and_gradients_of_the_model(name, jk, exchanged):
    torch.manual_seed(0)
    model = MODELS[name](jk=jk)
    between = (lambda layer, rows: rows) if exchanged else None
    blocks = [LayerBlock(NODES, EDGES, torch.ones(400))] * model.num_layers
    runs = []
    for run in (lambda: model(X, EDGES), lambda: run_layers(model, X, blocks, between)):
        model.zero_grad()
        out = run()
        out.square().sum().backward()
        runs.append([out.detach(), *(parameter.grad.clone() for parameter in model.parameters())])
    torch.testing.assert_close(*runs)


@every_model
def test_a_part_of_the_nodes_with_the_outputs_of_the_others_is_exact(name):
    """The seam for histories: a layer computes some nodes, and reads the others' outputs of the layer before."""
    model = MODELS[name]().eval()
    outputs = []
    whole = run_layers(
        model, X, [LayerBlock(NODES, EDGES, torch.ones(400))] * model.num_layers,
        lambda layer, rows: outputs.append(rows.detach()) or rows,
    )  # fmt: skip
    for targets in torch.randperm(NODES).split(17):
        sources, block = make_block(targets)

        def read(layer, rows, targets=targets, sources=sources):
            torch.testing.assert_close(rows, outputs[layer][targets])
            return torch.cat([rows, outputs[layer][sources[targets.numel() :]]])

        part = run_layers(model, X[sources], [block] * model.num_layers, read)
        torch.testing.assert_close(part, whole[targets])


@every_model
def test_layers_by_hand_are_the_model(name):
    model, x = MODELS[name]().eval(), X
    for layer in range(model.num_layers):
        x, complete = model.apply_layer(layer, x, LayerBlock(NODES, EDGES, torch.ones(400)), fuse=False)
        assert not complete
        x = activate(model, layer, x)
    torch.testing.assert_close(x, model(X, EDGES))


def test_what_has_no_layers_one_by_one_is_refused():
    block = LayerBlock(NODES, EDGES)
    refuses(TypeError, r"the model is torch_geometric\..*\.GCN", run_layers, PyGGCN(6, 8, 2, 4), X, [block] * 2)
    refuses(ValueError, "jk='cat' combines the outputs", run_layers, GCN(6, 8, 2, 4, jk="cat"), X, [block] * 2)
    refuses(ValueError, "2 layers, but there are 3 blocks", run_layers, GraphSAGE(6, 8, 2, 4), X, [block] * 3)
