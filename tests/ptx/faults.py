"""Plants faults in the PTX of the sampling kernels, which the cases must find.

``python -m tests.ptx.faults SEED RUNS SLICE`` prints the faults of a slice, or of ``all``, in JSON: their source line,
the number of the run that found each, and how; None if none did.
"""

import json
import re
import sys

from tests.campaigns import one_slice
from tests.ptx import driver
from tests.ptx.cases import forked, run_case
from tests.ptx.translate import place_of, source_of

KERNELS = {"fused": "hop_kernel", "queue": "queue_kernel", "types": "relation_kernel"}
FURTHER = {"fused": "fanout 40"}
"""Cases that run other code of the same compiled kernel."""
BARRIER = re.compile(r"\bbar(?:rier)?\.sync\b[^;]*;")
PROTOCOL = {  # of the grid barrier, and of the look-back and the queue
    "relaxed acquire": lambda ptx: re.sub(r"\b((?:ld|atom)\S*)\.acquire\b", r"\1.relaxed", ptx),
    "relaxed release": lambda ptx: re.sub(r"\b((?:red|atom)\S*)\.release\b", r"\1.relaxed", ptx),
    "plain look-back": lambda ptx: ptx.replace("ld.volatile.global", "ld.global"),
}
UNSEEN = {
    "settle: tile = tl.atomic_add(": "for the first tile of a phase, the grid barrier lies between the same accesses",
    "grid_barrier: while tl.atomic_add(": "the values before and behind it are both at or above the target",
    "grid_barrier: tl.debug_barrier()": "Triton's own barriers, which pass on the acquired value, do the same",
}
"""Beginnings of lines with a barrier whose removal leaves no race: why."""


def remove(ptx, number):
    """Remove one barrier of the threads of a program."""
    found = list(BARRIER.finditer(ptx))[number]
    return ptx[: found.start()] + ptx[found.end() :]


def compile_kernels(cases):
    """Return the PTX of the kernel that each case runs."""
    seen = {}

    def keep(ptx):
        seen[re.search(r"\.entry (\w+)", ptx)[1]] = ptx
        return ptx

    driver.Settings.fault = keep
    for case in cases:
        if failure := run_case(case, 0, 1)[1]:
            raise RuntimeError(failure)
    return {case: seen[KERNELS[case]] for case in cases}


def list_faults(kernels):
    """Return (case, name, source line, changed PTX) of all faults."""
    faults = []
    for case, ptx in kernels.items():
        for name, change in PROTOCOL.items():
            if change(ptx) != ptx:
                faults.append((case, name, "", change(ptx)))
        for number, found in enumerate(BARRIER.finditer(ptx)):
            place = place_of(ptx[: found.start()].rpartition(".loc")[2].partition("\n")[0])
            faults.append((case, f"without barrier {number}", source_of(place), remove(ptx, number)))
    return faults


def run_fault(case, changed, seed, runs):
    """Run a case with the changed PTX of its kernel."""
    driver.Settings.fault = lambda ptx: changed if f".entry {KERNELS[case]}" in ptx else ptx
    done, how = run_case(case, seed, runs, stale=1.0)
    return (done, how) if how or case not in FURTHER else run_case(FURTHER[case], seed, runs, stale=1.0)


def main():
    seed, runs, number, *cases = sys.argv[1:]
    faults = list_faults(compile_kernels(cases or KERNELS))
    for case, name, source, changed in faults if number == "all" else one_slice(faults, int(number)):
        why = next((why for line, why in UNSEEN.items() if source.startswith(line)), None)
        tries = int(runs) * (1 if why else 10)  # some races show in one of six schedules only
        done, how = forked(run_fault, case, changed, int(seed), tries)
        row = {"case": case, "fault": name, "source": source, "runs": done, "found": how, "explained": why}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
