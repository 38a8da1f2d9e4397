"""Resource usage of compiled kernels (registers, shared memory, occupancy); does not require a GPU.

The sampling kernels are compiled here. ``tests.ptx.layer_counts`` gives the PTX of the layers' kernels.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lightning_gnn.triton_kernels.emit import emit_bulk_kernel, emit_kernel
from lightning_gnn.triton_kernels.hops import hop_kernel
from lightning_gnn.triton_kernels.queue import queue_kernel
from lightning_gnn.triton_kernels.relations import emit_relations_kernel, relation_kernel

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
CUOBJDUMP = TOOLS / "cuobjdump"
LONG = (
    "indptr",
    "seeds",
    "control",
    "state",
    "table",
    "sizes",
    "out",
    "totals",
    "queue",
    "offset",
    "begins",
    "places",
)
OUTPUTS = ("node_out", "batch_out", "edge_index_out", "edge_out")
INTS = ("nodes", "trees", "rowptr", "degrees", "src", "col", "mark", "stage", "ticket_of")
TILES = {"R": 256, "T": 256}
NUM_WARPS = 8
SHARED = {80: 164, 90: 228}
"""KB of shared memory per multiprocessor; 65,536 registers and 64 warps on both."""
_PLAIN = {"DISJOINT": False, "K": 10, **TILES}
_TYPED = {**dict.fromkeys(("DISJOINT", "TEMPORAL", "WEIGHTED", "LABOR"), False), "T": 32 * NUM_WARPS}
VARIANTS: dict[tuple[str, str], tuple[Any, dict[str, Any]]] = {
    ("hop_kernel", "fanouts to 10"): (hop_kernel, _PLAIN),
    ("hop_kernel", "fanouts to 15"): (hop_kernel, {**_PLAIN, "K": 15}),
    ("hop_kernel", "bulk, fanouts to 10"): (hop_kernel, {**_PLAIN, "BULK": True}),
    ("hop_kernel", "bulk, fanouts to 15"): (hop_kernel, {**_PLAIN, "BULK": True, "K": 15}),
    ("hop_kernel", "disjoint, fanouts to 10"): (hop_kernel, {**_PLAIN, "DISJOINT": True}),
    ("hop_kernel", "shards of 8 GPUs, fanouts to 10"): (hop_kernel, {**_PLAIN, "SHARDS": 8, "SHIFT": 10}),
    ("hop_kernel", "every hop, fanouts to 10"): (hop_kernel, {**_PLAIN, "EVERY": True}),
    ("queue_kernel", "fanouts to 10"): (queue_kernel, {"K": 10, "CHUNK": 10, **TILES}),
    ("relation_kernel", "types"): (relation_kernel, _TYPED),
    ("relation_kernel", "types, times"): (relation_kernel, {**_TYPED, "DISJOINT": True, "TEMPORAL": True}),
    ("relation_kernel", "types, weights"): (relation_kernel, {**_TYPED, "WEIGHTED": True}),
    ("relation_kernel", "types, LABOR"): (relation_kernel, {**_TYPED, "LABOR": True}),
    ("emit_kernel", "one mini-batch"): (emit_kernel, {"DISJOINT": False, "T": 256}),
    ("emit_bulk_kernel", "bulk"): (emit_bulk_kernel, {"HASHED": False, "T": 256}),
    ("emit_relations_kernel", "types"): (emit_relations_kernel, {"DISJOINT": False, "T": 32 * NUM_WARPS}),
}


def compiled(kernel: Any, constants: dict[str, Any], kind: str, capability: int) -> Any:
    """Compile a sampling kernel."""
    pointers = dict.fromkeys(LONG + OUTPUTS, "*i64") | dict.fromkeys(INTS, "*i32")
    usual = {"CACHED": False, "BULK": False, "SHARDS": 1, "SHIFT": 0, "EVERY": False, "HASHED": False}
    constants = {name: value for name, value in usual.items() if name in kernel.arg_names} | constants
    shards = constants.get("SHARDS", 1)
    hot = f"*{kind}" if shards == 1 else "*i64" if shards > 1 else "*i32"
    pointers |= {"indices": f"*{kind}", "hot": hot, "eid": f"*{kind}"}
    signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in kernel.arg_names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if name in pointers and name != "seeds"
    }
    source = ASTSource(kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": NUM_WARPS})


def usage(made: Any) -> dict[str, int]:
    """Return the registers, stack and local memory of a compiled kernel, if CUDA's tool for it is installed."""
    if not CUOBJDUMP.exists():
        return {}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(made.asm["cubin"])
        dump = subprocess.check_output([CUOBJDUMP, "-res-usage", file.name], text=True)
    return {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", dump)}


def resident(registers: int, shared: int, capability: int, warps: int = NUM_WARPS) -> int:
    """Return the number of programs with so many warps that fit on one multiprocessor."""
    by_registers = 65536 // (-(-registers // 8) * 8 * 32 * warps)
    by_shared = SHARED[capability] * 1024 // (shared + 1024)  # the system reserves 1 KB per program
    return min(by_registers, by_shared, 64 // warps, 32)


def usage_of_ptx(ptx: str, shared: int, capability: int) -> dict[str, Any]:
    """Return the resource usage of a kernel that is compiled up to PTX, and takes so many bytes of shared memory."""
    warps = int(re.findall(r"\.reqntid (\d+)", ptx)[0]) // 32
    arch = re.findall(r"\.target (\w+)", ptx)[0]
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        command = [TOOLS / "ptxas", "-v", f"--gpu-name={arch}", source, "-o", cubin]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, stack = (int(re.findall(rf"(\d+) {what}", told)[0]) for what in ("registers", "bytes stack frame"))
    programs = resident(registers, shared, capability, warps)
    return {"registers": registers, "spilled": stack, "shared": shared, "warps": warps,
            "occupancy": programs * warps / 64}  # fmt: skip


def all_kernels() -> list[dict[str, Any]]:
    """Compile every variant for both generations of GPUs, and return its resource usage."""
    rows = []
    for (name, variant), (kernel, constants) in VARIANTS.items():
        for capability in SHARED:
            made = compiled(kernel, constants, "i32", capability)
            needs, shared = usage(made), made.metadata.shared
            programs = resident(needs["REG"], shared, capability)
            rows.append({
                "kernel": name, "variant": variant, "sm": capability, "registers": needs["REG"], "shared": shared,
                "spilled": needs["STACK"] + needs["LOCAL"], "programs": programs,
                "occupancy": programs * NUM_WARPS / 64,
            })  # fmt: skip
    return rows
