import pytest
import pytorch_lightning as pl
import torch
from torch_geometric.data.lightning import LightningNodeData
from torch_geometric.loader import LinkLoader, NodeLoader
from torch_geometric.sampler import EdgeSamplerInput, NegativeSampling, NodeSamplerInput
from torch_geometric.sampler.base import NumNeighbors

from lightning_gnn.ops import sample_neighbors
from lightning_gnn.persistent.sampler import PersistentNeighborSampler
from lightning_gnn.sampling.neighbor import NeighborSampler
from tests.batching_data import small_data


def check(batch, data):
    """A batch must hold edges of the graph, with the attributes of their own nodes and edges."""
    assert torch.equal(batch.n_id[batch.edge_index], data.edge_index[:, batch.e_id])
    assert torch.equal(batch.x, data.x[batch.n_id])
    assert torch.equal(batch.edge_attr, data.edge_attr[batch.e_id])
    assert sum(batch.num_sampled_nodes) == batch.num_nodes
    assert sum(batch.num_sampled_edges) == batch.num_edges


@pytest.mark.parametrize("num_workers", [0, 2])
def test_in_pygs_node_loader(num_workers):
    data = small_data()
    loader = NodeLoader(
        data, NeighborSampler(data, [4, 3], seed=1), input_nodes=data.train_mask, batch_size=32, num_workers=num_workers
    )
    seen = []
    for batch in loader:
        check(batch, data)
        assert torch.equal(batch.n_id[: batch.batch_size], batch.input_id)
        seen.append(batch.input_id)
    assert torch.equal(torch.cat(seen), data.train_mask.nonzero().view(-1))


def test_pygs_worker_processes_sample_anew_in_each_epoch():
    data = small_data()
    torch.manual_seed(0)
    loader = NodeLoader(data, NeighborSampler(data, [2]), input_nodes=torch.arange(64), batch_size=16, num_workers=2)
    first, second = ([batch.e_id for batch in loader] for _ in range(2))
    assert not all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_in_pygs_lightning_node_data():
    data = small_data()
    datamodule = LightningNodeData(data, node_sampler=NeighborSampler(data, [4, 3]), batch_size=50)
    for batch in datamodule.train_dataloader():
        check(batch, data)


@pytest.mark.parametrize("disjoint", [False, True])
@pytest.mark.parametrize("negatives", [None, "binary", "triplet"])
def test_in_pygs_link_loader(disjoint, negatives):
    data = small_data()
    loader = LinkLoader(
        data,
        NeighborSampler(data, [4, 3], disjoint=disjoint),
        edge_label_index=data.edge_index[:, :200],
        batch_size=25,
        neg_sampling=negatives,
    )
    for number, batch in enumerate(loader):
        check(batch, data)
        positives = data.edge_index[:, 25 * number : 25 * number + 25]
        if negatives == "triplet":
            found = torch.stack([batch.n_id[batch.src_index], batch.n_id[batch.dst_pos_index]])
            assert batch.dst_neg_index.shape == (25,)
        else:
            found = batch.n_id[batch.edge_label_index[:, :25]]
            if negatives == "binary":
                assert batch.edge_label.tolist() == [1.0] * 25 + [0.0] * 25
        assert torch.equal(found, positives)
        if disjoint:
            assert torch.equal(batch.batch[batch.edge_index[0]], batch.batch[batch.edge_index[1]])


def test_a_key_fixes_negatives_and_neighbours():
    data = small_data()
    sampler = NeighborSampler(data, [4], seed=3)
    inputs = EdgeSamplerInput(None, data.edge_index[0, :9], data.edge_index[1, :9])
    a, b, c = (sampler.sample_from_edges(inputs, NegativeSampling("binary"), key=key) for key in (1, 1, 2))
    assert torch.equal(a.node, b.node)
    assert torch.equal(a.edge, b.edge)
    assert torch.equal(a.metadata[1], b.metadata[1])
    assert a.node.tolist() != c.node.tolist()


