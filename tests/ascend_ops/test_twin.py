"""The twin's instructions against numpy; its order of blocks, its counts and its errors."""

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import lightning_gnn.ops.library  # noqa: F401  keeps the compiled libraries
from lightning_gnn.ascend_ops import build
from lightning_gnn.ascend_ops.twin import ReadOnly, Scratch, Twin, TwinViolation

HERE = Path(__file__).parent
BODY = re.search(r"enum Operation : uint32_t \{(.*?)\}", (HERE / "kernels" / "vector_ops.cpp").read_text(), re.DOTALL)
OPERATIONS = [name.strip().lower() for name in BODY.group(1).split(",") if name.strip()]
N = 512


class Empty(ctypes.Structure):
    pass


@pytest.fixture(scope="module")
def twin():
    return Twin([HERE / "kernels" / "vector_ops.cpp", HERE / "kernels" / "copies.cpp"])


def compute_expected(operation, a, b, s):
    """Return the result in float64 for the stored operands, before the last rounding."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    lanes = 256 // a.itemsize
    out = np.zeros(N)
    whole = {
        "add": lambda: x + y, "sub": lambda: x - y, "mul": lambda: x * y, "div": lambda: x / y,
        "maximum": lambda: np.maximum(x, y), "minimum": lambda: np.minimum(x, y),
        "adds": lambda: x + s, "muls": lambda: x * s,
        "maxs": lambda: np.maximum(x, s), "mins": lambda: np.minimum(x, s), "exp": lambda: np.exp(x),
        "ln": lambda: np.log(x), "sqrt": lambda: np.sqrt(x), "abs": lambda: np.abs(x),
        "relu": lambda: np.maximum(x, 0), "reciprocal": lambda: 1 / x, "leaky": lambda: np.where(x >= 0, x, s * x),
        "axpy": lambda: s * x, "mul_add_dst": lambda: x * y, "select_greater": lambda: np.where(x > y, x, y),
        "select_scalar": lambda: np.where(x <= s, x, s),
        "row_add": lambda: (x.reshape(-1, lanes) + y[:lanes]).ravel(),
        "brcb": lambda: np.repeat(x[: N // (32 // a.itemsize)], 32 // a.itemsize),
    }  # fmt: skip
    if operation in whole:
        return whole[operation]()
    if operation == "bit_mask":
        picked = np.arange(N) % lanes
        return np.where((picked % 2 == 0) & ((picked < 64) | (picked == 64)), x * s, 0)
    if operation.startswith("reduce"):
        out[0] = {"max": np.max, "min": np.min, "sum": np.sum}[operation[7:]](x)
    elif operation == "row_sum":
        out[: N // lanes] = x.reshape(-1, lanes).sum(1)
    elif operation == "block_max":
        out[: N // (32 // a.itemsize)] = x.reshape(-1, 32 // a.itemsize).max(1)
    return out


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_vector_instruction_equals_numpy(twin, operation, dtype):
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal(N).astype(dtype), rng.standard_normal(N).astype(dtype)
    b[::7] = a[::7]
    if operation in ("ln", "sqrt"):
        a = np.abs(a) + dtype(0.1)
    if operation in ("div", "reciprocal"):
        a, b = np.abs(a) + dtype(0.5), np.abs(b) + dtype(0.5)
    y = np.full(N, np.nan, dtype)
    kernel = "vector_half" if dtype == np.float16 else "vector_float"
    twin.launch(kernel, [ReadOnly(a), ReadOnly(b), y, N, 0.25, OPERATIONS.index(operation)], 1)
    want = compute_expected(operation, a, b, 0.25)
    if operation in ("row_sum", "reduce_sum"):
        np.testing.assert_allclose(y, want, rtol=0, atol=0.1 if dtype == np.float16 else 1e-4)
    elif dtype == np.float16:
        np.testing.assert_array_equal(y, want.astype(np.float16))  # one rounding of the exact result
    else:
        np.testing.assert_allclose(y, want, rtol=3e-7, atol=1e-12)


def test_rounding_to_fp16_equals_numpy(twin):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 1 << 32, 65536, dtype=np.uint32).view(np.float32)
    x[:32768] = np.ldexp(rng.standard_normal(32768), rng.integers(-28, 18, 32768)).astype(np.float32)
    halves = np.arange(31744, dtype=np.uint16).view(np.float16).astype(np.float32)
    x[:16384] = (halves[:16384] + halves[1:16385]) / 2  # ties
    y = np.zeros(65536, np.float16)
    with np.errstate(over="ignore"):
        want = x.astype(np.float16)
    twin.launch("cast_to_half", [x, y, 65536, 1], 1)
    np.testing.assert_array_equal(y, want)


@pytest.mark.parametrize(("mode", "rule"), [(1, np.rint), (2, np.floor), (3, np.ceil), (5, np.trunc)])
def test_rounding_modes(twin, mode, rule):
    x = (np.arange(4096, dtype=np.float32) - 2048) / 8
    y = np.zeros(4096, np.int32)
    twin.launch("cast_to_int", [x, y, 4096, mode], 1)
    np.testing.assert_array_equal(y, rule(x).astype(np.int32))
    z = np.zeros(4096, np.float16)
    twin.launch("cast_to_half", [x + np.float32(0.0001), z, 4096, mode], 1)
    if mode == 2:
        assert (z <= x + np.float32(0.0001)).all()
    if mode == 3:
        assert (z >= x + np.float32(0.0001)).all()


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 16), (5, 41), (7, 100)])
def test_padded_copies(twin, rows, columns):
    rng = np.random.default_rng(1)
    wide = (columns + 15) // 16 * 16
    x = rng.standard_normal((rows, columns + 5)).astype(np.float16)
    y = np.full((rows, columns + 3), 7, np.float16)
    padded = Scratch(np.zeros((rows, wide), np.float16))
    twin.launch("copy_padded", [x, y, padded, rows, columns, columns + 5, columns + 3, -2.0], 1)
    np.testing.assert_array_equal(y[:, :columns], x[:, :columns])
    np.testing.assert_array_equal(y[:-1, columns:], 7)  # the gaps are unchanged
    np.testing.assert_array_equal(padded.array[:, :columns], x[:, :columns])
    np.testing.assert_array_equal(padded.array[:, columns:], -2)


@pytest.mark.parametrize("seed", [0, 1])
def test_atomic_sums_of_all_blocks(twin, seed):
    x = np.random.default_rng(2).integers(-9, 10, (16, 64)).astype(np.float32)
    y = np.ones(64, np.float32)
    twin.launch("atomic_sum", [x, y, 64], 16, seed=seed)
    np.testing.assert_array_equal(y, 1 + x.sum(0))


@pytest.mark.parametrize("seed", range(4))
def test_blocks_meet_at_a_barrier(twin, seed):
    x = np.random.default_rng(4).standard_normal((8, 32)).astype(np.float32)
    y = np.zeros_like(x)
    twin.launch("rotate_rows", [x, y, Scratch(np.zeros_like(x)), 32, 1], 8, seed=seed)
    np.testing.assert_array_equal(y, np.roll(x, -1, 0))


@pytest.mark.parametrize("seed", range(3))
def test_without_the_barrier_every_order_is_caught(twin, seed):
    """Races are reported even where the schedule happens to give the right numbers."""
    x = np.zeros((8, 32), np.float32)
    with pytest.raises(TwinViolation, match=r"race|uninitialised read"):
        twin.launch("rotate_rows", [x, x.copy(), Scratch(x.copy()), 32, 0], 8, seed=seed)
    with pytest.raises(TwinViolation, match=r"race: .*'workspace', which MTE[23] of block"):
        twin.launch("rotate_rows", [x, x.copy(), x.copy(), 32, 0], 8, seed=seed)


def test_more_blocks_than_cores_cannot_meet(twin):
    x = np.zeros((49, 32), np.float32)
    with pytest.raises(TwinViolation, match=r"49 blocks do not run at once on 48 cores"):
        twin.launch("rotate_rows", [x, x.copy(), Scratch(x.copy()), 32, 1], 49)


def test_counts(twin):
    n, blocks = 64, 4
    x = np.zeros((blocks, n), np.float32)
    result = twin.launch("atomic_sum", [ReadOnly(x), np.zeros(n, np.float32), n], blocks)
    assert result.bytes["gm_to_ub"] == x.nbytes
    assert result.bytes["l2_read"] == x.nbytes
    assert result.bytes["hbm_read"] == x.nbytes  # every line once
    assert result.bytes["gm_write"] == x.nbytes
    assert len(result.cores) == blocks
    assert result.instructions == 2 * blocks
    # The queue's events order copies in and out.
    assert result.makespan >= result.busy("mte2") / blocks + result.busy("mte3") / blocks


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kernel": "nothing"}, "unknown kernel 'nothing'; choose one of"),
        ({"num_blocks": 0}, "num_blocks must be at least 1, but is 0"),
        ({"arch": "920"}, "arch must be '910b' or '910', but is '920'"),
        ({"args": []}, r"takes 3 arguments \['x', 'y', 'n'\], not 0"),
        ({"parameters": {"speed": 1}}, "unknown cost parameters speed; choose from"),
        ({"args": [np.zeros((4, 4))[:, 1], np.zeros(4), 4]}, "argument 'x': the array is not contiguous"),
        ({"args": [1, np.zeros(4), 4]}, "argument 'x' is a pointer"),
        ({"args": [np.zeros(4), np.zeros(4), 1 << 33]}, "does not fit in 4 bytes"),
        ({"args": [np.zeros(4), np.zeros(4), Empty()]}, "must have 4 bytes, but the structure has 0"),
    ],
)
def test_bad_arguments(twin, change, message):
    call = {"kernel": "atomic_sum", "args": [np.zeros(4), np.zeros(4), 4], "num_blocks": 1, **change}
    with pytest.raises(ValueError, match=message):
        twin.launch(**call)


def test_an_endless_kernel_is_stopped(twin):
    x = np.zeros(65536, np.float16)
    with pytest.raises(TwinViolation, match="more than 10 instructions"):
        twin.launch("cast_to_float", [x, np.zeros(65536, np.float32), 65536, 0], 1, max_instructions=10)


def test_missing_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("LIGHTNING_GNN_CACHE", str(tmp_path))
    build.compiler.cache_clear()
    with pytest.raises(build.BuildError, match=r"'no-such-compiler', which is not installed: install g\+\+"):
        build.build([HERE / "kernels" / "copies.cpp"])
    build.compiler.cache_clear()


def test_a_build_is_used_again(capsys):
    sources = [HERE / "kernels" / "copies.cpp"]
    first = build.build(sources)
    capsys.readouterr()
    assert build.build(sources) == first
    assert capsys.readouterr().err == ""


ALL_KERNELS = """
import functools, sys
import pytest
from lightning_gnn.ascend_ops import twin
twin.Twin = functools.partial(twin.Twin, sanitize=True)
options = ["-q", "-n0", "-p", "no:cacheprovider", "--tb=short", "--hypothesis-profile=small"]
files = ["tests/ascend_ops/test_kernels.py", "tests/ascend_ops/test_mini_batches.py"]
files += ["tests/ascend_ops/test_max.py::test_cores_may_run_in_any_order", "tests/ascend_ops/test_mutations.py"]
sys.exit(pytest.main([*options, *files, "-k", "not compile and not narrowed and not layers_equal"]))
"""


def sanitizer_environment():
    """Return the environment of a Python process that loads libraries built with ``sanitize=True``."""
    path, _ = build.compiler()
    # Preload libstdc++ too: at startup, before Python loads it, the sanitizer looks up the real __cxa_throw.
    queries = [[path, f"-print-file-name={name}"] for name in ("libasan.so", "libstdc++.so")]
    libraries = [subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip() for query in queries]
    return {
        "LD_PRELOAD": " ".join(libraries),
        # Python leaks by design, and stack-use-after-return cannot follow the twin's coroutines, which switch stacks.
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    }


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="preloads the address sanitizer's library")
def test_all_kernels_under_the_sanitizers():
    """Run the tests of the kernels and of every planted fault with address and undefined-behavior sanitizers."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment |= sanitizer_environment()
    command = [sys.executable, "-c", ALL_KERNELS]
    done = subprocess.run(command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "[100%]" in done.stdout
