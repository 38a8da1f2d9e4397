"""Graphs and options for every kind of mini-batch that a DataModule supports."""

import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch_geometric.data import Data, HeteroData

from lightning_gnn import LinkDataModule, NeighborDataModule
from tests.strategies import edge_indices, typed_graphs

WRITES = ("author", "writes", "paper")


def make_plain_graph(seed=0, num_nodes=60, num_edges=400):
    """Return a homogeneous graph with hubs, isolated nodes, duplicate edges, many dtypes, times and weights."""
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


def make_typed_graph(seed=0):
    """Return a graph of three node types, one of them empty, and four edge types, one of them without edges."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {"author": 30, "paper": 40, "venue": 0}
    data = HeteroData()
    for name, size in sizes.items():
        data[name].x = torch.randn(size, 2, generator=generator)
        data[name].node_time = torch.randint(20, (size,), generator=generator)
    data["paper"].y = torch.randint(3, (40,), generator=generator)
    data["paper"].train_mask = torch.rand(40, generator=generator) < 0.7
    data["paper"].val_mask = torch.arange(40) % 9 == 0
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


GRAPHS = {"plain": make_plain_graph, "typed": make_typed_graph}
NODE_CASES = {
    "plain": ("plain", {}),
    "all": ("plain", {"num_neighbors": [-1, 0, 70]}),
    "replace": ("plain", {"replace": True}),
    "trees": ("plain", {"disjoint": True}),
    "labor": ("plain", {"sampling": "labor"}),
    "dependent": ("plain", {"sampling": "labor", "layer_dependency": True, "batch_dependency": 3}),
    "weights": ("plain", {"weight_attr": "edge_weight", "eval_loader_kwargs": {"subgraph_type": "induced"}}),
    "edge times": ("plain", {"time_attr": "edge_time", "input_train_time": 30.0}),
    "node times": ("plain", {"time_attr": "node_time", "time_window": 9, "temporal_strategy": "last"}),
    "induced": ("plain", {"subgraph_type": "induced"}),
    "induced weights": ("plain", {"subgraph_type": "induced", "weight_attr": "edge_weight"}),
    "both ways": ("plain", {"subgraph_type": "bidirectional"}),
    "typed": ("typed", {}),
    "typed trees": ("typed", {"disjoint": True, "replace": True}),
    "typed times": ("typed", {"time_attr": "node_time", "time_window": 9}),
    "typed edge times": ("typed", {"time_attr": "edge_time", "input_train_time": 10}),
    "typed weights": ("typed", {"weight_attr": "edge_weight", "eval_loader_kwargs": {"subgraph_type": "induced"}}),
    "typed weighted trees": ("typed", {"weight_attr": "edge_weight", "disjoint": True}),
    "typed labor": ("typed", {"sampling": "labor", "subgraph_type": "induced"}),
    "typed both ways": ("typed", {"subgraph_type": "bidirectional"}),
    "typed induced weights": ("typed", {"subgraph_type": "induced", "weight_attr": "edge_weight"}),
}
"""Options of node mini-batches and their graphs."""
NEGATIVES = {"": None, ", binary": {"mode": "binary", "amount": 2}, ", triplets": "triplet"}
LINK_CASES = {
    name + more: (kind, {**options, "neg_sampling": negatives})
    for name, kind, options in (
        ("links", "plain", {"exclude_seed_edges": True}),
        ("link trees", "plain", {"disjoint": True, "exclude_seed_edges": True}),
        ("typed links", "typed", {"exclude_seed_edges": {WRITES: ("paper", "rev_writes", "author")}}),
        ("link times", "plain", {"time_attr": "node_time", "input_train_time": 30}),
        ("typed link times", "typed", {"time_attr": "edge_time", "input_train_time": 10, "exclude_seed_edges": True}),
    )
    for more, negatives in NEGATIVES.items()
} | {"links, labor": ("plain", {"sampling": "labor", "batch_dependency": 2, "neg_sampling": "binary"})}
CASES = NODE_CASES | LINK_CASES


def make_options(case, data, most=40):
    """Return the DataModule options of a case, node or link, partitioned or not, with at most ``most`` seeds."""
    kind, options = CASES[case]
    options = {"num_neighbors": [3, 4], "batch_size": 8, "seed": 3, **options}
    options["eval_loader_kwargs"] = {"num_neighbors": [2], **options.get("eval_loader_kwargs", {})}
    time = options.pop("input_train_time", None)
    if case in LINK_CASES:
        edges = (data if kind == "plain" else data[WRITES]).edge_index
        seeds, name, of_type = {"train": edges[:, 5 : 5 + most], "val": edges[:, 45:50]}, "edges", WRITES
    else:
        masks, name, of_type = data if kind == "plain" else data["paper"], "nodes", "paper"
        seeds = {stage: masks[f"{stage}_mask"].nonzero().view(-1) for stage in ("train", "val")}
        seeds["train"] = seeds["train"][:most]
    for stage, ids in seeds.items():
        options[f"input_{stage}_{name}"] = ids if kind == "plain" else (of_type, ids)
        if time is not None:
            options[f"input_{stage}_time"] = torch.full((ids.size(-1),), time)
    return options


def load_alone(case, data, ranks=1, rank=0, order=None, stage="train", most=40, **more):
    """Return the loader of one of several ranks on the unpartitioned graph, without worker threads."""

    kind = LinkDataModule if case in LINK_CASES else NeighborDataModule
    more |= {} if order is None else {"sampler": order}
    module = kind(data, **make_options(case, data, most), **more)
    module.position.replica = lambda: (ranks, rank)
    return getattr(module, f"{stage}_dataloader")()


@st.composite
def graphs_of_users(draw, typed, random):
    """Draw a graph in which some types may lack features, nodes or edges."""
    if not typed:
        num_nodes, edge_index = draw(edge_indices(max_nodes=16, max_edges=60))
        data = Data(x=torch.randn(num_nodes, 3, generator=random), edge_index=edge_index)
        data.y, data.time = torch.arange(num_nodes), torch.randint(9, (num_nodes,), generator=random)
        data.weight = torch.rand(edge_index.size(1), generator=random).mul(3).floor()
        return data, None
    topology = draw(typed_graphs())
    named = [name for name, size in topology.sizes.items() if size]
    assume(named)
    data = HeteroData()
    for name, size in topology.sizes.items():
        data[name].time = torch.randint(9, (size,), generator=random)
        if draw(st.booleans()):
            data[name].x = torch.randn(size, draw(st.integers(1, 4)), generator=random)
        else:
            data[name].num_nodes = size
    for name, relation in topology.relations.items():
        data[name].edge_index = relation.to_edge_index()
        if draw(st.booleans()):
            data[name].edge_attr = torch.arange(relation.num_edges)
            data[name].weight = torch.rand(relation.num_edges, generator=random).mul(3).floor()
    return data, draw(st.sampled_from(named))


@st.composite
def any_case(draw):
    """Draw a graph, and compatible options of NeighborDataModule."""
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    data, kind = draw(graphs_of_users(draw(st.booleans()), random))
    count = data.num_nodes if kind is None else data[kind].num_nodes
    fanouts = st.lists(st.sampled_from([-1, 0, 1, 2, 3]), min_size=1, max_size=3)
    options = {"num_neighbors": draw(fanouts), "batch_size": draw(st.integers(1, 6)), "seed": draw(st.integers(0, 99))}
    seeds = torch.arange(count)[: draw(st.integers(1, 14))]
    options["input_train_nodes"] = seeds if kind is None else (kind, seeds)
    options["input_val_nodes"] = seeds[:3] if kind is None else (kind, seeds[:3])
    options["replace"] = draw(st.booleans())
    picks = draw(st.sampled_from(["uniform", "times", "weights", "labor"]))
    if picks == "times":
        options |= {"time_attr": "time", "temporal_strategy": draw(st.sampled_from(["uniform", "last"]))}
        if draw(st.booleans()):
            options["time_window"] = draw(st.sampled_from([1, 2.5, 7]))
        if draw(st.booleans()):
            options["input_train_time"] = torch.randint(9, (seeds.numel(),), generator=random)
    elif picks == "weights":
        assume(kind is None or any("weight" in store for store in data.edge_stores))
        options["weight_attr"] = "weight"
    elif picks == "labor":
        more = {"layer_dependency": draw(st.booleans()), "batch_dependency": draw(st.sampled_from([1, 3]))}
        options |= {"replace": False, "sampling": "labor", **more}
    options["disjoint"] = draw(st.booleans())
    subgraphs = ["directional", "bidirectional"] + ["induced"] * (not options["disjoint"] and picks != "times")
    options["subgraph_type"] = draw(st.sampled_from(subgraphs))
    if draw(st.booleans()):
        options["eval_loader_kwargs"] = {"num_neighbors": draw(fanouts), "subgraph_type": subgraphs[-1]}
    return data, options
