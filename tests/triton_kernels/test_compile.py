import pytest

pytest.importorskip("triton", reason="Triton exists on Linux only")


@pytest.mark.slow
def test_sampling_kernels_compile_for_a100_and_h100(compiled):
    rows = compiled("compile_sample")
    assert {row["sm"] for row in rows} == {80, 90}
    assert {row["kernel"] for row in rows} == {
        "hop_kernel",
        "phase_kernel",
        "queue_kernel",
        "discover_kernel",
        "emit_kernel",
        "emit_bulk_kernel",
        "relation_kernel",
        "emit_relations_kernel",
    }
    for row in rows:
        assert row.get("LOCAL", 0) == 0
        assert row.get("STACK", 0) <= 64  # a few registers, outside the loops over rows
        assert row["shared"] <= 8192
        # Four programs of 128 threads per multiprocessor; three for the queue with hot lists.
        assert row.get("REG", 0) <= (168 if row["kernel"] == "queue_kernel" and row.get("CACHED") else 128)
        if row["kernel"] in (
            "queue_kernel",
            "hop_kernel",
            "relation_kernel",
        ):  # the grid barrier, and bids without fences
            assert any("release" in name for name in row["atomics"])
            assert any("ld" in name and "acquire" in name for name in row["atomics"])
            assert any("relaxed" in name and "min" in name for name in row["atomics"])
        assert not any("acq_rel" in name for name in row["atomics"])
