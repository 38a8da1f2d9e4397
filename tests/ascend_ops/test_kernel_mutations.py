"""Kernels of this package with lines taken out or changed: the twin, or a wrong result, must say so."""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from lightning_gnn.ascend_ops.build import CSRC
from lightning_gnn.ascend_ops.twin import Twin, TwinViolation, default_twin
from lightning_gnn.ops import library  # noqa: F401  keeps what is compiled
from tests.ascend_ops import run_kernels as run
from tests.ascend_ops.chunk_arrays import chunked
from tests.ascend_ops.test_kernels import aggregated, check
from tests.ascend_ops.test_max import maxima

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="the twin needs g++"),
    pytest.mark.slow,
]

# line of the kernel -> what stands there instead, and the rules that may notice; "" is a wrong result
UPDATE = {
    "the cube core does not wait for the sums": ("CrossCoreWaitFlag(FLAG_SUMMED);", "", "race|cross-core flag|uninit"),
    "the vector cores do not say that they are done": (
        "CrossCoreSetFlag<0x2, PIPE_MTE3>(FLAG_SUMMED);",
        "",
        "deadlock|cross-core flag",
    ),
    "said before the sums are written": ("<0x2, PIPE_MTE3>(FLAG_SUMMED)", "<0x2, PIPE_S>(FLAG_SUMMED)", "race|uninit"),
    "the cube core takes no tile off": ("CrossCoreSetFlag<0x2, PIPE_MTE2>(FLAG_TAKEN);", "", "deadlock|cross-core"),
    "vector cores run ahead without end": ("if (ahead == AHEAD) {", "if (false) {", "cross-core flag"),
    "counters are left": ("for (; ahead > 0; --ahead) {", "for (; false; --ahead) {", "cross-core flag"),
    "a row's sums are cleared too early": (
        "AscendC::PipeBarrier<PIPE_V>();  // the sums before may still be read",
        "",
        "race",
    ),
    "the lists are read before they are there": ("Sync<AscendC::HardEvent::MTE2_S>();", "", "race|uninit"),
    "lists are overwritten while they are read": ("Sync<AscendC::HardEvent::S_MTE2>();", "", "race"),
    "rows without edges keep the sums before": (
        "AscendC::Duplicate(sumBuffer.Get<float>(), 0.0f, static_cast<int32_t>(width));",
        "",
        "uninit|race|",
    ),
    "an edge of the next row is added to this one": ("e + i >= rows.End()", "e + i > rows.End()", ""),
    "the mean forgets an edge": ("(rowEnd - rowBegin)));", "(rowEnd - rowBegin + 1)));", ""),
    "a row of another row's own": ("Multiply(sum, xGm, first, own,", "Multiply(sum, xGm, 0, own,", ""),
    "own weights from the wrong place": ("column, n, tiling.ownOffset);", "column, n, 0);", ""),
    "each core sums a half too much": (
        "Least(first + TILE / 2, tiling.rows)",
        "Least(first + TILE, tiling.rows)",
        "race",
    ),
}

# The same of aggregate_vector: groups of rows that are on their way while others are added.
VECTOR = {
    "a group is asked for that has no room": ("e + BUFFER_NUM * atOnce", "e + 3 * atOnce", "queue"),
    "a list's last group is as long as the others": ("Least(n - asked, atOnce)", "atOnce", "uninit|global bounds"),
    "a list adds more rows than there are": (
        "first, e, Least(n - e, atOnce)",
        "first, e, atOnce",
        "uninit|race|",
    ),
    "a group's rows lie in one place": ("DataCopy(group[i * width],", "DataCopy(group,", "race|uninit"),
    "a group's last row is not asked for": (
        "for (uint32_t i = 0; i < n; ++i) {\n            const",
        "for (uint32_t i = 0; i + 1 < n; ++i) {\n            const",
        "uninit|",
    ),
    "a group is given back before it is read": (
        "AscendC::Cast(wide, group,",
        "rowQueue.FreeTensor(group);\n        AscendC::Cast(wide, group,",
        "queue",
    ),
    "a group is never given back": ("rowQueue.FreeTensor(group);", "", "queue"),
    "rows are added before they are float32": (
        "AscendC::PipeBarrier<PIPE_V>();\n            if (weighted)",
        "if (weighted)",
        "race",
    ),
    "the first row is added again and again": ("Axpy(sum, wide[i * width],", "Axpy(sum, wide,", ""),
    "every group has the weights of the first": ("weights.GetValue(e + i)", "weights.GetValue(i)", ""),
    "an edge of the next vertex is added to this one": ("e + i >= rows.End()", "e + i > rows.End()", ""),
    "the list is read before it is there": ("Sync<AscendC::HardEvent::MTE2_S>();", "", "race|uninit"),
    "the list is overwritten while it is read": ("Sync<AscendC::HardEvent::S_MTE2>();", "", "race"),
    "a vertex keeps the sums of the one before": (
        "outQueue.FreeTensor(out);\n        Clear();",
        "outQueue.FreeTensor(out);",
        "",
    ),
    "the last vertex is not sent away": ("end);\n            Close();", "end);", ""),
    "the second head has the weights of the first": ("(head) * tiling.valueStride", "(head) * 0", ""),
    "a panel begins where the last one ended": ("next = range.begin;", "", "global bounds|"),
    "sums of a result that is still on its way": ("out = outQueue.DeQue<half>();", "", "queue"),
}

