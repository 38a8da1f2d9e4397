"""Runs compiled kernels on random inputs and schedules, and compares them with the reference bit for bit.

``python -m tests.ptx.cases SEED RUNS SLICE SLICES [CASE ...]`` prints what the common cases found, and every SLICES-th
of the others, in JSON; 0 1 runs all.
"""

import json
import os
import random
import signal
import subprocess
import sys
import traceback

import torch

from lightning_gnn.graph import CSCGraph
from lightning_gnn.ops import Labor, dropout
from lightning_gnn.ops.aggregate import backends, reference
from lightning_gnn.ops.aggregate import triton as aggregation
from lightning_gnn.ops.aggregate.matrix import Matrix, Scores
from lightning_gnn.ops.aggregate_update import reference as update_reference
from lightning_gnn.ops.aggregate_update import triton as updates
from lightning_gnn.ops.aggregate_update.edge_order import edges_by_target
from lightning_gnn.ops.attention import reference as attention_reference
from lightning_gnn.ops.attention import triton as attention
from lightning_gnn.ops.attention.reference import Attend, Layout
from lightning_gnn.ops.sample import triton as sampling
from lightning_gnn.triton_kernels import aggregate as aggregate_kernels
from lightning_gnn.triton_kernels import edge_sums, row_parts, sample
from lightning_gnn.triton_kernels.gather import gather
from lightning_gnn.triton_kernels.sample_bulk import sample_bulk
from lightning_gnn.triton_kernels.sample_relations import TritonRelationSampler
from tests.batch_checks import assert_equal
from tests.ops import sample_cases
from tests.ptx import driver
from tests.triton_kernels.sampling_cases import shard_table

CPU = torch.device("cpu")
driver.install()
sample.device_of = lambda indices: CPU
for module in (aggregation, backends, dropout, updates):
    module.runs_triton = lambda device: True
row_parts.MAX_ENTRIES = aggregate_kernels.MAX_ENTRIES = 16  # splits rows into parts
torch.set_num_threads(1)


def generator(rng):
    return torch.Generator().manual_seed(rng.randrange(2**40))


def draw_graph(rng, num_nodes=600, degree=8, long=False):
    """Draw a graph with hubs and nodes without edges; low ids are frequent sources."""
    some = generator(rng)
    degrees = torch.randint(0, 2 * degree, (num_nodes,), generator=some)
    degrees[::97], degrees[5::101] = 200, 0
    indptr = torch.nn.functional.pad(degrees.cumsum(0), (1, 0))
    sources = torch.rand(int(indptr[-1]), generator=some) ** 2 * num_nodes
    return CSCGraph.from_csc(indptr, sources.to(torch.int64 if long else torch.int32))


