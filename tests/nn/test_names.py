"""Types with any name that PyG's ``HeteroData`` accepts, in models, mini-batches, checkpoints and exported programs."""

from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given, settings
from torch_geometric.data import HeteroData
from torch_geometric.nn import HeteroConv, SAGEConv
from torch_geometric.nn.module_dict import ModuleDict

import lightning_gnn
from lightning_gnn import NeighborDataModule, NeighborSampler
from lightning_gnn.nn import HGT, RGAT, RGCN, HeteroGraphSAGE, LinkPredictor, NodeClassifier, TypeEmbeddings
from lightning_gnn.nn.hetero.attention import TransformerConv
from lightning_gnn.nn.hetero.layers import TypedConv
from lightning_gnn.nn.type_modules import TypeModules
from lightning_gnn.partitioned.partition import partition_graph
from tests.graph.names import EDGES, NAMES, name_types
from tests.nn.quiet import trainer

pytestmark = pytest.mark.filterwarnings("ignore:There exist type names")
MODELS = [HeteroGraphSAGE, RGCN, RGAT, HGT]
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


def make_graph(names, widths=(4, 4, 4)):
    """Return a HeteroData with three node types and five edge types, each with edges."""
    generator = torch.Generator().manual_seed(0)
    nodes, data = names[0], HeteroData()
    for name, width in zip(nodes, widths, strict=True):
        data[name].x = torch.randn(12, width, generator=generator, dtype=torch.float64)
        data[name].y = torch.randint(3, (12,), generator=generator)
    for kind in names[1]:
        data[kind].edge_index = torch.randint(12, (2, 30), generator=generator)
    return data


PLAIN = (["a", "b", "c"], [(f"{'abc'[s]}", f"r{at}", f"{'abc'[t]}") for at, (s, t) in enumerate(EDGES)])
COLLIDE = name_types(["a", "a_", "b"], ["r__s", "r", "r", "_r", "r"])
MANGLED = name_types(["a__", "a", "b#c"], ["r#1", "__r", "r", "r", "r.1"])
TAKEN = name_types(["keys", "training", "<keys>"], ["items", "forward", "%keys", "weight", "type"])
EMPTY = name_types(["", "%", "src.paper"], ["", "%", "_", "__", "___"])


def disable_fusion():
    """Return a context in which layers run PyG's operators."""
    stack = ExitStack()
    for layer in (TypedConv, TransformerConv):
        stack.enter_context(patch.object(layer, "_can_fuse", lambda *given: False))
    return stack


@pytest.mark.slow
@pytest.mark.parametrize(("model", "widths"), [*((model, (4, 3, 2)) for model in MODELS), (RGAT, (4, 4, 4))])
@given(NAMES)
@example(COLLIDE)
@example(MANGLED)
@example(TAKEN)
@example(EMPTY)
@settings(deadline=None, max_examples=10)
def test_names_of_types_change_no_output(model, widths, names):
    found = []
    for by_name in (PLAIN, names):
        data = make_graph(by_name, widths)
        torch.manual_seed(0)
        net = model(data.metadata(), data.num_features, 8, 2, 3).double().eval()
        seeds = (by_name[0][0], torch.arange(5))
        batch = next(iter(NeighborDataModule(data, seeds, num_neighbors=[-1, -1], batch_size=5).train_dataloader()))
        counts = batch.collect("num_sampled_nodes"), batch.collect("num_sampled_edges")
        outs = [net(data.x_dict, data.edge_index_dict), net(batch.x_dict, batch.edge_index_dict, *counts)]
        with disable_fusion():
            outs += [net(data.x_dict, data.edge_index_dict), net(batch.x_dict, batch.edge_index_dict, *counts)]
        again = model(data.metadata(), data.num_features, 8, 2, 3).double().eval()
        again.load_state_dict(net.state_dict())
        outs.append(again(data.x_dict, data.edge_index_dict))
        assert all(set(out) == set(outs[0]) for out in outs)
        found.append([[out[name] for name in by_name[0] if name in out] for out in outs])
        asked = batch[seeds[0]].n_id[:5]
        torch.testing.assert_close(outs[1][seeds[0]][:5], outs[0][seeds[0]][asked], **CLOSE)
    torch.testing.assert_close(*found, **CLOSE)
    torch.testing.assert_close(found[1][2:4], found[1][:2], **CLOSE)


