"""The Ascend chips that the twin and the simulation know, as one table of numbers with their sources.

=====================  ===========================  =======================================
key                    ``split``                    ``unified``
=====================  ===========================  =======================================
chip                   Atlas A2 (910B1), dav-c220   first-generation 910, dav-c100
cores                  24 cube + 48 vector          30, each with cube and vector unit
memory                 64 GB, L2 192 MB             32 GB, L2 32 MB
results leave L0C      straight to memory           through UB
=====================  ===========================  =======================================

``split-20`` is the part with 20 cube and 40 vector cores. The paper (NeutronAscend, section 7.1) names its chip
"Ascend 910B (30 AI Cores and 32GB global memory)" and describes, in section 2.1, cores in which the cube unit's results
leave through the unified buffer. No Atlas A2 part is like that; the first-generation part that CANN calls
``Ascend910B`` is: ``unified``.

What the numbers are for: every parameter of the twin's cost model (``ascend_ops/twin/include/twin/cost.h``) under the
same name, and a few facts of the whole chip. A copy between global memory and a core costs its head, a penalty per
further run of bytes, and its bytes at the rate of the level that has them; it ends a latency later, while others of its
pipe go on. An instruction of the cube or vector unit costs its head, its size at full rate, and what banks of UB make
it wait. What is not modelled: the scalar unit's arithmetic, instruction fetch, the write-back of L2 to HBM, address
translation, the bandwidth of L2 that all cores share. ``ascend_ops/twin/RULES.md`` has the rules and what is known.

The L2 model: one cache for all cores, lines of 512 bytes, first in, first out; what is read or written enters it. So
a row that several cores of a group read comes from HBM once, for as long as it stays. A read takes as long as the
slower of HBM, for what is missing, and L2, for all of it.

HBM is shared: a core never gets more than ``hbm_bytes`` a cycle, and all cores together no more than ``hbm_gb_s``.
:meth:`Machine.parameters` gives the twin, which cannot see the other cores' traffic, an even share of the latter.

Sources:

ini
    CANN 8.1.RC1, ``data/platform_config/Ascend910B1.ini`` (``B3`` for 20 cores) and ``Ascend910B.ini``.
sim
    CANN 8.1.RC1, ``simulator/Ascend910B1/lib/config.json``: what CANN's own simulator takes for L2.
docs
    Ascend C documents and performance tests of the asc-devkit repository.
measured
    On an Atlas A2, by the examples ``data_copy``, ``add_high_performance`` and ``bank_conflict_ub`` of asc-devkit.
guess
    No public number was found; chosen to be plausible. The simulation reports what happens when it is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Fact:
    """One number of a machine.

    Args:
        value: The number.
        unit: What it is measured in.
        source: Where it is from; see the module's list of sources.
        confidence: ``high``, ``medium`` or ``low``.
    """

    value: float
    unit: str
    source: str
    confidence: str


@dataclass(frozen=True)
class Machine:
    """A chip.

    Args:
        name: Key of :data:`MACHINES`.
        title: What people call it.
        arch: The twin's name for it (``Twin.launch(arch=…)``).
        cube_cores: Cores that have a cube unit; a block of a mixed kernel runs on one of them.
        vector_cores: Cores that have a vector unit.
        facts: Numbers by name.
    """

    name: str
    title: str
    arch: str
    cube_cores: int
    vector_cores: int
    facts: Mapping[str, Fact]

    @property
    def unified(self) -> bool:
        """Whether cube and vector unit sit in one core."""
        return self.arch == "910"

    def __getitem__(self, name: str) -> float:
        return self.facts[name].value

    def parameters(self, readers: int | None = None, **changes: float) -> dict[str, float]:
        """Return the twin's parameters, for ``Twin.launch(parameters=…)``.

        Args:
            readers: Cores that read global memory at once and share HBM evenly; None for a core alone.
            changes: Facts to use instead of the table's.

        Raises:
            ValueError: There is no such fact, or fewer than one reader.
        """
        if readers is not None and readers < 1:
            raise ValueError(f"readers must be at least 1, but is {readers}")
        unknown = sorted(set(changes) - set(self.facts))
        if unknown:
            raise ValueError(f"{self.name} has no fact {unknown[0]!r}; there are {', '.join(sorted(self.facts))}")
        values = {name: fact.value for name, fact in self.facts.items()} | changes
        if readers is not None:
            values["hbm_bytes"] = min(values["hbm_bytes"], values["hbm_gb_s"] * 1e3 / values["clock_mhz"] / readers)
        return {name: value for name, value in values.items() if name not in CHIP_FACTS}

    def table(self) -> str:
        """Return the facts as lines of text."""
        rows = [(name, f"{fact.value:g}", fact.unit, fact.source, fact.confidence) for name, fact in self.facts.items()]
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


CHIP_FACTS = ("hbm_gb_s", "l0c_to_ub_bytes", "ub_to_l1_bytes", "launch_us")
"""Facts that the twin's cost model has no parameter for."""

