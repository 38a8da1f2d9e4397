"""Kernels with planted faults: each must be reported with the right rule and message; the correct kernel passes."""

import re
from pathlib import Path

import numpy as np
import pytest

from lightning_gnn.ascend_ops.twin import Scratch, Twin, TwinViolation

FOLDER = Path(__file__).parent / "mutations"


def list_faults(name):
    body = re.search(r"enum Fault : uint32_t \{(.*?)\}", (FOLDER / name).read_text(), re.DOTALL).group(1)
    return {fault.strip(): number for number, fault in enumerate(body.split(",")) if fault.strip()}


SCALE, MULTIPLY = list_faults("scale_rows.cpp"), list_faults("multiply.cpp")

# fault -> rule, message (regular expressions); the message must contain the numbers needed to fix the kernel
SCALE_CAUGHT = {
    "MISSING_ENQUE": ("queue state", r"DeQue of the empty VECIN queue \(line \d+\): EnQue is missing"),
    "USED_BEFORE_DEQUE": ("queue state", r"Muls: reads a tensor of the VECIN queue .* between EnQue and DeQue"),
    "FREED_TWICE": ("queue state", r"FreeTensor: the tensor of the VECIN queue .* is already free"),
    "NEVER_FREED": ("queue state", r"all 2 buffers of the VECIN queue .* in use.*FreeTensor is missing"),
    "NEVER_DEQUED": ("queue depth", r"VECIN queue .* has depth 1 and already holds 1"),
    "USED_AFTER_FREE": ("queue state", r"Adds: reads a tensor of the VECIN queue .* after FreeTensor"),
    "QUEUE_TOO_DEEP": ("queue depth", r"has depth 1 and already holds 1 tensors"),
    "FOREIGN_QUEUE": ("queue state", r"EnQue of a tensor that this VECIN queue .* has not allocated"),
    "ODD_COUNT": ("alignment", r"whole 32-byte blocks, but 63 elements are 252 bytes: use DataCopyPad"),
    "MISALIGNED_ADDRESS": ("alignment", r"writes UB at byte 8, which is not a multiple of 32"),
    "UB_OVERFLOW": ("local memory", r"UB overflow: .* VECCALC needs 196608 bytes, 1024 are taken, UB has 196608"),
    "TOO_MANY_BUFFERS": ("local memory", r"at most 64 buffers"),
    "LOCAL_BOUNDS": ("local bounds", r"writes bytes 0 to 288 of a tensor of 256 bytes in UB"),
    "ROW_OUT_OF_BOUNDS": ("global bounds", r"reads elements 768 to 832 of 'x', whose GlobalTensor has 768 elements"),
    "DECLARED_BOUNDS": ("global bounds", r"of 'x', whose GlobalTensor has 64 elements of 4 bytes"),
    "BLOCKS_RACE": ("race", r"writes element 0 of 'y', which MTE3 of block \d, vector core 0 .* wrote.*flag"),
    "SINGLE_BUFFER": ("double buffer", r"VECIN queue has one buffer .*: MTE2 and the vector unit never overlap"),
    "MISSING_MTE2_S": ("race", r"the scalar unit reads UB .* MTE2 wrote .*WaitFlag<HardEvent::MTE2_S> are missing"),
    "MISSING_V_MTE3": ("race", r"MTE3 reads UB .*the vector unit wrote .*HardEvent::V_MTE3.*VECOUT queue"),
    "MISSING_PIPE_BARRIER": ("race", r"PipeBarrier<PIPE_V> is missing"),
    "UNINITIALISED": ("uninitialised read", r"Add: reads UB at byte \d+, which nothing has written"),
    "EVENT_TWICE": ("event set twice", r"SetFlag<V_MTE2>\(7\) again without WaitFlag .*: first set at line \d+"),
    "WAIT_NEVER_SET": ("flag never set", r"WaitFlag<MTE3_V>\(5\) waits for a flag that no SetFlag has set"),
    "SET_NEVER_WAITED": ("flag never waited", r"SetFlag<V_S>\(3\) has no WaitFlag"),
    "EVENT_ID": ("event id", r"id 8, but a pair of pipes has ids 0 to 7"),
    "REPEAT_TIMES": ("parameter range", r"Add: repeatTimes is 300, it must be from 0 to 255"),
    "NARROWED": (
        "assertion",
        r"\(repeats <= 255\) does not hold; the last instruction before it is at line \d+ of .*cpp",
    ),
    "OVERLAP": ("operand overlap", r"overlap in part"),
    "CUBE_ON_VECTOR": ("core separation", r"Mmad: a cube instruction on a vector core"),
    "L1_ON_VECTOR": ("core separation", r"vector core 0 has no L1"),
    "CROSS_FLAG": ("cross-core flag", r"cannot use CrossCoreSetFlag: use a mixed type"),
    "ATOMIC_LEFT_ON": ("atomic mode", r"call SetAtomicNone"),
    "ATOMIC_TYPE": ("atomic type", r"another element type than the tensor's"),
    "SYNC_ALL_LEFT": ("deadlock", r"SyncAll waits for block 0, vector core 0, which has already left"),
    "SELECT_WITHOUT_ROOM": ("local memory", r"Select works in the last 8192 bytes of UB, but .* leave only \d+"),
}