GATHER = {
    "an index outside the table is followed": ("row < tiling.tableRows ?", "true ?", "global bounds"),
    "indices are read before they are there": ("Sync<HardEvent::MTE2_S>();", "", "race|uninit"),
    "the last batch is as long as the others": ("Least(end - i, tiling.batch)", "tiling.batch", "global bounds|race"),
}

# The same of aggregate_gathered, in whichever of its files the line stands.
GATHERED = {
    "the cube cores do not wait for the rows": (
        "SyncAll<false>();\n            consumer",
        "consumer",
        "deadlock|uninit|race",
    ),
    "the vector cores do not wait for the cubes": (
        "            SyncAll<false>();\n        }\n        Cross",
        "}Cross",
        "deadlock|race",
    ),
    "tiles of the other buffer": (
        "wave) { base = static_cast<uint64_t>(wave & 1U)",
        "wave) { base = (~wave & 1ULL)",
        "uninit|race|",
    ),
    "rows of the buffer in use": (
        "base = static_cast<uint64_t>(wave & 1U) * tiling.slotHalves;\n        Rows",
        "base = 0;\n        Rows",
        "uninit|race|",
    ),
    "given weights that are not finite are passed over": ("noteGm.GetValue(0) != 0", "false", ""),
    "results are mended before they are there": ("CrossCoreWaitFlag(FLAG_DONE);", "", "cross-core flag|race"),
    "the list is read before it is there": (
        "AscendC::WaitFlag<AscendC::HardEvent::MTE2_S>(listed[batch & 1U]);",
        "",
        "race|uninit|event set twice|flag never",
    ),
    "the list is overwritten while it is read": (
        "Sync<AscendC::HardEvent::S_MTE2>();\n        rowsQueue",
        "rowsQueue",
        "race",
    ),
    "fillers hold what was there": (
        "if (vertex >= 0) {",
        "if (vertex < 0) {\n            } else if (true) {",
        "uninit|",
    ),
    "the end of a batch is left": ("if (halves < compared) {", "if (false) {", "uninit"),
    "rows go to another place": ("batchesGm.GetValue(at + 2), halves", "0, halves", "race|uninit|"),
    "neighbours are left out": ("list.GetValue(run * SOURCE_FIELDS + 1) * tiling.ldx", "tiling.ldx", "uninit|race|"),
    "only the first core is believed": ("i < cores; ++i) {\n            any", "i < 1; ++i) {\n            any", ""),
    "all heads have the weights of the first": ("part & 1U, part / 2 / count);", "part & 1U, 0);", "uninit|race|"),
    "a part is made by nobody": ("shares + cores + 2);", "shares + cores + 2) - 1;", "uninit|"),
    "places are read before they are cast": (
        "cellQueue.FreeTensor(places);\n            AscendC::PipeBarrier<PIPE_V>();",
        "cellQueue.FreeTensor(places);",
        "race",
    ),
    "empty cells point to nothing": (
        "AscendC::Duplicate(pickBuffer.Get<half>(), static_cast<half>(0.0f), CELL_BASE / sizeof(half));",
        "",
        "uninit",
    ),
    "entries are stored before they are there": ("if (done > 0 || !fetched) {", "if (done > 0) {", "race|uninit"),
    "picked weights that are not finite are passed over": ("(picks && finite.Met())", "false", ""),
    "stored weights that are not finite are passed over": ("return strangeWeights != 0 ||", "return", ""),
    "a row that is not finite is passed over": ("known || finite.Met() ||", "known ||", ""),
    "a tile is sent before it is made": ("Sync<AscendC::HardEvent::S_MTE3>();", "", "race"),
}

