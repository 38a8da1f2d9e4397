"""Exported models return the model's results on any graph, use ATen operators only, and run without this package."""

import importlib.util
import subprocess
import sys

import pytest
import torch
from torch_geometric.nn import GraphSAGE as PyGGraphSAGE

from lightning_gnn import NeighborDataModule
from lightning_gnn.nn import GAT, GCN, GIN, GraphSAGE, GraphTransformer, NodeClassifier, export_onnx, export_program
from tests.batching_data import small_data

MODELS = {
    "sage": lambda: GraphSAGE(12, 16, 2, 4, dropout=0.5),
    "sage max, project, normalize": lambda: GraphSAGE(12, 16, 2, 4, aggr="max", project=True, normalize=True),
    "gcn": lambda: GCN(12, 16, 2, 4, input_dropout=0.5),
    "gcn improved, cached": lambda: GCN(12, 16, 2, 4, improved=True, cached=True),
    "gat": lambda: GAT(12, 16, 2, 4, heads=4, output_heads=1, dropout=0.3, act="elu"),
    "gatv2": lambda: GAT(12, 16, 2, 4, heads=2, v2=True),
    "transformer": lambda: GraphTransformer(12, 16, 2, 4, heads=2, beta=True),
    "gin": lambda: GIN(12, 16, 2, 4, norm="batch_norm"),
    "jk, residuals of a norm": lambda: GCN(12, 16, 3, 4, jk="cat", norm="layer_norm"),
    "pyg": lambda: PyGGraphSAGE(12, 16, 2, 4),
}


def draw_graphs():
    """Yield graphs of other sizes than the example graph, with self-loops, parallel edges and isolated nodes."""
    data = small_data()
    yield data.x, data.edge_index
    loops = torch.tensor([[3, 3, 5, 0], [3, 3, 5, 1]])
    yield data.x, torch.cat([data.edge_index[:, :900], loops, data.edge_index[:, :50]], dim=1)
    yield data.x[:3], torch.tensor([[0], [1]])
    yield data.x[:1], torch.zeros(2, 0, dtype=torch.int64)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_programs_return_what_the_model_returns(name):
    torch.manual_seed(0)
    model = MODELS[name]()
    if name == "gcn improved, cached":
        model(*next(draw_graphs()))  # the model's caches are filled
    module = NodeClassifier(model, 4)
    program = export_program(module, 12)
    for node in program.graph.nodes:
        assert getattr(node.target, "namespace", "aten") == "aten", node.target
    called, training = program.module(), {part for part in model.modules() if part.training}
    assert training  # the mode is unchanged
    model.eval()
    for x, edge_index in draw_graphs():
        if name == "gcn improved, cached":
            model = MODELS[name]().eval()
            model.load_state_dict(module.model.state_dict())
        with torch.no_grad():
            torch.testing.assert_close(called(x, edge_index), model(x, edge_index), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sage", "gcn", "gat", "gin"])
def test_of_a_neighbourhood_the_first_rows_are_those_of_the_seeds(name):
    torch.manual_seed(0)
    module = NodeClassifier(MODELS[name](), 4).eval()
    data = small_data()
    del data.edge_weight
    datamodule = NeighborDataModule(data, num_neighbors=[4, 3], batch_size=1)
    loader = datamodule.val_dataloader()
    one, all_rows = (export_program(module, 12, num_seeds).module() for num_seeds in (1, None))
    for batch, _ in zip(loader, range(8), strict=False):
        with torch.no_grad():
            expected = module.predict_step(batch, 0)
        assert expected.shape == (1, 4)
        torch.testing.assert_close(one(batch.x, batch.edge_index), expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(all_rows(batch.x, batch.edge_index)[:1], expected, atol=1e-5, rtol=1e-5)


ALONE = """
import sys
for name in ("lightning_gnn", "torch_geometric", "pytorch_lightning", "numba"):
    sys.modules[name] = None
import torch
program = torch.export.load(sys.argv[1]).module()
for x, edge_index, expected in torch.load(sys.argv[2]):
    torch.testing.assert_close(program(x, edge_index), expected, atol=1e-5, rtol=1e-5)
print("equal")
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gcn", "gat"])
def test_a_program_runs_where_this_package_is_not(name, tmp_path):
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    torch.export.save(export_program(model, 12), tmp_path / "model.pt2")
    with torch.no_grad():
        torch.save([(*graph, model(*graph)) for graph in draw_graphs()], tmp_path / "rows.pt")
    run = subprocess.run(
        [sys.executable, "-c", ALONE, tmp_path / "model.pt2", tmp_path / "rows.pt"],
        capture_output=True, text=True, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert run.stdout == "equal\n", run.stderr


@pytest.mark.medium
def test_what_cannot_be_exported():
    with pytest.raises(ValueError, match="GraphSAGE cannot be exported for 5 features: x has 5 features per node, but"):
        export_program(MODELS["sage"](), 5)
    with pytest.raises(ValueError, match="num_seeds must be at least 1"):
        export_program(MODELS["sage"](), 12, num_seeds=0)


def test_onnx_names_the_package_that_is_missing(tmp_path):
    if importlib.util.find_spec("onnxscript") is not None:
        pytest.skip("onnxscript is installed")
    with pytest.raises(ModuleNotFoundError, match=r"onnxscript: pip install 'lightning-gnn\[onnx\]'"):
        export_onnx(MODELS["sage"](), 12, tmp_path / "model.onnx")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sage", "gcn", "gat", "gatv2", "gin"])
def test_onnx_returns_what_the_model_returns(name, tmp_path):
    pytest.importorskip("onnxscript")
    reference = pytest.importorskip("onnx.reference")
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    runs = reference.ReferenceEvaluator(str(export_onnx(model, 12, tmp_path / "model.onnx")))
    for x, edge_index in list(draw_graphs())[:3]:
        (rows,) = runs.run(None, {"x": x.numpy(), "edge_index": edge_index.numpy()})
        with torch.no_grad():
            torch.testing.assert_close(torch.from_numpy(rows), model(x, edge_index), atol=1e-5, rtol=1e-5)


class Branching(torch.nn.Module):
    def forward(self, x, edge_index):
        return x if x.sum() > 0 else -x


class Fixed(torch.nn.Module):
    def forward(self, x, edge_index):
        return x.view(5, 4)


class Failing(torch.nn.Module):
    def forward(self, x, edge_index):
        raise RuntimeError("word " * 1000)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: GraphSAGE(4, 8, 2, 3, aggr="lstm"), r"in LSTMAggregation \(convs.0.aggr_module\); use another"),
        (Branching, "data-dependent"),
        (lambda: torch.nn.ModuleList([Branching()]), "ModuleList"),
        (Fixed, "Constraints violated"),
        (Failing, r"word word \[...\]; use another"),
    ],
)
def test_what_torch_refuses_is_said_in_short_and_without_the_graph(model, reason, capfd):
    with pytest.raises(ValueError, match=reason) as raised:
        export_program(model(), num_features=4)
    said = capfd.readouterr()
    assert len(str(raised.value)) < 400
    assert said.out + said.err == ""


@pytest.mark.medium
@pytest.mark.parametrize("aggr", ["mean", "sum", "max", "std", "softmax"])
def test_the_aggregations_that_are_proposed_can_be_exported(aggr):
    model = GraphSAGE(4, 8, 2, 3, aggr=aggr).eval()
    x, edge_index = torch.randn(9, 4), torch.randint(9, (2, 30))
    torch.testing.assert_close(export_program(model, 4).module()(x, edge_index), model(x, edge_index))
