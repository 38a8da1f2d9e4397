"""Layers that run fused on a GPU equal PyG's, forward and backward; Triton's interpreter stands in for a GPU."""

import os
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton exists on Linux only")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined

from torch_geometric.nn import HeteroConv
from torch_geometric.nn import conv as pyg
from torch_geometric.sampler import NodeSamplerInput

from lightning_gnn import CSCGraph, NeighborSampler
from lightning_gnn.nn import GCN, GIN, RGCN, GCNConv, GINConv, GraphSAGE, SAGEConv
from lightning_gnn.nn.conv.backends import IMPLS, Impl
from lightning_gnn.nn.conv.fused import can_fuse
from lightning_gnn.nn.hetero.layers import TypedConv
from lightning_gnn.nn.hetero.rows import LayerInput, TypedRows
from lightning_gnn.ops.aggregate_update import edge_order, gcn_edges, triton
from lightning_gnn.ops.aggregate_update.reference import Update
from lightning_gnn.ops.aggregate_update.rows import aggregate_rows
from lightning_gnn.triton_kernels import edge_sums

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore:Warning only once for all operators")
SIZE = len(Update._fields)
QUICK = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Fuse layers of any size by the kernels, on the CPU if there is no GPU."""
    impl = Impl("triton", (DEVICE,), (torch.float32, torch.float64), ())
    for operator in ("aggregate", "relations"):
        monkeypatch.setitem(IMPLS, operator, (impl,))
    if DEVICE == "cuda":
        yield
        return
    library = torch.library.Library("lightning_gnn", "IMPL")
    for name in ("aggregate_update", "aggregate_update_backward"):
        run = getattr(triton, name)
        library.impl(name, lambda *given, run=run: run(Update(*given[:SIZE]), *given[SIZE:]), "CPU")
    for module, names in (
        (triton, ("aggregate_rows", "aggregate_rows_backward")),
        (edge_order, ("edges_by_target", "edges_by_source", "relation_edges")),
        (gcn_edges, ("gcn_edges",)),
    ):
        for name in names:
            library.impl(name, getattr(module, name), "CPU")
    yield
    library._destroy()


@st.composite
def blocks(draw):
    """Draw a layer's edges: empty rows, repeated edges, self-loops, hubs, no edges, in any order or by target."""
    sources = draw(st.integers(1, 12))
    targets = draw(st.integers(1, sources))
    degrees = draw(st.lists(st.integers(0, 9), min_size=targets, max_size=targets))
    some = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    if draw(st.booleans()):
        degrees[draw(st.integers(0, targets - 1))] = 150
    target = torch.arange(targets).repeat_interleave(torch.tensor(degrees))
    source = (torch.rand(target.numel(), generator=some) ** draw(st.sampled_from([1, 4])) * sources).long()
    edge_index = torch.stack([source, target])
    if draw(st.booleans()):
        edge_index = edge_index[:, torch.randperm(target.numel(), generator=some)]
    return (sources, targets), edge_index, some


