"""The attention kernels equal the reference and PyG's layers, with the CPU's dropout; on a CPU they are interpreted."""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton exists on Linux only")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined


from lightning_gnn.nn import GAT, HGT, RGAT, GATConv, GATv2Conv
from lightning_gnn.nn.conv import attention
from lightning_gnn.ops.aggregate_update import edge_order
from lightning_gnn.ops.attention import definition, numba, reference
from lightning_gnn.ops.attention import triton as attention_triton
from lightning_gnn.ops.attention.definition import attend, attend_keys, attend_relations, with_self_loops
from lightning_gnn.ops.attention.reference import Attend
from tests.nn import test_fused_attention as layers
from tests.nn import test_hetero_attention as hetero
from tests.nn.fusing import fuse_from
from tests.nn.test_hetero import make_graph
from tests.ops import test_attention as plain
from tests.ops import test_relation_attention as typed
from tests.ops.test_aggregate_update import batches, hub_batch, normal
from tests.ops.test_relation_update import batches as typed_batches

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1.5e-1}
SIZES = [(1, 1), (3, 5), (2, 33), (5, 8), (4, 130), (1, 300)]


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Run the kernels on every device, for mini-batches of every size."""
    monkeypatch.setattr(definition, "_backend", lambda device: attention_triton)
    fuse_from(1, monkeypatch)


def leaves(inputs, device, dtype=None):
    """Return copies of the inputs as leaves of their own."""
    return [None if t is None else t.detach().to(device, dtype).requires_grad_(t.requires_grad) for t in inputs]


def close(found, wanted, dtype):
    """Compare with a result in float64; errors grow with its largest element."""
    assert found.dtype == dtype
    size = 1 + (float(wanted.detach().abs().max()) if wanted.numel() else 0)
    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype] * size}
    torch.testing.assert_close(found.double().cpu(), wanted, **tolerance)


def compute_gradients(out, inputs):
    """Return the gradients of a result weighted by the same numbers on every device."""
    weight = normal(*out.shape, seed=9, dtype=out.dtype).to(out.device)
    wanted = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
    return torch.autograd.grad(out, wanted, weight)


@settings(max_examples=40)
@given(
    batches(),
    st.sampled_from(plain.KINDS),
    st.sampled_from(SIZES),
    st.sampled_from(list(TOLERANCE)),
    st.lists(st.booleans(), min_size=4, max_size=4),
    st.booleans(),
    st.booleans(),
)
def test_result_and_gradients_are_those_of_the_reference(batch, kind, size, dtype, wanted, dropped, loops):
    num_sources, num_targets, edge_index = batch
    cpu_edges = plain.sort_edges(edge_index, num_sources, num_targets)
    edges = [part.to(DEVICE) for part in cpu_edges]
    if loops:
        edges = with_self_loops(edges, num_sources)
        cpu_edges = numba.with_self_loops(cpu_edges, min(num_sources, num_targets))
        count = cpu_edges[1].numel()
        assert torch.equal(edges[0].cpu(), cpu_edges[0])
        assert torch.equal(edges[1][:count].cpu(), cpu_edges[1])
        assert bool((edges[1][count:] == -1).all())
    inputs = plain.draw_inputs(kind, num_sources, edges, *size, dtype=dtype, wanted=wanted, dropped=dropped)
    exact, own = leaves(inputs, "cpu", torch.float64), leaves(inputs, DEVICE)
    factor = None if exact[4] is None else exact[4][: cpu_edges[1].numel()]
    expected = plain.attend_by_reference(cpu_edges, [*exact[:4], factor], kind == "dynamic")
    out = attend(edges, *own, 0.2, kind == "dynamic")
    close(out, expected, dtype)
    assert out.requires_grad == expected.requires_grad
    if out.requires_grad:
        grads = zip(compute_gradients(out, own[:4]), compute_gradients(expected, exact[:4]), strict=True)
        for ours, theirs in grads:
            close(ours, theirs, dtype)


@settings(max_examples=40)
@given(
    typed_batches(),
    st.booleans(),
    st.sampled_from(SIZES[:4]),
    st.sampled_from([torch.float64, torch.float32]),
    st.sampled_from([0.2, 1.0]),
    st.tuples(*[st.booleans()] * 4),
    st.booleans(),
)
def test_relations(batch, across, size, dtype, slope, wanted, dropped):
    edges, layout, inputs, factor = typed.draw_inputs(batch, across, *size, dtype, wanted, dropped)
    exact, own = (leaves([*inputs, factor], *to) for to in (("cpu", torch.float64), (DEVICE,)))
    expected = reference.attend(Attend(edges, *exact, layout, slope))
    found = attend_relations([part.to(DEVICE) for part in edges], *own[:4], layout, own[4], slope)
    for ours, theirs in zip(found, expected, strict=True):
        close(ours, theirs, dtype)
    if any(out.requires_grad for out in expected):
        both = [torch.cat([out.flatten() for out in outs]) for outs in (found, expected)]
        for ours, theirs in zip(compute_gradients(both[0], own), compute_gradients(both[1], exact), strict=True):
            close(ours, theirs, dtype)


@settings(max_examples=12)
@given(
    batches(),
    st.sampled_from(SIZES),
    st.sampled_from(list(TOLERANCE)),
    st.lists(st.booleans(), min_size=3, max_size=3),
    st.booleans(),
)
def test_keys_of_their_own(batch, size, dtype, wanted, dropped):
    num_sources, num_targets, edge_index = batch
    edges = plain.sort_edges(edge_index, num_sources, num_targets)
    inputs = plain.draw_keys(num_sources, edges, *size, wanted, dropped, dtype)
    exact, own = leaves(inputs, "cpu", torch.float64), leaves(inputs, DEVICE)
    expected = plain.attend_keys_plainly(edges, *exact)
    out = attend_keys([part.to(DEVICE) for part in edges], *own)
    close(out, expected, dtype)
    if out.requires_grad:
        grads = zip(compute_gradients(out, own[:3]), compute_gradients(expected, exact[:3]), strict=True)
        for ours, theirs in grads:
            close(ours, theirs, dtype)


@pytest.mark.slow
def test_rows_of_more_than_ten_thousand_edges():
    """One target and one source have nearly all edges, most of them repeated."""
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(3, (2, 10_100), generator=generator)
    edge_index[:, 100:] = 0
    edges = plain.sort_edges(edge_index, 3, 3)
    inputs = plain.draw_inputs("dynamic", 3, edges, 2, 5)
    own = leaves(inputs, DEVICE)
    expected = plain.attend_by_reference(edges, inputs, True)
    out = attend([part.to(DEVICE) for part in edges], *own, 0.2, True)
    close(out, expected, torch.float64)
    for ours, theirs in zip(compute_gradients(out, own[:4]), compute_gradients(expected, inputs[:4]), strict=True):
        close(ours, theirs, torch.float64)


@settings(max_examples=20)
@given(batches(), st.sampled_from(layers.PAIRS), st.sampled_from(layers.OPTIONS), st.booleans(), st.booleans())
def test_layers_equal_pygs(batch, pair, options, needs_x, first):
    num_sources, num_targets, edges = batch
    leaf, seen = normal(num_sources, 6).to(DEVICE).requires_grad_(needs_x), []
    ours, theirs = (layer.to(DEVICE) for layer in layers.make_layers(pair, 6, 4, **options))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "attend", lambda *args, **kw: seen.append(1) or attend(*args, **kw))
        patch.setattr(attention, "aggregates_first", lambda *sizes: first)
        results = []
        for layer in (ours, theirs):
            x = leaf.tanh()
            out = layer((x, x[:num_targets]), edges.to(DEVICE))
            results.append([out, *compute_gradients(out, [leaf, *layer.parameters()])])
    assert len(seen) == (edges.size(1) > 0)
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("layer", [GATConv, GATv2Conv])
def test_dropout_of_attention_is_the_cpus(layer, monkeypatch):
    (num_sources, num_targets), edges = hub_batch(num_edges=150)
    conv = layer(6, 4, heads=3, dropout=0.4).double()
    results = []
    for device, backend in ((DEVICE, attention_triton), ("cpu", numba)):
        monkeypatch.setattr(definition, "_backend", lambda device, backend=backend: backend)
        torch.manual_seed(3)
        x, conv = normal(num_sources, 6).to(device).requires_grad_(), conv.to(device)
        out = conv((x, x[:num_targets]), edges.to(device))
        results.append([part.cpu() for part in (out, *compute_gradients(out, [x, *conv.parameters()]))])
    for ours, cpus in zip(*results, strict=True):
        torch.testing.assert_close(ours, cpus, rtol=1e-10, atol=1e-10)
    torch.manual_seed(4)
    assert not torch.allclose(conv((x, x[:num_targets]), edges), out)


@pytest.mark.parametrize("kind", plain.KINDS)
def test_second_derivatives(kind):
    (num_sources, num_targets), edge_index = hub_batch(num_edges=40)
    cpu_edges = plain.sort_edges(edge_index, num_sources, num_targets)
    edges = with_self_loops([part.to(DEVICE) for part in cpu_edges], num_sources)
    cpu_edges = numba.with_self_loops(cpu_edges, num_targets)
    inputs = plain.draw_inputs(kind, num_sources, edges, 2, 3)
    results = []
    for device in (DEVICE, "cpu"):
        own = leaves(inputs, device)
        if device == DEVICE:
            out = attend(edges, *own, 0.2, kind == "dynamic")
        else:
            used = [*own[:4], own[4][: cpu_edges[1].numel()]]
            out = plain.attend_by_reference(cpu_edges, used, kind == "dynamic")
        given = [tensor for tensor in own[:4] if tensor is not None]
        first = torch.autograd.grad(out.square().sum(), given, create_graph=True)
        second = torch.autograd.grad(sum(grad.square().sum() for grad in first), given)
        results.append([part.cpu() for part in (*first, *second)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("model", [RGAT, HGT])
def test_heterogeneous_models_equal_pygs(model, monkeypatch):
    calls = hetero.watch(monkeypatch)
    data = make_graph()
    pair = [one.to(DEVICE) for one in hetero.make_pair(model, data, (5, 5, 5), 2)]
    hetero.compare(*pair, data.to(DEVICE))
    assert calls


def test_scores_of_any_size_do_not_overflow_and_what_is_no_number_stays():
    edges = [part.to(DEVICE) for part in plain.sort_edges(torch.tensor([[0, 1, 2, 2], [0, 0, 0, 1]]), 3, 2)]
    values, side, target = (
        torch.tensor(part, device=DEVICE) for part in ([[1e4], [-1e4], [1e4]], [[1.0]], [[0.0], [0.0]])
    )
    assert attend(edges, values, side, target).tolist() == [[1e4], [1e4]]
    values[0] = torch.nan
    out = attend(edges, values, side, target)
    assert out[0].isnan()
    assert out[1] == 1e4


@pytest.mark.slow
def test_kernels_compile_for_a100_and_h100(compiled):
    rows = compiled("compile_attention")
    assert {row["sm"] for row in rows} == {80, 90}
    assert {row["kernel"] for row in rows} == {"attend_kernel", "source_gradients_kernel", "row_gradients_kernel"}
    for row in rows:
        assert row["LOCAL"] == 0
        assert row["STACK"] <= 16  # outside the loops over entries
        assert row["REG"] <= (255 if row["kind"] == "fp64" else 144)
        assert not row["atomics"]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; the interpreter stands in")
@pytest.mark.parametrize("pair", layers.PAIRS)
@pytest.mark.parametrize("shape", [(100, 8, 32), (256, 8, 47), (602, 1, 41)])
@pytest.mark.parametrize("dtype", [*TOLERANCE, "autocast"])
def test_a_mini_batch_on_a_gpu(pair, shape, dtype):
    """Results are PyG's, the same bits in each run, and nothing waits for the device."""
    torch.manual_seed(0)
    num_sources, num_targets = 60_000, 10_000
    source, target = torch.randint(num_sources, (150_000,)), torch.arange(num_targets).repeat_interleave(15)
    source[::20] = 7  # a hub
    edges, autocast = torch.stack([source, target]).cuda(), dtype == "autocast"
    ours, theirs = (layer.cuda() for layer in layers.make_layers(pair, shape[0], shape[2], heads=shape[1]))
    x = torch.randn(num_sources, shape[0], dtype=torch.float64, device="cuda")

    def step(layer, dtype, autocast=False):
        layer, leaf = layer.to(dtype), x.to(dtype).requires_grad_()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            out = layer((leaf, leaf[:num_targets]), edges)
        return [out.detach(), *torch.autograd.grad(out.double().square().sum(), [leaf, *layer.parameters()])]

    exact, own = step(theirs, torch.float64), torch.float32 if autocast else dtype
    first = step(ours, own, autocast)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = step(ours, own, autocast)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for got, again, want in zip(first, second, exact, strict=True):
        assert got.dtype == own
        assert torch.equal(got, again)
        tolerance = TOLERANCE[torch.bfloat16 if autocast else dtype]
        assert float((got.double() - want).norm() / want.norm()) < tolerance


@pytest.mark.parametrize("v2", [False, True])
def test_layers_on_the_same_edges_share_their_orders(v2, monkeypatch, record_calls):
    some = torch.Generator().manual_seed(3)
    x = torch.randn(30, 6, dtype=torch.float64, generator=some).to(DEVICE).requires_grad_()
    edges = torch.randint(30, (2, 200), generator=some).to(DEVICE)
    model = GAT(6, 8, 3, 3, heads=2, v2=v2).to(DEVICE).double()
    monkeypatch.setattr(edge_order, "_can_keep", lambda edges: not edges.is_inference())
    sorts, loops = record_calls(torch, "sort"), record_calls(attention_triton, "_with_self_loops")
    results = []
    for keeps in (True, True, False):
        monkeypatch.setattr(edge_order, "_can_keep", lambda edges, keeps=keeps: keeps)
        out = model(x, edges)
        results.append([out, *torch.autograd.grad(out.square().sum(), [x, *model.parameters()])])
        if keeps:
            assert len(sorts) == 1 + (DEVICE == "cuda")  # the CPU sorts by target without torch
            assert len(loops) == 1
    assert len(loops) == 4
    assert all(map(torch.equal, results[0], results[1]))
    assert all(map(torch.equal, results[0], results[2]))