MULTIPLY_CAUGHT = {
    "VECTOR_ON_CUBE": ("core separation", r"Duplicate: a vector instruction on the cube core"),
    "UB_ON_CUBE": ("core separation", r"cube core has no UB"),
    "L0A_OVERFLOW": ("local memory", r"L0A overflow: .* A2 needs 2048 bytes, 65536 are taken, L0A has 65536"),
    "L0C_OVERFLOW": ("local memory", r"L0C overflow: .* L0C has 131072"),
    "K_NOT_FRACTAL": ("fractal", r"k is 20: the cube works on whole 16x16 fractals"),
    "M_IS_ONE": ("m == 1", r"switches to GEMV"),
    "M_TOO_LARGE": ("parameter range", r"m is 4096, it must be from 1 to 4095"),
    "WRONG_SOURCE_STRIDE": ("fractal", r"fractal \(0, 1\) of L0A was loaded from L1 byte 512, but .* at byte 1024"),
    "HALF_TRANSPOSED": ("fractal", r"of L0B was loaded with another ifTranspose"),
    "L0_MISALIGNED": ("alignment", r"writes L0A at byte 32, which is not a multiple of 512"),
    "LOAD_REPEAT": ("parameter range", r"LoadData: repeatTimes is 256, it must be from 1 to 255"),
    "ND2NZ_STRIDE": ("parameter range", r"dstNzC0Stride is 16400, it must be from 1 to 16384"),
    "FIXPIPE_STRIDE": ("fractal", r"srcStride is 16: .* at least mSize = 32"),
    "FIXPIPE_SHORT_RUN": ("fractal", r"srcStride is 16, but Mmad wrote L0C with 32 rows"),
    "FIXPIPE_ROWS_OVERLAP": ("parameter range", r"dstStride is 16, less than nSize = 32: rows .* lie over each other"),
    "FIXPIPE_COLUMNS": ("fractal", r"nSize is 24: it must be a multiple of 16"),
    "FIXPIPE_QUANT": ("quant mode", r"NoQuant"),
    "MISSING_PIPE_M": ("accumulation", r"4 result fractals are fewer than 10: PipeBarrier<PIPE_M> is needed"),
    "MISSING_M_FIX": ("race", r"FIX reads L0C .* the cube unit wrote .*M_FIX"),
    "ONE_VECTOR_CORE_SILENT": ("deadlock", r"block 0, cube core waits at line \d+ for cross-core flag 0"),
    "EXTRA_SET": ("cross-core flag", r"flag 5 is still set 1 times at the end"),
    "MISSING_READY": ("race|uninitialised read", r"'workspace', which (MTE3 of block|nothing has written)"),
    "MISSING_FREE": ("race", r"writes element \d+ of 'workspace'"),
    "RESERVED_FLAG": ("cross-core flag", r"flag id 12 belongs to SyncAll"),
    "STALE_PADDING": ("uninitialised read", r"reads element \d+ of 'workspace', which nothing has written"),
    "SYNC_ALL_OF_VECTORS": ("core separation", r"SyncAll<true> is a barrier of the vector cores"),
    "EVENT_IDS_SPENT": ("event id", r"all 8 ids of M_MTE1 are in use"),
}