# The same of both kernels of maxima, which share a file.
BATCHES = {
    "the list is read before it is there": (
        "AscendC::WaitFlag<AscendC::HardEvent::MTE2_S>(listed[Slot(at)]);",
        "",
        "race|uninit|event set twice|flag never",
    ),
    "the list is overwritten while it is read": ("Sync<AscendC::HardEvent::S_MTE2>();", "", "race"),
    "the last batch is as long as the others": (
        "return Least(last - at, tiling.batch);",
        "return tiling.batch;",
        "global bounds|queue state|race|uninit|",
    ),
    "all heads have the weights of the first": (
        "valuesGm[static_cast<uint64_t>(head) * tiling.valueStride + at]",
        "valuesGm[at]",
        "",
    ),
    "weights are used before they are spread": (
        "AscendC::BrcbRepeatParams(1, FLOAT_BLOCK));\n        AscendC::PipeBarrier<PIPE_V>();",
        "AscendC::BrcbRepeatParams(1, FLOAT_BLOCK));",
        "race",
    ),
    "rows are spread too densely": (
        "still(1, 1, Narrow<uint8_t>(lanes / FLOAT_BLOCK), 0)",
        "still(1, 1, FLOAT_BLOCK, 0)",
        "uninit|race|",
    ),
    "an odd row in the middle is left out": (
        "n -= half;\n        AscendC::Add(rows, rows, rows[n * lanes]",
        "n = half;\n        AscendC::Add(rows, rows, rows[n * lanes]",
        "",
    ),
}
MAX = BATCHES | {
    "lanes beyond the columns hold what was there": ("ClearBuffers(rowQueue, floats);", "", "uninit"),
    "rows are compared before they are multiplied": (
        "PipeBarrier<PIPE_V>();  // rows may have just been multiplied",
        "",
        "race",
    ),
    "a row of an odd number is left out": (
        "uint32_t count = n - n / 2;",
        "uint32_t count = (n + 1) / 2 - n % 2;",
        "uninit|",
    ),
    "the middle of a fold is left out": ("count -= half;", "count = half;", ""),
    "the mask is read before it is there": (
        "CMPMODE::EQ, n * lanes);\n            PipeBarrier<PIPE_V>();\n            Select(level, mask, ties",
        "CMPMODE::EQ, n * lanes);\n            Select(level, mask, ties",
        "race",
    ),
    "a batch forgets the one before": ("if (fresh) {\n            Max(out", "if (true) {\n            Max(out", ""),
    "those that attained less are counted": (
        "Select(known, before, known, 0.0f, SELMODE::VSEL_TENSOR_SCALAR_MODE, lanes);",
        "",
        "",
    ),
    "those that attain less are counted": ("Compare(now, top, next", "Compare(now, next, next", ""),
    "NaN is not looked for": ("noteGm.GetValue(0) != 0", "false", ""),
    "NaN is attained by those that are not": (
        "Select(known, mask, known, numbers, SELMODE::VSEL_TENSOR_TENSOR_MODE, lanes);",
        "",
        "",
    ),
    "NaN of the batch before is forgotten": (
        "if (fresh) {\n            Adds(numbers",
        "if (true) {\n            Adds(numbers",
        "",
    ),
    "vertices without entries are passed over": (
        "for (; vertex < cursor.vertex; ++vertex) {",
        "for (; false;) {",
        "",
    ),
    "results of the slice before": ("tiling.ldy + column;", "tiling.ldy;", "race|uninit|"),
}
MAX_BACKWARD = BATCHES | {
    "lanes beyond the columns hold what was there": ("ClearBuffers(rowQueue, 3 * floats);", "", "uninit"),
    "shares of another slice": ("Narrow<uint16_t>((tiling.ldy - width) / FLOAT_BLOCK)", "0", ""),
    "all vertices have the row of the first": (
        "own += lanes;\n            for (; at < end; ++at) {",
        "for (; at < end; ++at) {",
        "uninit|race|",
    ),
    "the next batch begins with the vertex of this": (
        "ahead = batches.Find(ahead.vertex + 1);",
        "",
        "local bounds|uninit|race|",
    ),
    "gradients are not multiplied": ("batches.Multiply(rows[floats], rows[floats], false, 0, n, lanes);", "", ""),
    "messages have the weights of the batch's first": ("own, true, at, n, lanes", "own, true, 0, n, lanes", ""),
    "NaN attains nothing": ("noteGm.GetValue(0) != 0", "false", ""),
    "shares are added before they are picked": (
        "n * lanes);\n        PipeBarrier<PIPE_V>();\n        FoldSum(shares",
        "n * lanes);\n        FoldSum(shares",
        "race",
    ),
    "a batch forgets the one before": ("if (fresh) {\n            Adds(out", "if (true) {\n            Adds(out", ""),
    "vertices without entries are passed over": (
        "for (; vertex < cursor.vertex; ++vertex) {",
        "for (; false;) {",
        "",
    ),
}
FAULTS_OF = {
    "aggregate_update": UPDATE,
    "aggregate_vector": VECTOR,
    "gather_rows": GATHER,
    "aggregate_gathered": GATHERED,
    "aggregate_max": MAX,
    "aggregate_max_backward": MAX_BACKWARD,
}
FILES = {
    "aggregate_update": ["aggregate_update.cpp", "row_sums.h"],
    "aggregate_vector": ["aggregate_vector.cpp", "row_sums.h"],
    "aggregate_gathered": ["aggregate_gathered.cpp", "aggregate_gatherer.h", "dense_tile.h"],
    "aggregate_max": ["aggregate_max.cpp", "entry_batches.h"],
    "aggregate_max_backward": ["aggregate_max_backward.cpp", "entry_batches.h"],
}