_SHARED = {
    "cube_macs": Fact(1, "16x16x16 fp16 products a cycle", "ini (cube_m/n/k_size), docs", "high"),
    "cube_head": Fact(21, "cycles before the first product", "docs (mmad_perf)", "high"),
    "vector_bytes": Fact(256, "bytes a cycle", "ini (vec_calc_size 128 fp16), paper section 2.1", "high"),
    "vector_exp_bytes": Fact(128, "bytes a cycle of Exp, Ln, Div, Sqrt", "docs (32 fp32 a cycle)", "medium"),
    "vector_head": Fact(23, "cycles before the first result", "measured: 22 to 24 (Add)", "medium"),
    "bank_cycles": Fact(1, "cycles for every further access to a bank group in one repeat", "docs, measured", "high"),
    "scalar_cycles": Fact(1, "cycles a scalar access to UB", "guess", "low"),
    "scalar_gm_cycles": Fact(20, "cycles a scalar access to global memory, cached", "guess", "low"),
    "dcache_bytes": Fact(16384, "bytes of the scalar unit's cache", "guess; its lines of 64 bytes: docs", "low"),
    "issue_cycles": Fact(1, "cycles of the scalar unit to issue an instruction", "guess", "low"),
    "l2_read_bytes": Fact(110, "bytes a cycle a core", "ini (l2_read_rate)", "medium"),
    "l2_write_bytes": Fact(86, "bytes a cycle a core", "ini (l2_write_rate)", "medium"),
    "ub_to_gm_bytes": Fact(64, "bytes a cycle", "ini (ub_to_ddr_rate, ub_to_l2_rate)", "medium"),
    "l0c_to_gm_bytes": Fact(64, "bytes a cycle", "guess (as ub_to_gm_bytes)", "low"),
    "copies_in_flight": Fact(
        16, "copies of a pipe that have begun and not ended", "guess; measured: 12 or more", "low"
    ),
    "load_head": Fact(28, "cycles before the first fractal from L1", "docs", "medium"),
    "flag_cycles": Fact(2, "cycles of SetFlag and WaitFlag", "guess", "low"),
    "cross_flag_cycles": Fact(100, "cycles from CrossCoreSetFlag to the waiting core", "guess", "low"),
    "sync_all_cycles": Fact(500, "cycles of SyncAll", "guess", "low"),
    "launch_cycles": Fact(0, "cycles to start the cores; see launch_us", "-", "-"),
    "gm_share": Fact(1, "factor on the time of global memory", "1: sharing is in hbm_bytes", "-"),
    "launch_us": Fact(20, "us to launch a kernel on all cores", "docs (20 to 21 us)", "medium"),
}