@pytest.fixture(scope="module")
def twin():
    return Twin([FOLDER / "scale_rows.cpp", FOLDER / "multiply.cpp"])


def run_scale(twin, fault, seed=0, rows=12):
    x = np.arange(rows * 64, dtype=np.float32).reshape(rows, 64)
    y = np.zeros_like(x)
    twin.launch("scale_rows", [x, y, rows, 64, SCALE[fault]], 4, seed=seed, require_double_buffer=True)
    np.testing.assert_array_equal(y, 2 * x)


def run_multiply(twin, fault, seed=0):
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-4, 5, shape).astype(np.float16) for shape in [(3, 4, 32, 32), (32, 32)])
    y = np.zeros((3, 32, 32), np.float32)
    workspace = Scratch(np.zeros((3, 32, 32), np.float16))
    twin.launch("multiply", [a, b, y, workspace, 4, MULTIPLY[fault]], 3, seed=seed)
    np.testing.assert_array_equal(y, a.astype(np.float32).sum(1) @ b.astype(np.float32))


def check_violation(violation, source, rule, message):
    assert re.fullmatch(rule, violation.rule), str(violation)
    assert re.search(message, violation.message), str(violation)
    assert Path(violation.file).name == source
    assert violation.line > 0
    assert violation.block >= 0
    assert violation.core
    assert f"{source}:{violation.line}" in str(violation)


def test_every_fault_is_tried():
    assert set(SCALE) == {"NONE", *SCALE_CAUGHT}
    assert set(MULTIPLY) == {"NONE", *MULTIPLY_CAUGHT}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_correct_kernels_pass(twin, seed):
    run_scale(twin, "NONE", seed)
    run_multiply(twin, "NONE", seed)


@pytest.mark.parametrize("fault", SCALE_CAUGHT)
def test_vector_fault_is_caught(twin, fault):
    with pytest.raises(TwinViolation) as caught:
        run_scale(twin, fault)
    check_violation(caught.value, "scale_rows.cpp", *SCALE_CAUGHT[fault])


@pytest.mark.parametrize("fault", MULTIPLY_CAUGHT)
def test_cube_fault_is_caught(twin, fault):
    with pytest.raises(TwinViolation) as caught:
        run_multiply(twin, fault)
    check_violation(caught.value, "multiply.cpp", *MULTIPLY_CAUGHT[fault])


@pytest.mark.parametrize(
    ("fault", "message"),
    [("NEVER_FREED", "was never freed"), ("NEVER_DEQUED", "is still in the VECIN queue .*DeQue is missing")],
)
def test_tensors_left_at_the_end(twin, fault, message):
    """One row for every block: the queue never fills up, so only the end of the kernel shows the fault."""
    with pytest.raises(TwinViolation) as caught:
        run_scale(twin, fault, rows=4)
    check_violation(caught.value, "scale_rows.cpp", "queue state", message)


def test_single_buffer_is_a_remark_unless_required(twin):
    """It also costs time: with one buffer, the copy of a row waits for the previous row."""
    x = np.ones((64, 64), np.float32)
    runs = [
        twin.launch("scale_rows", [x, np.zeros_like(x), 64, 64, SCALE[fault]], 1) for fault in ("NONE", "SINGLE_BUFFER")
    ]
    assert runs[0].lints == []
    assert len(runs[1].lints) == 1
    assert "VECIN queue has one buffer" in runs[1].lints[0]
    assert runs[1].makespan > runs[0].makespan
