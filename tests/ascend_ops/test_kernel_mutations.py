"""aggregate_update and gather_rows with lines taken out or changed: the twin, or a wrong result, must say so."""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from lightning_gnn.ascend_ops.build import CSRC
from lightning_gnn.ascend_ops.twin import Twin, TwinViolation
from lightning_gnn.ops import library  # noqa: F401  keeps what is compiled
from tests.ascend_ops import run_kernels as run

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
        "PipeBarrier<PIPE_V>();  // the row before may still be read",
        "",
        "race",
    ),
    "the lists are read before they are there": ("Sync<HardEvent::MTE2_S>();", "", "race|uninit"),
    "lists are overwritten while they are read": ("Sync<HardEvent::S_MTE2>();", "", "race"),
    "rows without edges keep the sums before": (
        "Duplicate(sumBuffer.Get<float>(), 0.0f, static_cast<int32_t>(width));",
        "",
        "uninit|race|",
    ),
    "an edge of the next row is added to this one": ("start + i >= rowEnd", "start + i > rowEnd", ""),
    "the mean forgets an edge": ("(rowEnd - rowBegin)),", "(rowEnd - rowBegin + 1)),", ""),
    "a row of another row's own": ("Multiply(sum, xGm, first, own,", "Multiply(sum, xGm, 0, own,", ""),
    "own weights from the wrong place": ("column, n, tiling.ownOffset);", "column, n, 0);", ""),
    "each core sums a half too much": (
        "Least(first + TILE / 2, tiling.rows)",
        "Least(first + TILE, tiling.rows)",
        "race",
    ),
}


GATHER = {
    "an index outside the table is followed": ("row < tiling.tableRows ?", "true ?", "global bounds"),
    "indices are read before they are there": ("Sync<HardEvent::MTE2_S>();", "", "race|uninit"),
    "the last batch is as long as the others": ("Least(end - i, tiling.batch)", "tiling.batch", "global bounds|race"),
}

FAULTS = [("aggregate_update", fault) for fault in UPDATE] + [("gather_rows", fault) for fault in GATHER]


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """All faulty kernels, each by a name of its own; call it to have one run in place of the right one."""
    folder = tmp_path_factory.mktemp("faulty")
    for header in CSRC.glob("*.h"):
        shutil.copy(header, folder)
    paths = []
    for number, (kernel, fault) in enumerate(FAULTS):
        old, new, _ = (UPDATE if kernel == "aggregate_update" else GATHER)[fault]
        text = (CSRC / f"{kernel}.cpp").read_text()
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {kernel}.cpp"
        paths.append(folder / f"faulty_{number}.cpp")
        paths[-1].write_text(text.replace(old, new).replace(f"void {kernel}(", f"void faulty_{number}("))
    twin = Twin(paths)

    def in_place_of(monkeypatch, kernel, fault):
        name = f"faulty_{FAULTS.index((kernel, fault))}"
        stand_in = SimpleNamespace(launch=lambda _, *arguments, **options: twin.launch(name, *arguments, **options))
        monkeypatch.setattr(run, "default_twin", lambda: stand_in)

    return in_place_of


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


@pytest.mark.parametrize("fault", UPDATE)
def test_a_fault_of_aggregate_update_is_noticed(monkeypatch, faulty, fault):
    faulty(monkeypatch, "aggregate_update", fault)
    rules = UPDATE[fault][2]
    with pytest.raises((TwinViolation, AssertionError)) as caught:
        layers()
    if isinstance(caught.value, TwinViolation):
        assert any(rule and caught.value.rule.startswith(rule) for rule in rules.split("|")), caught.value
    else:
        assert "" in rules.split("|"), caught.value


@pytest.mark.parametrize("fault", GATHER)
def test_a_fault_of_gather_rows_is_noticed(monkeypatch, faulty, fault):
    faulty(monkeypatch, "gather_rows", fault)
    rules = GATHER[fault][2]
    table = np.arange(100, dtype=np.float32).reshape(20, 5)

    def gather():
        for seed in (0, 3):
            run.gather_rows(table, np.array([3, 19, 25, 0, 7] * 9), 4, seed=seed)

    with pytest.raises(TwinViolation) as caught:
        gather()
    assert any(caught.value.rule.startswith(rule) for rule in rules.split("|")), caught.value
