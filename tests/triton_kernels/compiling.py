"""Shared code of the scripts ``compile_*.py``.

Run as ``python -m tests.triton_kernels.compiling SCRIPT FOLDER SLICE``: writes the results of a script to the folder.
"""

import importlib
import json
import sys
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.gpu.kernel_usage import usage as usage

GENERATIONS = (80, 90)


def list_targets(variants, number="all"):
    """Yield (GPU generation, variant): all pairs, or half of them in even and the other half in odd slices."""
    for capability in GENERATIONS:
        for i, variant in enumerate(variants):
            if number == "all" or GENERATIONS[(i + int(number)) % 2] == capability:
                yield capability, variant


def compile_kernel(kernel, kind, constants, pointers, capability, **options):
    """Compile a kernel whose arguments, except ``pointers``, point to ``kind`` and are aligned to 16 bytes."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else pointers.get(name, f"*{kind}") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    source = ASTSource(kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def main():
    script, folder, number = sys.argv[1:]
    rows = importlib.import_module(f"tests.triton_kernels.{script}").generate_rows(number)
    (Path(folder) / f"{script}.json").write_text(json.dumps(list(rows)))


if __name__ == "__main__":
    main()