def draw_seeds(rng, num_nodes, most=120):
    return torch.randint(num_nodes, (rng.choice([1, most // 4, most]),), generator=generator(rng))


def compare_samples(found, graph, seeds, fanouts, key, **options):
    """Assert that a sample of the kernels equals that of the CPU."""
    wanted = sample_cases.sample(graph, seeds, fanouts, key, **options)
    node, edge_index, edge, batch, nodes, edges = found
    assert (list(nodes), list(edges)) == (list(wanted.num_sampled_nodes), list(wanted.num_sampled_edges)), "sizes"
    for name, own in (("node", node), ("edge_index", edge_index), ("edge", edge), ("batch", batch)):
        other = getattr(wanted, name)
        assert (own is other is None) or torch.equal(own, other), name


def homogeneous(*fanouts, long=False, setup=None, **options):
    """Make a case of one graph; ``setup`` returns further options of the sampler."""

    def run(rng):
        own = draw_graph(rng, rng.choice([200, 1500]), rng.choice([4, 12]), long)
        extra = {"mode": "fused", "every_hop": options.get("every_hop", False)} | (setup(rng, own) if setup else {})
        indices = extra.pop("indices", own.indices)
        kernels = sample.TritonNeighborSampler(
            own.indptr, indices, device="cpu", num_programs=rng.choice([2, 3, 6]), **extra
        )
        seeds, key = draw_seeds(rng, own.num_nodes), rng.randrange(2**60)
        rule = {name: value for name, value in options.items() if name != "every_hop"}
        hops = rng.choice(fanouts)
        compare_samples(kernels.sample(seeds, hops, key, **rule), own, seeds, hops, key, **options)

    return run


def queue(rng, graph):
    return {"mode": "persistent", "fetch_size": rng.choice([1, 7, 128])}


def cached(rng, graph):
    return {"cached": graph.cache_adjacency(torch.arange(0, graph.num_nodes, 3), "cpu")}


def shards(rng, graph):
    table = shard_table(graph.indices.view(-1, 1), 3, rng.choice([0, 4]), own=rng.randrange(3))
    return {"shards": table, "indices": table.local.view(-1)}


def bulk(rng):
    graph, parts = draw_graph(rng), rng.choice([2, 3, 8])
    seeds, keys = [draw_seeds(rng, 600, 60) for _ in range(parts)], [rng.randrange(2**60) for _ in range(parts)]
    kernels = sample.TritonNeighborSampler(graph.indptr, graph.indices, device="cpu", num_programs=rng.choice([3, 6]))
    fanouts = rng.choice([[5, 4, 3], [-1, 5]])
    for own, key, found in zip(seeds, keys, sample_bulk(kernels, seeds, fanouts, keys), strict=True):
        compare_samples(found, graph, own, fanouts, key)


def typed(kind, types=2, num_warps=4, **options):
    """Make a case of one or several node types, with times and weights of edges as the kind names them."""

    def run(rng):
        some = generator(rng)
        sizes = dict(zip("abc", (150, 90, 40), strict=True)) if types > 1 else {"a": 200}
        graph = sample_cases.random_types(dict(list(sizes.items())[:types]), 500, seed=rng.randrange(2**40))
        if "times" in kind:
            graph = graph.map_relations(
                lambda _, part: part.with_time(torch.randint(99, (part.num_edges,), generator=some))
            )
        if "weights" in kind:
            graph = graph.map_relations(lambda _, part: part.with_weight(torch.rand(part.num_edges, generator=some)))
        seeds = {name: draw_seeds(rng, size, 24) for name, size in graph.sizes.items()}
        rule = dict(options)
        if "times" in kind:
            rule["seed_time"] = {name: torch.randint(20, 99, ids.shape, generator=some) for name, ids in seeds.items()}
        kernels = TritonRelationSampler(
            list(graph.sizes.values()), CPU, num_programs=rng.choice([2, 5]), num_warps=num_warps
        )
        sampling._relation_samplers.setdefault(graph, {})[CPU] = kernels
        fanouts, key = rng.choice([[4, 3], [2, 2], [-1, 2]]), rng.randrange(2**60)
        wanted = sample_cases.sample(graph, seeds, fanouts, key, backend="reference", **rule)
        assert_equal(sample_cases.sample(graph, seeds, fanouts, key, backend="triton", **rule), wanted)

    return run


def gathered(dtype, out_dtype, columns, cache=False, deal=None, bus_bytes=None):
    """Make a case of gathered rows; the index holds rows outside of the table."""

    def run(rng):
        some = generator(rng)
        table = (torch.randn(300, columns, generator=some) * 50).to(dtype)
        index = torch.randint(-5, 305, (rng.choice([7, 400]),), generator=some)
        index[0], index[-1] = 2**40, -(2**40)
        scales = torch.rand(300, generator=some) if dtype == torch.int8 else None
        good = (index >= 0) & (index < 300)
        rows = index[good]
        slot = hot = None
        wanted = table[rows]
        if cache:
            slot = torch.where(torch.rand(300, generator=some) < 0.5, torch.arange(300), -1).int()
            hot = table + 1  # unlike the table, to see where a row comes from
            wanted = torch.where((slot[rows] >= 0)[:, None], hot[rows], wanted)
        wanted = (wanted if scales is None else wanted.float() * scales[rows][:, None]).to(out_dtype)
        out = torch.full((index.numel(), columns), 99, dtype=out_dtype)
        if deal:
            shard_table(table, *deal).take(index, out, scales)
        else:
            gather(table, index, out, scales, slot, hot, bus_bytes=bus_bytes)
        assert torch.equal(out[good], wanted), "rows"
        bad = out[~good]
        assert bool((bad.isnan() if out_dtype.is_floating_point else bad == -1).all()), "bad rows"

    return run


def draw_matrix(rng, num_rows=70, num_columns=50):
    """Draw a matrix with empty rows, duplicates and rows of several parts."""
    graph = draw_graph(rng, num_rows, 6)
    return Matrix(graph.indptr, graph.indices % num_columns, num_columns)


def draw_whole(rng, *shape, dtype):
    """Draw small integers, whose sums and products are exact in every order."""
    return torch.randint(-3, 4, shape, generator=generator(rng)).to(dtype)


def compare_floats(name, *arguments, dtype, tolerance=0.0):
    """Compare an operator with the reference in float64, rounded once."""

    def widen(value):
        if isinstance(value, torch.Tensor):
            return value.double() if value.is_floating_point() else value
        return (
            type(value)(*map(widen, value))
            if hasattr(value, "_fields")
            else tuple(map(widen, value))
            if type(value) is tuple
            else value
        )

    ours, wanted = getattr(aggregation, name)(*arguments), getattr(reference, name)(*map(widen, arguments))
    pairs = zip(ours, wanted, strict=True) if isinstance(ours, tuple) else [(ours, wanted)]
    for found, exact in pairs:
        torch.testing.assert_close(
            found, exact.to(dtype), rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m: f"{name}: {m}"
        )


def sums(reduce, shape, dtype=torch.float32, weighted=False):
    def run(rng):
        matrix = draw_matrix(rng)
        x = draw_whole(rng, matrix.num_columns, *shape, dtype=dtype)
        weight = draw_whole(rng, matrix.num_edges, shape[0], dtype=dtype) if weighted else None
        if reduce == "max":
            x[0], x[-1] = float("nan"), -float("inf")
        compare_floats("aggregate", matrix, x, weight, reduce, dtype=dtype)
        if reduce == "max":
            grad, received, sent = (
                draw_whole(rng, n, *shape, dtype=dtype)
                for n in (matrix.num_columns, matrix.num_columns, matrix.num_rows)
            )
            compare_floats("aggregate_max_backward", matrix, grad, received, sent, weight, dtype=dtype)

    return run


def products(shape, dtype=torch.float32):
    def run(rng):
        matrix = draw_matrix(rng)
        sides = (draw_whole(rng, n, *shape, dtype=dtype) for n in (matrix.num_rows, matrix.num_columns))
        compare_floats("edge_products", matrix, *sides, dtype=dtype)
        ids = torch.randperm(matrix.num_edges, generator=generator(rng))
        compare_floats("edge_sums", matrix, ids, draw_whole(rng, matrix.num_edges, shape[0], dtype=dtype), dtype=dtype)

    return run


def softmax(heads, dtype=torch.float32, tolerance=1e-5):
    """Make a case of a softmax and its gradient; exponentials differ in their last bits."""

    def run(rng):
        matrix, some = draw_matrix(rng), generator(rng)
        row, column = (torch.randn(n, heads, generator=some).to(dtype) for n in (matrix.num_rows, matrix.num_columns))
        scores = Scores(row, column, 0.2)
        compare_floats("edge_softmax", matrix, scores, dtype=dtype, tolerance=tolerance)
        weight = reference.edge_softmax(matrix, scores)
        grad = torch.randn(matrix.num_edges, heads, generator=some).to(dtype)
        compare_floats("edge_softmax_backward", matrix, scores, weight, grad, dtype=dtype, tolerance=tolerance)

    return run


def attended(kind, heads, channels, dtype=torch.float32, tolerance=1e-5):
    """Make a case of attention and its gradients, which are the same bits under another schedule."""

    def run(rng):
        some, dynamic, across, keyed = generator(rng), kind == "dynamic", kind == "across", kind == "keys"
        count = rng.choice([5, 300])
        ends = torch.stack([torch.randint(size, (count,), generator=some) for size in (60, 24)])
        edges = edges_by_target(ends, 60, 24, None)
        layout = Layout([12], [2], across) if across else Layout([24], [1], keyed)
        shared, width = kind in ("across", "shared"), heads * channels
        shapes = [
            (60, channels if shared else width),
            (24 if across or keyed else 1, heads, channels),
            (24, width if dynamic else heads),
            (layout.relations[0], heads, 3, channels) if shared else None,
            (60, width) if keyed else None,
        ]
        inputs = [None if shape is None else torch.randn(shape, generator=some).to(dtype) / 2 for shape in shapes]
        factor = torch.randint(2, (count, heads), generator=some).to(dtype) * 2
        call = Attend(edges, *inputs[:4], factor, layout, 0.2, dynamic, inputs[4])
        results = []
        for _ in range(2):
            out, mass, *saved = attention.attend(call, True, shared)
            grads = attention.attend_backward(call, out.cos(), mass.cos(), saved, [True, True, True, shared, keyed])
            results.append([out, mass, *(grad for grad in grads if grad is not None)])
        assert all(map(torch.equal, *results)), "bits of another schedule"
        exact = [None if tensor is None else tensor.double().requires_grad_() for tensor in inputs]
        exact_call = Attend(edges, *exact[:4], factor.double(), layout, 0.2, dynamic, exact[4])
        wanted = attention_reference.attend(exact_call)
        wanted = wanted if shared else (wanted[0], wanted[1][:0])
        sent = [found.double().cos() for found in results[0][:2]]
        leaves = [tensor for tensor in exact if tensor is not None]
        grads = torch.autograd.grad(wanted[: 1 + shared], leaves, sent[: 1 + shared])
        for found, want in zip(results[0], (wanted[0], wanted[1].view(*results[0][1].shape), *grads), strict=True):
            torch.testing.assert_close(found.double(), want.detach(), rtol=tolerance, atol=10 * tolerance)

    return run


def dropped(dtype, columns, given=False):
    """Make a case of dropout by row, alone or after a ReLU in place."""

    def run(rng):
        some, p, key = generator(rng), rng.choice([0.1, 0.5, 0.9]), rng.randrange(2**63)
        x = torch.randn(rng.choice([1, 37]), columns, generator=some).to(dtype)
        rows = torch.randint(2**40, x.shape[:1], generator=some) if given else None
        assert torch.equal(dropout.row_dropout_cuda(x, p, key, rows), dropout.row_dropout_torch(x, p, key, rows))
        wanted = dropout.row_dropout_torch(x.relu(), p, key, None)
        assert torch.equal(dropout.relu_dropout_cuda(x, p, key), wanted)

    return run


def draw_block(rng, num_sources=40, num_targets=25):
    """Draw a layer's sorted edges, with hubs on both sides and targets without edges."""
    some = generator(rng)
    degrees = torch.randint(0, 7, (num_targets,), generator=some)
    degrees[3] = rng.choice([5, 90])
    source = (torch.rand(int(degrees.sum()), generator=some) ** rng.choice([1, 5]) * num_sources).to(torch.int32)
    return [torch.nn.functional.pad(degrees.cumsum(0), (1, 0)), source]


def updated(dtype, columns, out=5, weighted=False, mean=True, own=True, aggregate_first=True):
    """Make a case of a layer's update, forward and backward; integers are exact but for the mean."""

    def run(rng):
        edges = draw_block(rng)
        if weighted:
            edges.append(draw_whole(rng, edges[1].numel(), dtype=dtype))
        x, weight = draw_whole(rng, 40, columns, dtype=dtype), draw_whole(rng, 1, out, columns, dtype=dtype)
        self_weight = draw_whole(rng, 1, out, columns, dtype=dtype) if own else None
        bias, grad = draw_whole(rng, 1, out, dtype=dtype), draw_whole(rng, 25, out, dtype=dtype)
        call = update_reference.Update(
            edges, x, weight, self_weight, bias, [25], [1], [0], mean, aggregate_first, rng.choice([None, 0.0, 0.5]), 9
        )
        exact = call._replace(**{
            name: part.double() for name, part in zip(call._fields, call, strict=True)
            if isinstance(part, torch.Tensor)
        })  # fmt: skip
        found, kept = updates.aggregate_update(call, True)
        wanted, wide = update_reference.aggregate_update(exact, True)
        result = None if call.p is None else found
        wants = [True, True, own, True]
        kept, wide = (kept, wide) if aggregate_first else (None, None)
        grads = updates.aggregate_update_backward(call, grad, kept, result, wants)
        others = update_reference.aggregate_update_backward(exact, grad.double(), wide, result, wants)
        tolerance = {torch.float32: 1e-4, torch.float64: 1e-11}.get(dtype, 0.1)
        for one, other in zip([found, *grads], [wanted, *others], strict=True):
            torch.testing.assert_close(one.double(), other.double(), rtol=tolerance, atol=10 * tolerance)

    return run


def maxima(dtype, columns):
    """Make a case of maxima with ties and NaN, and of their gradients."""

    def run(rng):
        edges = draw_block(rng)
        x = draw_whole(rng, 40, columns, dtype=dtype) + 0.5
        rows = torch.repeat_interleave(edges[0].diff())[:, None].expand(-1, columns)
        leaf = x.double().requires_grad_()
        wanted = leaf.new_zeros(25, columns).scatter_reduce(0, rows, leaf[edges[1].long()], "amax", include_self=False)
        found, ties = updates.aggregate_rows(edges, x, "max")
        assert torch.equal(found.double(), wanted)
        grad = draw_whole(rng, 25, columns, dtype=dtype)
        [exact] = torch.autograd.grad(wanted, leaf, grad.double())
        own = updates.aggregate_rows_backward(edges, grad, x, found, ties, "max")
        tolerance = {torch.float32: 1e-5, torch.float64: 1e-12}.get(dtype, 0.02)
        torch.testing.assert_close(own.double(), exact, rtol=tolerance, atol=10 * tolerance)

    return run


def summed_alike(rng):
    """A sum of each kernel has the same bits under any schedule."""
    edges, some, bits = draw_block(rng), generator(rng), []
    edges.append(torch.rand(edges[1].numel(), generator=some))
    x = torch.randn(40, 30, generator=some)
    by_source = torch.ops.lightning_gnn.edges_by_source(edges, 40)
    for _ in range(3):
        set_schedule(rng, None)
        out, back = x.new_empty(25, 60), x.new_empty(40, 30)
        edge_sums.sum_rows(edges, x, out, mean=True, own=x, beside=True)
        edge_sums.sum_rows(by_source, out[:, :30], back, over=edges[0], own=out[:, 30:])
        bits.append((out, back))
    assert all(torch.equal(*pair) for other in bits[1:] for pair in zip(bits[0], other, strict=True))


SMALL = ([5, 4, 3], [5, 5], [4, 2, 2])
HALF, BRAIN, FLOAT = torch.float16, torch.bfloat16, torch.float32
CASES = {
    "fused": homogeneous(*SMALL),
    "queue": homogeneous(*SMALL, setup=queue),
    "bulk": bulk,
    "gather float32": gathered(FLOAT, FLOAT, 100),
    "sum": sums("sum", (1, 20)),
    # The cases before this line run in every slice.
    "disjoint": homogeneous([5, 4], disjoint=True),
    "replace": homogeneous([5, 4], replace=True),
    "all neighbors": homogeneous([-1, 5]),
    "fanout 40": homogeneous([40, 3]),
    "int64": homogeneous([15, 5], long=True),
    "every hop": homogeneous([5, 3], every_hop=True),
    "cached lists": homogeneous([5, 4], setup=cached),
    "shards": homogeneous([5, 4], setup=shards),
    "queue, all neighbors": homogeneous([-1, 5], setup=queue),
    "queue, replace": homogeneous([5, 4], setup=queue, replace=True),
    "queue, cached lists": homogeneous([5, 4], setup=lambda *a: queue(*a) | cached(*a)),
    "queue, shards": homogeneous([5, 4], setup=lambda *a: queue(*a) | shards(*a)),
    "types": typed("plain", 3),
    "types, disjoint": typed("plain", disjoint=True),
    "types, replace": typed("plain", 1, replace=True),
    "times": typed("times"),
    "times, window": typed("times", 1, time_window=30),
    "last": typed("times", temporal_strategy="last"),
    "weights": typed("weights"),
    "weights, replace": typed("weights", 1, replace=True),
    "LABOR": typed("plain", labor=Labor()),
    "LABOR, dependent": typed("plain", 1, labor=Labor(True, 3, 5)),
    "times and LABOR": typed("times", labor=Labor()),
    "gather float16": gathered(HALF, HALF, 7),
    "gather float16 to float32": gathered(HALF, FLOAT, 64),
    "gather float32 to float16": gathered(FLOAT, HALF, 33),
    "gather bfloat16": gathered(BRAIN, BRAIN, 129),
    "gather int8 with scales": gathered(torch.int8, FLOAT, 100),
    "gather int8 to float16": gathered(torch.int8, HALF, 12),
    "gather int64": gathered(torch.int64, torch.int64, 3),
    "gather, few programs": gathered(FLOAT, FLOAT, 100, bus_bytes=1 << 14),
    "gather, cache": gathered(FLOAT, FLOAT, 100, cache=True),
    "gather, cache, int8": gathered(torch.int8, HALF, 20, cache=True),
    "gather, shards": gathered(FLOAT, FLOAT, 100, deal=(3, 2)),
    "weighted sum": sums("sum", (3, 5), weighted=True),
    "weighted sum, float16": sums("sum", (2, 40), HALF, weighted=True),
    "mean": sums("mean", (1, 130)),
    "mean, bfloat16": sums("mean", (1, 24), BRAIN),
    "sum, float64": sums("sum", (1, 7), torch.float64),
    "maximum": sums("max", (2, 12)),
    "weighted maximum": sums("max", (1, 20), weighted=True),
    "products": products((3, 5)),
    "products, float16": products((1, 40), HALF),
    "softmax": softmax(3),
    "softmax, float16": softmax(8, HALF, 4e-3),
    "softmax, float64": softmax(1, torch.float64, 1e-12),
    "attention": attended("static", 4, 8),
    "attention, 3 heads of 5": attended("static", 3, 5),
    "attention, float64": attended("dynamic", 3, 5, torch.float64, 1e-12),
    "attention, dynamic": attended("dynamic", 8, 32),
    "attention, bfloat16": attended("dynamic", 4, 8, BRAIN, 5e-2),
    "attention, shared": attended("shared", 8, 100),
    "attention, across": attended("across", 4, 20),
    "layer": updated(FLOAT, 20),
    "layer, weighted": updated(FLOAT, 33, weighted=True, mean=False, own=False),
    "layer, product first": updated(FLOAT, 40, out=3, aggregate_first=False),
    "layer, one column": updated(FLOAT, 1),
    "layer, float64": updated(torch.float64, 12, weighted=True),
    "layer, float16": updated(HALF, 24),
    "layer, bfloat16": updated(BRAIN, 24, own=False),
    "layer, schedules": summed_alike,
    "layer, maximum": maxima(FLOAT, 20),
    "layer, maximum, bfloat16": maxima(BRAIN, 7),
    "layer, maximum, float64": maxima(torch.float64, 1),
    "dropout": dropped(FLOAT, 301, given=True),
    "dropout, bfloat16": dropped(BRAIN, 47),
    "dropout, float64": dropped(torch.float64, 8, given=True),
    "attention, keys": attended("keys", 8, 32),
}
COMMON = list(CASES)[: list(CASES).index("disjoint")]


def set_schedule(rng, stale):
    config = driver.Settings.config
    config.seed, config.yield_ = rng.randrange(2**40), rng.choice([0.02, 0.2, 0.6])
    config.drain, config.stale = rng.choice([0.0, 0.02, 0.3]), stale or rng.choice([0.5, 0.95, 1.0])


def run_case(name, seed, runs, stale=None):
    """Run a case until it fails; return the number of runs, and the failure or None."""
    for number in range(runs):
        rng = random.Random(f"{name} {seed} {number}")
        set_schedule(rng, stale)
        try:
            CASES[name](rng)
        except subprocess.CalledProcessError:
            raise  # of g++
        except Exception as failure:
            lines = traceback.format_exception(failure)
            return number + 1, "".join(lines) if not str(failure) else f"{type(failure).__name__}: {failure}"
    return runs, None


def forked(function, *arguments):
    """Return the result of a function in a forked process, or the signal that ended it."""
    reading, writing = os.pipe()
    process = os.fork()
    if not process:
        with os.fdopen(writing, "w") as pipe:
            json.dump(function(*arguments), pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if status not in (0, -signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS):
        raise RuntimeError(f"a process ended with status {status}, not by the kernel's fault")
    return json.loads(text) if status == 0 else [0, f"ended by {signal.Signals(-status).name}"]


def main():
    seed, runs, number, slices, *names = sys.argv[1:]
    some = [name for name in CASES if name not in COMMON][int(number) :: int(slices)]
    for name in names or [*COMMON, *some]:
        done, failure = forked(run_case, name, int(seed), int(runs))
        print(json.dumps({"case": name, "runs": done, "failure": failure}), flush=True)


if __name__ == "__main__":
    main()