def compare(results):
    """Assert that two results, each with the leaves of its graph, and their gradients are equal."""
    found = []
    for out, leaves in results:
        factor = torch.randn(out.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(DEVICE)
        grads = torch.autograd.grad((out * factor).sum(), leaves, materialize_grads=True, allow_unused=True)
        found.append([out, *grads])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def pair(ours, theirs):
    ours, theirs = ours.to(DEVICE).double(), theirs.to(DEVICE).double()
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def compare_layers(ours, theirs, block, columns):
    (sources, targets), edge_index, some = block
    edge_index = edge_index.to(DEVICE)
    # With ties, but without 0: PyG's maxima of 0 share their gradient with the initial value.
    x = torch.randn(sources, columns, dtype=torch.float64, generator=some).round(decimals=1)
    x = x.where(x != 0, 0.1).to(DEVICE).requires_grad_()
    assert not edge_index.numel() or can_fuse(ours, x, x[:targets], edge_index)
    compare([(layer((x, x[:targets]), edge_index), [x, *layer.parameters()]) for layer in (ours, theirs)])


@QUICK
@given(
    blocks(), st.sampled_from(["mean", "sum", "max"]), st.sampled_from([(1, 1), (3, 20), (9, 2), (20, 1)]),
    st.booleans(), st.booleans(),
)  # fmt: skip
def test_sage(block, aggr, shape, root, bias):
    torch.manual_seed(0)
    options = {"aggr": aggr, "root_weight": root, "bias": bias}
    compare_layers(*pair(SAGEConv(*shape, **options), pyg.SAGEConv(*shape, **options)), block, shape[0])


@QUICK
@given(blocks(), st.sampled_from(["sum", "mean", "max"]), st.integers(1, 9))
def test_gin(block, aggr, columns):
    torch.manual_seed(0)
    layers = [kind(torch.nn.Linear(columns, 4), eps=0.5, train_eps=True, aggr=aggr) for kind in (GINConv, pyg.GINConv)]
    compare_layers(*pair(*layers), block, columns)


@QUICK
@given(blocks(), st.sampled_from([(1, 1), (3, 20), (20, 3)]), st.booleans(), st.booleans(), st.booleans())
def test_gcn(block, shape, improved, loops, weighted):
    torch.manual_seed(0)
    (sources, _), edge_index, some = block
    edge_index = edge_index.to(DEVICE)
    options = {"improved": improved, "add_self_loops": loops}
    ours, theirs = pair(GCNConv(*shape, **options), pyg.GCNConv(*shape, **options))
    x = torch.randn(sources, shape[0], dtype=torch.float64, generator=some).to(DEVICE).requires_grad_()
    weight = torch.rand(edge_index.size(1), generator=some, dtype=torch.float64).to(DEVICE) if weighted else None
    if weighted and loops:  # of several self-loops of a node PyG takes the weight of any
        edge_index[0] = torch.where(edge_index[0] == edge_index[1], (edge_index[0] + 1) % sources, edge_index[0])
    compare([(layer(x, edge_index, weight), [x, *layer.parameters()]) for layer in (ours, theirs)])


@pytest.mark.filterwarnings("ignore:There exist node types")
@QUICK
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 30)), min_size=1, max_size=5),
    st.sampled_from(["mean", "sum"]), st.booleans(), st.integers(0, 99),
)  # fmt: skip
@example([(0, 1, 300), (1, 1, 0)], "mean", True, 0)
def test_types(kinds, aggr, root, seed):
    """HeteroConv of SAGE layers: several relations per type, relations without edges, types without relations."""
    torch.manual_seed(seed)
    sizes, counts = {"a": 11, "b": 7, "c": 3}, {"a": 4, "b": 7, "c": 1}
    edges = {}
    for number, (source, target, count) in enumerate(kinds):
        ends = torch.randint(sizes["abc"[source]], (count,)), torch.randint(counts["abc"[target]], (count,))
        edges["abc"[source], str(number), "abc"[target]] = torch.stack(ends).to(DEVICE)
    convs = [
        {kind: layer((5, 5), 4, aggr=aggr, root_weight=root) for kind in edges} for layer in (SAGEConv, pyg.SAGEConv)
    ]
    ours, theirs = pair(TypedConv(convs[0]), HeteroConv(convs[1]))
    x = {name: torch.randn(size, 5, dtype=torch.float64).to(DEVICE).requires_grad_() for name, size in sizes.items()}
    reached = {kind[2] for kind in edges}
    block = LayerInput(sizes, {name: count for name, count in counts.items() if name in reached}, edges)
    assert ours._can_fuse(TypedRows.of(x, sizes), block)
    found = ours(TypedRows.of(x, sizes), block).to_dict()
    wanted = theirs({kind: (x[kind[0]], x[kind[2]][: counts[kind[2]]]) for kind in edges}, edges)
    assert {*found} == {*wanted} == reached
    results = ((ours, found), (theirs, wanted))
    compare([
        (torch.cat([out[name] for name in sorted(reached)]), [*x.values(), *layer.parameters()])
        for layer, out in results
    ])  # fmt: skip


def sample(seed, **options):
    """Return the features, edges and counts of a mini-batch with self-loops, on the device and known to be sorted."""
    some = torch.Generator().manual_seed(seed)
    edge_index = torch.randint(60, (2, 500), generator=some)
    edge_index[0, ::7] = edge_index[1, ::7]
    sampler = NeighborSampler(CSCGraph.from_edge_index(edge_index, 60), [4, 3, 2], seed=seed, **options)
    out = sampler.sample_from_nodes(NodeSamplerInput(None, torch.randperm(60, generator=some)[:7]))
    x = torch.randn(out.node.numel(), 6, dtype=torch.float64, generator=some).to(DEVICE).requires_grad_()
    edges = torch.stack([out.row, out.col]).to(DEVICE)
    if options:
        stops = [0, *accumulate(out.num_sampled_edges)]
        edge_order._sorted_hops[edges] = edges._version, tuple(pairwise(stops))  # mark_sorted leaves out the CPU
    else:
        edge_order._sorted[edges] = edges._version
    return x, edges, out.num_sampled_nodes, out.num_sampled_edges


def refuse(*arguments, **options):
    raise AssertionError("these edges need neither sorting nor checks")


