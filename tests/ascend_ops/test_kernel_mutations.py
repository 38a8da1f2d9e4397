"""Two kernels (a vector and cube pipeline, a queue of rows) with faults: a rule or a wrong result shows each."""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from lightning_gnn.ascend_ops.build import CSRC
from lightning_gnn.ascend_ops.twin import Twin, TwinViolation, default_twin
from lightning_gnn.ops import library  # noqa: F401  keeps the compiled libraries
from tests.ascend_ops import run_kernels as run
from tests.ascend_ops.chunk_arrays import build_chunks
from tests.ascend_ops.test_kernels import aggregate_exactly, assert_close

pytestmark = [pytest.mark.skipif(shutil.which("g++") is None, reason="the twin needs g++"), pytest.mark.slow]

# line of the kernel -> its replacement, and the rules that may detect it; "" is a wrong result
UPDATE = {
    "the cube core does not wait for the sums": ("CrossCoreWaitFlag(FLAG_SUMMED);", "", "race|cross-core flag|uninit"),
    "the vector cores do not say that they are done": (
        "CrossCoreSetFlag<0x2, PIPE_MTE3>(FLAG_SUMMED);",
        "",
        "deadlock|cross-core flag",
    ),
    "said before the sums are written": ("<0x2, PIPE_MTE3>(FLAG_SUMMED)", "<0x2, PIPE_S>(FLAG_SUMMED)", "race|uninit"),
    "vector cores run ahead without end": ("if (ahead == AHEAD) {", "if (false) {", "cross-core flag"),
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
    "a row of another row's own": ("Multiply(sum, xGm, first, own,", "Multiply(sum, xGm, 0, own,", ""),
    "each core sums a half too much": (
        "Least(first + TILE / 2, tiling.rows)",
        "Least(first + TILE, tiling.rows)",
        "race",
    ),
}

# The same for aggregate_vector: groups of rows are copied while others are added.
VECTOR = {
    "a group is asked for that has no room": ("e + BUFFER_NUM * atOnce", "e + 3 * atOnce", "queue"),
    "a list's last group is as long as the others": ("Least(n - asked, atOnce)", "atOnce", "uninit|global bounds"),
    "a group is given back before it is read": (
        "AscendC::Cast(wide, group,",
        "rowQueue.FreeTensor(group);\n        AscendC::Cast(wide, group,",
        "queue",
    ),
    "rows are added before they are float32": (
        "AscendC::PipeBarrier<PIPE_V>();\n            if (weighted)",
        "if (weighted)",
        "race",
    ),
    "every group has the weights of the first": ("weights.GetValue(e + i)", "weights.GetValue(i)", ""),
    "a vertex keeps the sums of the one before": (
        "outQueue.FreeTensor(out);\n        Clear();",
        "outQueue.FreeTensor(out);",
        "",
    ),
    "the last vertex is not sent away": ("end);\n            Close();", "end);", ""),
    "sums of a result that is still on its way": ("out = outQueue.DeQue<half>();", "", "queue"),
}

FAULTS_OF = {"aggregate_update": UPDATE, "aggregate_vector": VECTOR}


@pytest.fixture
def faulty(tmp_path, monkeypatch):
    """Return a function that replaces a kernel by a faulty one; each test slice builds only its own kernels."""

    def put(kernel, fault):
        old, new, _ = FAULTS_OF[kernel][fault]
        for source in (*CSRC.glob("*.h"), CSRC / f"{kernel}.cpp"):
            shutil.copy(source, tmp_path)
        files = [f"{kernel}.cpp", "row_sums.h"]
        found = [name for name in files if old in (CSRC / name).read_text()]
        assert len(found) == 1, f"{old!r} stands in {found} of {files}"
        text = (CSRC / found[0]).read_text()
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {found[0]}"
        (tmp_path / found[0]).write_text(text.replace(old, new))
        # A kernel of the same name would replace the correct one for the rest of the process.
        source, name = tmp_path / f"{kernel}.cpp", f"faulty_{kernel}_{list(FAULTS_OF[kernel]).index(fault)}"
        source.write_text(source.read_text().replace(f"void {kernel}(", f"void {name}("))
        whole, twin = default_twin(), Twin([source])

        def launch(called, *arguments, **options):
            if called == kernel:
                return twin.launch(name, *arguments, **options)
            return whole.launch(called, *arguments, **options)

        monkeypatch.setattr(run, "default_twin", lambda: SimpleNamespace(launch=launch))

    return put


def assert_detected(call, rules):
    """Expect a violation of one of the rules or, if "" is among them, a wrong result."""
    with pytest.raises((TwinViolation, AssertionError)) as caught:
        call()
    if isinstance(caught.value, TwinViolation):
        assert any(rule and caught.value.rule.startswith(rule) for rule in rules.split("|")), caught.value
    else:
        assert "" in rules.split("|"), caught.value


def compare_sums():
    """Compare aggregate_vector with the reference: lists, a hub, targets with one edge or none, two heads."""
    draw = np.random.default_rng(0)
    target = np.concatenate([np.full(1500, 7), draw.integers(0, 600, 1100)])
    chunks = build_chunks(target, draw.integers(0, 200, target.size), 700, 9)
    x = draw.integers(-4, 5, (200, 80)).astype(np.float16)
    weights = draw.integers(1, 4, (target.size, 2)).astype(np.float32)
    expected, size = aggregate_exactly(chunks, x, 700, weights, 2)
    for ranges, groups, seed in ((1, 1, 0), (1, 1, 3), (4, 2, 0), (4, 2, 5)):
        y = run.aggregate_vector(chunks, x, 700, chunks.even_ranges(ranges), groups, weights, 2, seed=seed)
        assert_close(y, expected, size)


def compare_layers():
    """Compare the kernel's results with the reference; there are more tiles than a flag can count."""
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
    compare_layers()


def test_aggregate_vector_as_it_is_passes():
    compare_sums()


@pytest.mark.medium
@pytest.mark.parametrize("fault", VECTOR)
def test_a_fault_of_aggregate_vector_is_noticed(faulty, fault):
    faulty("aggregate_vector", fault)
    assert_detected(compare_sums, VECTOR[fault][2])


@pytest.mark.slow
@pytest.mark.parametrize("fault", UPDATE)
def test_a_fault_of_aggregate_update_is_noticed(faulty, fault):
    faulty("aggregate_update", fault)
    assert_detected(compare_layers, UPDATE[fault][2])