@pytest.mark.parametrize("name", ["paper", "src.paper", "rev_cites", "_a", "a__b", "gene-x", "a b", "Größe"])
def test_keys_are_those_of_pyg_where_they_are_unique(name):
    kind = (name, name, "paper")
    theirs = ModuleDict({name: torch.nn.Linear(1, 1), kind: torch.nn.Linear(1, 1)})
    TypeModules({name: torch.nn.Linear(1, 1), kind: torch.nn.Linear(1, 1)}).load_state_dict(theirs.state_dict())
    conv = HeteroConv({kind: SAGEConv((2, 2), 3)})
    ours = HeteroGraphSAGE(([name, "paper"], [kind, ("paper", "r", name)]), 2, 3, 1, 3)
    assert set(conv.state_dict()) <= set(ours.convs[0].state_dict())


@given(NAMES)
@example(TAKEN)
@example(EMPTY)
@settings(deadline=None, max_examples=15)
def test_rows_that_are_trained_are_those_of_the_type(names):
    data = make_graph(names)
    for name in names[0]:
        del data[name].x
        data[name].num_nodes = 12
    embeddings = TypeEmbeddings(data, 4)
    again = TypeEmbeddings(data, 4)
    again.load_state_dict(embeddings.state_dict())
    for place, name in enumerate(names[0]):
        torch.testing.assert_close(again(data)[name], list(embeddings.parameters())[place])
    module = LinkPredictor(RGCN(data.metadata(), 4, 8, 2, 3), target=names[1][0], embeddings=embeddings)
    same = LinkPredictor(RGCN(data.metadata(), 4, 8, 2, 3), target=names[1][0], embeddings=again)
    same.load_state_dict(module.state_dict())
    torch.testing.assert_close(same(data), module(data))


@pytest.mark.medium
@pytest.mark.parametrize(("model", "names"), zip(MODELS, [COLLIDE, MANGLED, TAKEN, EMPTY], strict=True))
def test_a_checkpoint_of_any_names_is_read_back(model, names, tmp_path):
    data = make_graph(names).apply(lambda value: value.float() if value.is_floating_point() else value)
    nodes = names[0][0]
    datamodule = NeighborDataModule(
        data, (nodes, torch.arange(12)), num_neighbors=[2, 2], batch_size=4, inference="full"
    )
    module = NodeClassifier(model(data.metadata(), 4, 8, 2, 3), 3, target=nodes)
    run = trainer(tmp_path)
    run.fit(module, datamodule)
    run.save_checkpoint(tmp_path / "last.ckpt")
    state = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    again = NodeClassifier(model(data.metadata(), 4, 8, 2, 3), 3, target=nodes)
    again.load_state_dict(state)
    torch.testing.assert_close(again.eval()(data), module.eval()(data))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "names"),  # without HGT: PyG's HGTConv reads numbers from tensors
    [(HeteroGraphSAGE, COLLIDE), (RGCN, MANGLED), (RGAT, TAKEN), (HeteroGraphSAGE, EMPTY), (RGAT, PLAIN)],
)
def test_a_program_of_any_names_gives_what_the_model_gives(model, names):
    data = make_graph(names)
    net = model(data.metadata(), 4, 8, 2, 3).double().eval()
    with disable_fusion():
        program = torch.export.export(net, (data.x_dict, data.edge_index_dict), strict=False)
    out = program.module()(data.x_dict, data.edge_index_dict)
    torch.testing.assert_close(out, net(data.x_dict, data.edge_index_dict))


@pytest.mark.medium
@pytest.mark.parametrize("names", [PLAIN, COLLIDE, MANGLED, TAKEN, EMPTY])
def test_parts_of_any_names_are_the_graph(names, tmp_path):
    data = make_graph(names)
    data[names[0][0]].about, data.own = "of a type", "of all"
    partition_graph(data, tmp_path / "parts", 2)
    whole = lightning_gnn.partitioned.folder.Partition(tmp_path / "parts")
    read = lightning_gnn.partitioned.whole.with_topology(whole)
    assert read.metadata() == data.metadata()
    assert read.own == "of all"
    assert [store.get("about") for store in read.node_stores] == ["of a type", None, None]
    for kind in names[1]:
        assert torch.equal(read[kind].graph.to_edge_index(), data[kind].edge_index)


def test_fanouts_that_pyg_takes_for_one_are_refused():
    data = make_graph(COLLIDE)
    fanouts = {kind: [place, 1] for place, kind in enumerate(COLLIDE[1])}
    assert NeighborSampler(data, fanouts).num_neighbors == fanouts
    with lightning_gnn.enable_pyg_sampling(), pytest.raises(ValueError, match=r"NumNeighbors confuses"):
        lightning_gnn.pyg.LoaderNeighborSampler(data, fanouts)