_SPLIT = _SHARED | {
    "l2_read_latency": Fact(241, "cycles from a read of L2 to its end", "sim", "medium"),
    "l2_write_latency": Fact(96, "cycles from a write to L2 to its end", "sim", "medium"),
    "mte_head": Fact(13, "cycles of a copy beside those of its bytes", "measured (data_copy, 128 bytes)", "medium"),
    "burst_cycles": Fact(
        0.8, "cycles for every further run of bytes in a copy", "measured: 0.5 to UB, 1.15 to L1 (data_copy)", "medium"
    ),
    "clock_mhz": Fact(1850, "MHz", "ini (cube_freq)", "high"),
    "hbm_bytes": Fact(32, "bytes a cycle a core from HBM at most", "ini (ddr_read_rate)", "medium"),
    "hbm_gb_s": Fact(1421, "GB/s of HBM, all cores", "ini (24 cores x ddr_rate x clock); documents say 1600", "medium"),
    "l2_bytes": Fact(192 * 2**20, "bytes of L2", "ini (l2_size)", "high"),
    "l1_to_l0a_bytes": Fact(256, "bytes a cycle", "docs; the ini says 512", "medium"),
    "l1_to_l0b_bytes": Fact(128, "bytes a cycle", "docs; the ini says 256", "medium"),
    "l0c_to_ub_bytes": Fact(0, "no such path", "docs", "high"),
    "ub_to_l1_bytes": Fact(0, "no such path without a workspace", "docs", "high"),
}

_LIKE_A2 = "guess (as the A2's)"
_UNIFIED = _SHARED | {
    "l2_read_latency": Fact(241, "cycles from a read of L2 to its end", _LIKE_A2, "low"),
    "l2_write_latency": Fact(96, "cycles from a write to L2 to its end", _LIKE_A2, "low"),
    "mte_head": Fact(13, "cycles of a copy beside those of its bytes", _LIKE_A2, "low"),
    "burst_cycles": Fact(0.8, "cycles for every further run of bytes in a copy", _LIKE_A2, "low"),
    "clock_mhz": Fact(900, "MHz", "ini (cube_freq)", "high"),
    "hbm_bytes": Fact(
        42.5, "bytes a cycle a core from HBM at most", "hbm_gb_s over 30 cores; the ini says 32", "medium"
    ),
    "hbm_gb_s": Fact(1148, "GB/s of HBM, all cores", "a published measurement of such a chip", "medium"),
    "l2_bytes": Fact(32 * 2**20, "bytes of L2", "ini (l2_size)", "high"),
    "l1_to_l0a_bytes": Fact(512, "bytes a cycle", "ini", "medium"),
    "l1_to_l0b_bytes": Fact(256, "bytes a cycle", "ini", "medium"),
    "l0c_to_ub_bytes": Fact(256, "bytes a cycle, by the vector unit", "ini (l0_c_to_ub_rate)", "medium"),
    "ub_to_l1_bytes": Fact(128, "bytes a cycle", "ini (ub_to_l1_rate)", "medium"),
}

MACHINES = {
    machine.name: machine
    for machine in (
        Machine("unified", "first-generation 910, 30 unified cores", "910", 30, 30, _UNIFIED),
        Machine("split", "Atlas A2 (910B1), 24 cube and 48 vector cores", "910b", 24, 48, _SPLIT),
        Machine(
            "split-20",
            "Atlas A2 (910B3), 20 cube and 40 vector cores",
            "910b",
            20,
            40,
            _SPLIT
            | {
                "clock_mhz": Fact(1800, "MHz", "ini (cube_freq)", "high"),
                "hbm_gb_s": Fact(1152, "GB/s of HBM, all cores", "ini (20 cores x ddr_rate x clock)", "medium"),
            },
        ),
    )
}
"""The chips by name."""


def machine(name: str) -> Machine:
    """Return a chip of :data:`MACHINES`.

    Raises:
        ValueError: There is no such chip.
    """
    if name not in MACHINES:
        raise ValueError(f"arch {name!r} is unknown; use one of {', '.join(MACHINES)}")
    return MACHINES[name]