@pytest.mark.parametrize(("kind", "weighted"), [(GCN, False), (GCN, True), (GraphSAGE, False), (GIN, False)])
@pytest.mark.parametrize("num_layers", [3, 2])
def test_models_on_sorted_edges(kind, num_layers, weighted, monkeypatch):
    x, edges, *counts = sample(5)
    names = "num_sampled_nodes_per_hop", "num_sampled_edges_per_hop"
    weight = torch.rand(edges.size(1), dtype=torch.float64, device=DEVICE) if weighted else None
    torch.manual_seed(0)
    model = kind(6, 8, num_layers, 3).to(DEVICE).double()
    monkeypatch.setattr(edge_order, "mark_sorted", lambda part: edge_order._sorted.update({part: part._version}))
    with monkeypatch.context() as patched:
        patched.setattr(torch, "sort", refuse)
        patched.setattr(torch, "_assert_async", refuse)
        found = model(x, edges, weight, **dict(zip(names, counts, strict=True)))
    for operator in IMPLS:
        monkeypatch.setitem(IMPLS, operator, ())
    wanted = model(x, edges.clone(), weight, **dict(zip(names, counts, strict=True)))
    leaves = [x, *model.parameters()]
    compare([(found, leaves), (wanted, leaves)])


@pytest.mark.parametrize("kind", [GraphSAGE, GIN])
def test_models_on_sorted_hops(kind, monkeypatch):
    """With ``semantics="every_hop"`` each layer has the edges of its hop."""
    x, edges, *counts = sample(5, semantics="every_hop")
    torch.manual_seed(0)
    model = kind(6, 8, 3, 3).to(DEVICE).double()
    monkeypatch.setattr(edge_order, "mark_sorted", lambda part: edge_order._sorted.update({part: part._version}))
    with monkeypatch.context() as patched:
        patched.setattr(torch, "sort", refuse)
        found = model(x, edges, None, None, None, None, *counts, every_hop=True)
    for operator in IMPLS:
        monkeypatch.setitem(IMPLS, operator, ())
    wanted = model(x, edges.clone(), None, None, None, None, *counts, every_hop=True)
    leaves = [x, *model.parameters()]
    compare([(found, leaves), (wanted, leaves)])


@pytest.mark.cuda
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("kind", [GCN, GraphSAGE, GIN, RGCN])
def test_a_step_does_not_wait_for_the_device(kind):
    x, edges, *counts = sample(5)
    if kind is RGCN:
        own = ("a", "to", "a")
        model = kind((["a"], [own]), 6, 8, 3, 3, dropout=0.5).to(DEVICE).double()
        given = {"a": x}, {own: edges}, {"a": counts[0]}, {own: counts[1]}
    else:
        model, given = kind(6, 8, 3, 3, dropout=0.5).to(DEVICE).double(), (x, edges, None, None, None, None, *counts)

    def step():
        out = model(*given)
        (out["a"] if kind is RGCN else out).square().sum().backward()

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.cuda
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("kind", [GCN, GraphSAGE, GIN])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_under_autocast(kind, dtype, monkeypatch):
    impl = Impl("triton", ("cuda",), (torch.float32,), (dtype,))
    x, edges, *counts = sample(5)
    torch.manual_seed(0)
    model = kind(6, 64, 3, 3).to(DEVICE).double().eval()
    wanted = model(x, edges, None, None, None, None, *counts)
    exact = torch.autograd.grad(wanted.square().sum(), [*model.parameters()])
    monkeypatch.setitem(IMPLS, "aggregate", (impl,))
    model.float()
    with torch.autocast("cuda", dtype):
        out = model(x.detach().float(), edges, None, None, None, None, *counts)
    assert out.dtype == dtype
    grads = torch.autograd.grad(out.double().square().sum(), [*model.parameters()])
    for one, other in zip([out, *grads], [wanted, *exact], strict=True):
        assert (one.double() - other).norm() < 0.2 * other.norm()


@pytest.mark.parametrize(
    ("reduce", "columns"), [("sum", 1), ("mean", 24), pytest.param("max", 1, marks=pytest.mark.slow)]
)
def test_hubs(reduce, columns):
    """Rows of over 10,000 edges, by target and by source."""
    some = torch.Generator().manual_seed(1)
    source = torch.cat([torch.randint(40, (12_000,), generator=some), torch.full((70,), 3)])
    target = torch.cat([torch.full((12_000,), 5), torch.arange(35).repeat(2)])
    big = torch.full((11_000,), 3)  # of one source
    edge_index = torch.stack([torch.cat([source, big]), torch.cat([target, torch.arange(35).repeat(315)[:11_000]])])
    edge_index = edge_index.to(DEVICE)
    edges = torch.ops.lightning_gnn.edges_by_target(edge_index, 40, 35, None)
    x = torch.randn(40, columns, dtype=torch.float64, generator=some).to(DEVICE).requires_grad_()
    index = edge_index[1][:, None].expand(-1, columns)
    how = {"sum": "sum", "mean": "mean", "max": "amax"}[reduce]

    wanted = x.new_zeros(35, columns).scatter_reduce(0, index, x[edge_index[0]], how, include_self=False)
    compare([(aggregate_rows(x, edges, reduce), [x]), (wanted, [x])])