@pytest.fixture
def faulty(tmp_path, monkeypatch):
    """Call it to have a faulty kernel run in place of the right one; a slice of the tests builds its own only."""

    def put(kernel, fault):
        old, new, _ = FAULTS_OF[kernel][fault]
        for source in (*CSRC.glob("*.h"), CSRC / f"{kernel}.cpp"):
            shutil.copy(source, tmp_path)
        files = FILES.get(kernel, [f"{kernel}.cpp"])
        found = [name for name in files if old in (CSRC / name).read_text()]
        assert len(found) == 1, f"{old!r} stands in {found} of {files}"
        text = (CSRC / found[0]).read_text()
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {found[0]}"
        (tmp_path / found[0]).write_text(text.replace(old, new))
        # A kernel of the same name would take the right one's place for the rest of the process.
        source, name = tmp_path / f"{kernel}.cpp", f"faulty_{kernel}_{list(FAULTS_OF[kernel]).index(fault)}"
        source.write_text(source.read_text().replace(f"void {kernel}(", f"void {name}("))
        whole, twin = default_twin(), Twin([source])

        def launch(called, *arguments, **options):
            if called == kernel:
                return twin.launch(name, *arguments, **options)
            return whole.launch(called, *arguments, **options)

        monkeypatch.setattr(run, "default_twin", lambda: SimpleNamespace(launch=launch))

    return put


def noticed(call, rules):
    """A violation of one of the rules, or, where "" is among them, a wrong result."""
    with pytest.raises((TwinViolation, AssertionError)) as caught:
        call()
    if isinstance(caught.value, TwinViolation):
        assert any(rule and caught.value.rule.startswith(rule) for rule in rules.split("|")), caught.value
    else:
        assert "" in rules.split("|"), caught.value


def waves():
    """Compare aggregate_gathered with the reference: full and thin tiles, heads, split rows, NaN and infinity."""
    draw = np.random.default_rng(0)
    full = np.divmod(np.arange(100 * 120), 120)
    thin = draw.integers(0, 500, 900), draw.integers(0, 700, 900)
    chunks = chunked(*(np.concatenate(pair) for pair in zip(full, thin, strict=True)), 500, 7, most_entries=400)
    for strange in ("row", "full weight", "thin weight", "nothing"):
        x = draw.integers(-4, 5, (700, 400)).astype(np.float16)  # several batches a core
        weights = draw.integers(1, 4, (chunks.source.size, 2)).astype(np.float32)
        if strange == "row":
            x[690, 20] = np.nan
        elif strange != "nothing":
            edges = (chunks.target < 100) & (chunks.source < 120) if strange == "full weight" else chunks.target > 400
            weights[np.flatnonzero(edges)[-1], 1] = np.inf
        for kept, groups, members, seed in ((False, 1, 3, 0), (False, 3, 2, 3), (True, 1, 2, 0), (True, 3, 2, 5)):
            options = {"members": members, "kept": kept, "seed": seed}
            y = run.aggregate_gathered(chunks, x, 500, chunks.even_ranges(4), groups, weights, 2, **options)
            expected, size = aggregated(chunks, x, 500, weights, 2)
            finite = np.isfinite(expected)
            assert np.array_equal(np.isnan(y), np.isnan(expected))
            assert np.array_equal(y[np.isinf(expected)], expected[np.isinf(expected)])
            check(y[finite], expected[finite], size[finite])


