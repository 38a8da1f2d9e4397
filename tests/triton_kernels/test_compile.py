import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton exists on Linux only")


def test_sampling_kernels_compile_for_a100_and_h100(tmp_path):
    """In a process of its own, as the interpreter is on in this one; from an empty cache."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    script = Path(__file__).with_name("compile_sample.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["sm"] for row in rows} == {80, 90}
    assert {row["kernel"] for row in rows} == {
        "hop_kernel",
        "phase_kernel",
        "queue_kernel",
        "discover_kernel",
        "emit_kernel",
    }
    for row in rows:
        assert row.get("LOCAL", 0) == 0
        assert row.get("STACK", 0) <= 64  # a few registers, outside the loops over rows
        assert row["shared"] <= 8192
        # Four programs of 128 threads on each multiprocessor; three for the queue that reads hot lists.
        assert row.get("REG", 0) <= (168 if row["kernel"] == "queue_kernel" and row.get("CACHED") else 128)
        if row["kernel"] in ("queue_kernel", "hop_kernel"):  # the grid barrier, and bids without fences
            assert any("release" in name for name in row["atomics"])
            assert any("ld" in name and "acquire" in name for name in row["atomics"])
            assert any("relaxed" in name and "min" in name for name in row["atomics"])
        assert not any("acq_rel" in name for name in row["atomics"])
