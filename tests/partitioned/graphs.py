"""Graphs with everything that parts have to carry, and what one machine makes of them."""

import torch
from torch_geometric.data import Data, HeteroData

from lightning_gnn import LinkDataModule, NeighborDataModule


def plain_graph(seed=0, num_nodes=60, num_edges=400):
    """A graph of one type: hubs, isolated nodes, duplicate edges, attributes of many dtypes, times and weights."""
    generator = torch.Generator().manual_seed(seed)

    def integers(high, *shape):
        return torch.randint(high, shape, generator=generator)

    row, hubs, other = integers(num_nodes, num_edges), integers(5, num_edges), integers(num_nodes, num_edges)
    col = torch.where(torch.rand(num_edges, generator=generator) < 0.5, hubs, other)
    data = Data(
        x=torch.randn(num_nodes, 3, generator=generator),
        half=torch.randn(num_nodes, 2, generator=generator).bfloat16(),
        y=integers(3, num_nodes),
        edge_index=torch.stack([row, col]),
        edge_attr=torch.randn(num_edges, 2, generator=generator),
        train_mask=torch.rand(num_nodes, generator=generator) < 0.6,
        val_mask=torch.rand(num_nodes, generator=generator) < 0.3,
        node_time=integers(50, num_nodes),
        edge_time=integers(50, num_edges).float(),
        edge_weight=torch.rand(num_edges, generator=generator) * (torch.rand(num_edges, generator=generator) < 0.9),
    )
    data.name, data.scale = "small", torch.tensor([1.0, 2.0, 3.0])
    return data


def typed_graph(seed=0):
    """A graph of three node types, one of them empty, and four edge types, one of them without edges."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {"author": 30, "paper": 40, "venue": 0}
    data = HeteroData()
    for name, size in sizes.items():
        data[name].x = torch.randn(size, 2, generator=generator)
        data[name].node_time = torch.randint(20, (size,), generator=generator)
    data["paper"].y = torch.randint(3, (40,), generator=generator)
    data["paper"].train_mask = torch.rand(40, generator=generator) < 0.7
    for source, name, target, count in (
        ("author", "writes", "paper", 90),
        ("paper", "rev_writes", "author", 90),
        ("paper", "cites", "paper", 120),
        ("venue", "prints", "paper", 0),
    ):
        ends = [torch.randint(max(sizes[end], 1), (count,), generator=generator) for end in (source, target)]
        store = data[source, name, target]
        store.edge_index = torch.stack(ends)
        store.edge_time = torch.randint(20, (count,), generator=generator)
        if name == "cites":
            store.edge_attr = torch.randn(count, 2, generator=generator)
            store.edge_weight = torch.rand(count, generator=generator)
    return data


GRAPHS = {"plain": plain_graph, "typed": typed_graph}
NODE_CASES = {
    "plain": ("plain", {}),
    "all": ("plain", {"num_neighbors": [-1, 0, 70]}),
    "replace": ("plain", {"replace": True}),
    "trees": ("plain", {"disjoint": True}),
    "labor": ("plain", {"sampler": "labor"}),
    "dependent": ("plain", {"sampler": "labor", "layer_dependency": True, "batch_dependency": 3}),
    "weights": ("plain", {"weight_attr": "edge_weight"}),
    "edge times": ("plain", {"time_attr": "edge_time", "input_train_time": 30.0}),
    "node times": ("plain", {"time_attr": "node_time", "time_window": 9, "temporal_strategy": "last"}),
    "induced": ("plain", {"subgraph_type": "induced", "weight_attr": "edge_weight"}),
    "both ways": ("plain", {"subgraph_type": "bidirectional"}),
    "typed": ("typed", {}),
    "typed trees": ("typed", {"disjoint": True, "replace": True}),
    "typed times": ("typed", {"time_attr": "node_time"}),
    "typed edge times": ("typed", {"time_attr": "edge_time", "input_train_time": 10}),
    "typed weights": ("typed", {"weight_attr": "edge_weight"}),
    "typed labor": ("typed", {"sampler": "labor", "subgraph_type": "induced"}),
}
"""How mini-batches of nodes are sampled, each from which graph."""
LINK_CASES = {
    "links": ("plain", {"neg_sampling_ratio": 1.0, "exclude_seed_edges": True}),
    "link trees": ("plain", {"neg_sampling": "triplet", "disjoint": True}),
    "typed links": ("typed", {"neg_sampling_ratio": 2.0}),
    "link times": ("plain", {"time_attr": "node_time"}),
    "typed link times": ("typed", {"time_attr": "edge_time", "input_train_time": 10, "neg_sampling": "triplet"}),
}


def options_of(case, data):
    """What a case gives to a DataModule, node or link, in parts or not."""
    kind, options = (NODE_CASES | LINK_CASES)[case]
    options = {"num_neighbors": [3, 4], "batch_size": 8, "seed": 3, **options}
    if (time := options.get("input_train_time")) is not None:
        mask = data.train_mask if kind == "plain" else data["paper"].train_mask
        options["input_train_time"] = torch.full((int(mask.sum()),), time)
    if case in LINK_CASES:
        edges = data.edge_index if kind == "plain" else data["author", "writes", "paper"].edge_index
        edges = edges[:, 5:45]
        if "input_train_time" in options:
            options["input_train_time"] = torch.full((40,), options["input_train_time"][0])
        options["input_train_edges"] = edges if kind == "plain" else (("author", "writes", "paper"), edges)
    return options


def one_machine(case, data, ranks=1, rank=0, order=None):
    """The training mini-batches that one of several ranks makes of the whole graph."""

    class OneMachine(LinkDataModule if case in LINK_CASES else NeighborDataModule):
        _replica = property(lambda self: (ranks, rank))

    more = {} if order is None else {"sampler": order}
    return list(OneMachine(data, **options_of(case, data), **more).train_dataloader())


def assert_same(batch, expected):
    """Two mini-batches must have the same attributes, bit for bit."""
    assert type(batch) is type(expected)
    assert [store._key for store in batch.stores] == [store._key for store in expected.stores]
    for store, other in zip(batch.stores, expected.stores, strict=True):
        assert set(store.keys()) == set(other.keys()), (store._key, set(store.keys()) ^ set(other.keys()))
        for key, value in other.items():
            where = store._key, key
            assert type(store[key]) is type(value), where
            if isinstance(value, torch.Tensor):
                assert store[key].dtype == value.dtype, where
                assert torch.equal(store[key], value), where
            else:
                assert store[key] == value, where