def test_nan_is_the_highest():
    edges = [torch.tensor([0, 3, 4, 4]), torch.tensor([0, 1, 2, 0], dtype=torch.int32)]
    edges = [part.to(DEVICE) for part in edges]
    x = torch.tensor([[1.0, torch.nan], [torch.nan, 2.0], [3.0, torch.nan]], device=DEVICE)
    out, ties = triton.aggregate_rows(edges, x, "max")
    assert torch.equal(out.isnan().int().cpu(), torch.tensor([[1, 1], [0, 1], [0, 0]], dtype=torch.int32))
    assert ties.tolist() == [[1, 2], [1, 1], [0, 0]]
    assert out[2].tolist() == [0, 0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_sums_of_16_bits_are_rounded_once(dtype):
    """An own row beside and added, from a slice of a wider table; the sum of 300 numbers that float16 lacks."""
    some = torch.Generator().manual_seed(2)
    table = torch.rand(50, 12, generator=some).to(dtype).to(DEVICE)
    x, own = table[:, :7], table[:4, 5:12]
    indices = torch.randint(50, (300,), generator=some, dtype=torch.int32).to(DEVICE)
    edges = [torch.tensor([0, 270, 270, 290, 300], device=DEVICE), indices]
    rows = torch.tensor([0, 2, 3], device=DEVICE).repeat_interleave(torch.tensor([270, 20, 10], device=DEVICE))
    wanted = x.new_zeros(4, 7).double().index_add(0, rows, x[indices.long()].double())
    out = x.new_empty(4, 14)
    edge_sums.sum_rows(edges, x, out, own=own, beside=True)
    rounded = 2**-10 if dtype == torch.float16 else 1e-6
    torch.testing.assert_close(out[:, :7].double(), wanted, rtol=rounded, atol=0)
    assert torch.equal(out[:, 7:], own)
    out = x.new_empty(4, 7)
    edge_sums.sum_rows(edges, x, out, own=own[0])
    torch.testing.assert_close(out.double(), wanted + own[0].double(), rtol=rounded, atol=0)
    edge_sums.sum_rows(edges, x, out, own=own[:3])
    wanted[:3] += own[:3].double()
    torch.testing.assert_close(out.double(), wanted, rtol=rounded, atol=0)


@pytest.mark.slow
def test_kernels_compile_for_a100_and_h100(compiled):
    rows = compiled("compile_layers")
    assert {row["sm"] for row in rows} == {80, 90}
    for row in rows:
        assert row.get("STACK", 0) == row.get("LOCAL", 0) == 0
        # Columns that are not aligned, or of 8 bytes, take more.
        assert row.get("REG", 0) <= (64 if row["kind"] in ("fp32", "bf16") and row["COLUMNS"] != 47 else 168)
        assert not any("atom" in name or "red" in name for name in row["instructions"])  # deterministic results
        if row["kernel"] == "sum_kernel" and row["COLUMNS"] in (100, 256):
            assert "bar.sync" not in row["instructions"]
            assert any("v4" in name for name in row["instructions"])


@pytest.mark.parametrize("kind", [GraphSAGE, GCN, GIN, "max"])
def test_layers_on_the_same_edges_share_their_orders(kind, monkeypatch, record_calls):
    """Also if the first call is one in inference mode, and not after a change of the edges."""
    some = torch.Generator().manual_seed(3)
    x = torch.randn(30, 6, dtype=torch.float64, generator=some).to(DEVICE).requires_grad_()
    edges = torch.randint(30, (2, 200), generator=some).to(DEVICE)
    torch.manual_seed(0)
    options = {"aggr": "max"} if kind == "max" else {}
    model = (GraphSAGE if kind == "max" else kind)(6, 8, 3, 3, **options).to(DEVICE).double()
    monkeypatch.setattr(edge_order, "_can_keep", lambda edges: not edges.is_inference())
    sorts, leaves = record_calls(torch, "sort"), [x, *model.parameters()]
    with torch.inference_mode():
        model(x, edges)
    assert len(sorts) == 1
    for _ in range(2):
        found = model(x, edges)
        grads = torch.autograd.grad(found.square().sum(), leaves)
    assert len(sorts) == 2
    with monkeypatch.context() as patched:
        patched.setattr(edge_order, "_can_keep", lambda edges: False)
        wanted = model(x, edges)
        others = torch.autograd.grad(wanted.square().sum(), leaves)
    assert len(sorts) > 4
    assert all(map(torch.equal, (found, *grads), (wanted, *others)))
    edges[1, :9] = 0
    sorts.clear()
    assert not torch.equal(model(x, edges), found)
    assert len(sorts) == 1