@pytest.mark.parametrize("negatives", [None, NegativeSampling("binary", 1.5), NegativeSampling("triplet", 2)])
def test_each_end_of_an_edge_has_a_tree_of_its_own(negatives):
    data = small_data()
    sampler = NeighborSampler(data, [2, 2], disjoint=True)
    edges = torch.tensor([[0, 1, 0, 5], [1, 0, 1, 5]])  # an edge given twice, its reverse, a self-loop
    out = sampler.sample_from_edges(EdgeSamplerInput(None, *edges), negatives, key=3)
    ends = out.node[: out.num_sampled_nodes[0]]
    alone = sample_neighbors(sampler.graph, ends, [2, 2], 3, disjoint=True)
    assert torch.equal(out.node, alone.node)
    assert torch.equal(out.row, alone.edge_index[0])
    assert torch.equal(out.batch, alone.batch % 4)  # numbered by edge, as PyG does
    # Node 0 is an end of edges 0, 1 and 2, and node 5 both ends of edge 3.
    for node in (0, 5):
        trees = (ends == node).nonzero().view(-1).tolist()
        picked = [tuple(alone.edge[alone.batch[alone.edge_index[1]] == tree].tolist()) for tree in trees]
        assert len(picked) >= 2
        assert len(set(picked)) > 1


def test_the_seed_follows_seed_everything():
    data = small_data()
    inputs = NodeSamplerInput(None, torch.arange(20))
    picks = []
    for seed in (1, 1, 2):
        pl.seed_everything(seed, verbose=False)
        picks.append(NeighborSampler(data, [3]).sample_from_nodes(inputs).edge.tolist())
    assert picks[0] == picks[1] != picks[2]


def test_weighted_negatives():
    data = small_data()
    weight = torch.zeros(400)
    weight[7] = 1
    negatives = NegativeSampling("binary", 1, src_weight=weight, dst_weight=weight)
    inputs = EdgeSamplerInput(None, data.edge_index[0, :5], data.edge_index[1, :5])
    out = NeighborSampler(data, [1]).sample_from_edges(inputs, negatives)
    assert set(out.node[out.metadata[1][:, 5:]].view(-1).tolist()) == {7}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_neighbors": {("a", "to", "b"): [3]}}, TypeError, "needs a heterogeneous graph: give one list"),
        ({"num_neighbors": NumNeighbors({("a", "to", "b"): [3]})}, TypeError, "needs a heterogeneous graph"),
        ({"num_neighbors": 5}, TypeError, "must be a list of integers, one per hop"),
        ({"num_neighbors": [True]}, TypeError, "holds True"),
        ({"replace": "no"}, TypeError, "replace must be True or False, but is 'no'"),
        ({"disjoint": None}, TypeError, "disjoint must be True or False, but is None"),
        ({"seed": 1.5}, TypeError, "seed must be an integer, but is 1.5"),
        ({"seed": 2**70}, ValueError, "seed is 1180591620717411303424, but must lie between"),
        ({"backend": "cuda"}, ValueError, "unknown sampling backend 'cuda'; choose one of numba"),
    ],
)
@pytest.mark.parametrize("kind", [NeighborSampler, PersistentNeighborSampler])
def test_bad_options_are_named_when_the_sampler_is_made(kind, options, error, message):
    if "backend" in options and kind is PersistentNeighborSampler:
        pytest.skip("it has none")
    with pytest.raises(error, match=message):
        kind(small_data(), **{"num_neighbors": [2], **options})


@pytest.mark.parametrize("kind", [NeighborSampler, PersistentNeighborSampler])
def test_bad_inputs_are_named(kind):
    sampler = kind(small_data(), [2])
    with pytest.raises(TypeError, match=r"expected NodeSamplerInput\(None, seeds\), got Tensor"):
        sampler.sample_from_nodes(torch.arange(3))
    with pytest.raises(TypeError, match=r"expected EdgeSamplerInput\(None, sources, targets\), got NodeSamplerInput"):
        sampler.sample_from_edges(NodeSamplerInput(None, torch.arange(3)))
    with pytest.raises(ValueError, match="must lie between"):
        sampler.sample_from_nodes(NodeSamplerInput(None, torch.arange(3)), key=2**64)
    edges = EdgeSamplerInput(None, torch.arange(3), torch.arange(3))
    with pytest.raises(ValueError, match="must lie between"):
        sampler.sample_from_edges(edges, NegativeSampling("binary"), key=2**64)
    with pytest.raises(IndexError, match="seeds hold node 4611686018427387904, but the graph has 400 nodes"):
        sampler.sample_from_nodes(NodeSamplerInput(None, torch.tensor([2**62])))


def test_times_of_seeds_need_times_of_edges():
    data = small_data()
    sampler = NeighborSampler(data, [2])
    with pytest.raises(ValueError, match="edges have no times: give time_attr"):
        sampler.sample_from_nodes(NodeSamplerInput(None, torch.arange(3), time=torch.arange(3)))
    with pytest.raises(ValueError, match="edge_label_time is given, but edges of the graph have no times"):
        sampler.sample_from_edges(EdgeSamplerInput(None, torch.arange(3), torch.arange(3), time=torch.arange(3)))