def sums():
    """Compare aggregate_vector with the reference: lists, a hub, vertices of one edge and of none, two heads."""
    draw = np.random.default_rng(0)
    target = np.concatenate([np.full(1500, 7), draw.integers(0, 600, 1100)])
    chunks = chunked(target, draw.integers(0, 200, target.size), 700, 9)
    x = draw.integers(-4, 5, (200, 80)).astype(np.float16)
    weights = draw.integers(1, 4, (target.size, 2)).astype(np.float32)
    expected, size = aggregated(chunks, x, 700, weights, 2)
    for ranges, groups, seed in ((1, 1, 0), (1, 1, 3), (4, 2, 0), (4, 2, 5)):
        y = run.aggregate_vector(chunks, x, 700, chunks.even_ranges(ranges), groups, weights, 2, seed=seed)
        check(y, expected, size)


def layers():
    """Compare the kernel's results, with more tiles than a flag can count, with what they should be."""
    draw = np.random.default_rng(0)
    target = np.sort(draw.integers(0, 2400, 4000))
    target = target[target % 9 != 4]
    indptr, indices = np.searchsorted(target, np.arange(2401)), draw.integers(0, 1400, target.size)
    x, b, own = (draw.integers(-4, 5, shape).astype(np.float16) for shape in [(1400, 20), (20, 30), (20, 30)])
    sums = np.zeros((2400, 20))
    np.add.at(sums, target, x[indices].astype(float))
    sums /= np.maximum(np.diff(indptr), 1)[:, None]
    expected = sums @ b.astype(float)
    expected[:900] += x[:900].astype(float) @ own.astype(float)
    for blocks, seed in ((1, 0), (1, 3), (3, 0), (3, 5)):
        _, y = run.aggregate_update(
            x, indptr, indices, b, own, own_rows=900, mean=True, transpose_b=True, blocks=blocks, seed=seed
        )
        np.testing.assert_allclose(y, expected, rtol=1e-2, atol=0.2)


def test_the_kernel_as_it_is_passes():
    layers()


def test_aggregate_vector_as_it_is_passes():
    sums()


@pytest.mark.parametrize("fault", VECTOR)
def test_a_fault_of_aggregate_vector_is_noticed(faulty, fault):
    faulty("aggregate_vector", fault)
    noticed(sums, VECTOR[fault][2])


@pytest.mark.parametrize("fault", UPDATE)
def test_a_fault_of_aggregate_update_is_noticed(faulty, fault):
    faulty("aggregate_update", fault)
    noticed(layers, UPDATE[fault][2])


def test_aggregate_gathered_as_it_is_passes():
    waves()


@pytest.mark.parametrize("fault", GATHERED)
def test_a_fault_of_aggregate_gathered_is_noticed(faulty, fault):
    faulty("aggregate_gathered", fault)
    noticed(waves, GATHERED[fault][2])


@pytest.mark.parametrize("fault", MAX)
def test_a_fault_of_aggregate_max_is_noticed(faulty, fault):
    faulty("aggregate_max", fault)
    noticed(maxima, MAX[fault][2])


@pytest.mark.parametrize("fault", MAX_BACKWARD)
def test_a_fault_of_aggregate_max_backward_is_noticed(faulty, fault):
    faulty("aggregate_max_backward", fault)
    noticed(maxima, MAX_BACKWARD[fault][2])


@pytest.mark.parametrize("fault", GATHER)
def test_a_fault_of_gather_rows_is_noticed(faulty, fault):
    faulty("gather_rows", fault)
    table = np.arange(100, dtype=np.float32).reshape(20, 5)

    def gather():
        for seed in (0, 3):
            run.gather_rows(table, np.array([3, 19, 25, 0, 7] * 9), 4, seed=seed)

    noticed(gather, GATHER[fault][2])
