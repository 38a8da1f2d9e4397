"""Compile the sampling kernels for GPUs that need not be installed; run by ``compiling.py``."""

import re

from benchmarks.gpu.baselines import discover_kernel, phase_kernel
from benchmarks.gpu.kernel_usage import NUM_WARPS, TILES, compiled, usage
from lightning_gnn.triton_kernels.emit import emit_bulk_kernel, emit_kernel
from lightning_gnn.triton_kernels.hops import hop_kernel
from lightning_gnn.triton_kernels.queue import queue_kernel
from lightning_gnn.triton_kernels.relations import emit_relations_kernel, relation_kernel
from lightning_gnn.triton_kernels.sample import chunk_size
from tests.triton_kernels.compiling import list_targets

KINDS = ("DISJOINT", "TEMPORAL", "WEIGHTED", "LABOR")
LISTS = ({}, {"CACHED": True}, {"SHARDS": 8, "SHIFT": 10})
"""Locations of adjacency lists; loaders combine each with each shape of mini-batches."""
VARIANTS = [  # kernel, constants, dtype of indices and edge ids
    (hop_kernel, {"DISJOINT": False, "K": 10, **TILES}, "i32"),
    *((phase_kernel, {"PHASE": phase, "DISJOINT": False, "K": 10, **TILES}, "i32") for phase in range(2)),
    (hop_kernel, {"DISJOINT": True, "K": 10, **TILES}, "i64"),
    *(
        (hop_kernel, {"DISJOINT": False, "K": 5, **TILES, **shape, **lists}, "i32")
        for shape in ({}, {"DISJOINT": True}, {"BULK": True})
        for lists in LISTS
    ),
    (hop_kernel, {"DISJOINT": False, "BULK": True, "K": 10, **TILES}, "i32"),
    (hop_kernel, {"DISJOINT": False, "K": 5, "EVERY": True, **TILES}, "i32"),
    *(
        (hop_kernel, {"DISJOINT": False, "K": 5, "HASHED": True, "BULK": bulk, **TILES}, "i32")
        for bulk in (False, True)
    ),
    *((queue_kernel, {"K": 5, "CHUNK": 5, **TILES, **lists}, "i32") for lists in LISTS),
    (queue_kernel, {"CACHED": True, "K": 10, "CHUNK": 10, **TILES}, "i32"),
    (hop_kernel, {"DISJOINT": False, "K": 15, **TILES}, "i32"),
    (queue_kernel, {"K": 15, "CHUNK": chunk_size(15), **TILES}, "i64"),
    (queue_kernel, {"K": 10, "CHUNK": 10, **TILES}, "i32"),
    (discover_kernel, {"K": 10, "CHUNK": 10, "R": 256}, "i32"),
    *((emit_kernel, {"DISJOINT": disjoint, "T": 256}, "i32") for disjoint in (False, True)),
    *((emit_bulk_kernel, {"HASHED": hashed, "T": 256}, "i32") for hashed in (False, True)),
    *(
        (relation_kernel, {**dict.fromkeys(KINDS, False), **kind, "T": 32 * NUM_WARPS}, dtype)
        for kind, dtype in (
            ({}, "i32"),
            ({"DISJOINT": True}, "i32"),
            ({"DISJOINT": True, "TEMPORAL": True}, "i64"),
            ({"WEIGHTED": True}, "i32"),
            ({"DISJOINT": True, "WEIGHTED": True}, "i32"),
            ({"LABOR": True}, "i32"),
            ({"DISJOINT": True, "LABOR": True}, "i32"),
            ({"DISJOINT": True, "TEMPORAL": True, "LABOR": True}, "i32"),
        )
    ),
    *((emit_relations_kernel, {"DISJOINT": disjoint, "T": 32 * NUM_WARPS}, "i32") for disjoint in (False, True)),
]


def generate_rows(number):
    """Yield the GPU resources and the instructions of each variant of a slice."""
    for capability, (kernel, constants, kind) in list_targets(VARIANTS, number):
        if constants.get("K") == 15 and capability == 80:
            continue  # takes long and adds little
        made = compiled(kernel, constants, kind, capability)
        atomics = sorted(set(re.findall(r"(?:atom|red)\.global[.\w]*|ld\.global\.gpu[.\w]*", made.asm["ptx"])))
        row = dict(kernel=kernel.fn.__name__, sm=capability, indices=kind, **constants, **usage(made))
        row |= {"shared": made.metadata.shared, "atomics": atomics}
        yield row
