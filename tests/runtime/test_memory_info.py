"""Free memory is the minimum of what the machine and every enclosing control group have left."""

import psutil
import pytest
import torch

from lightning_gnn.graph import csc
from lightning_gnn.nn import FullInference
from lightning_gnn.runtime import memory_info
from lightning_gnn.runtime.memory_info import available_bytes, total_bytes

GB = 10**9
FILES = {
    2: ("memory.max", "memory.current", "inactive_file", "active_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file"),
}


@pytest.fixture(params=FILES)
def limited(request, monkeypatch, tmp_path):
    """Return a function that sets the limit, the use and the page cache of a control group."""
    version = request.param
    root = tmp_path if version == 2 else tmp_path / "memory"
    own = tmp_path / "own"
    own.write_text("3:cpu:/x\n0::/job/step\n" if version == 2 else "4:memory:/job/step\n0::/\n")
    monkeypatch.setattr(memory_info, "_CGROUP_ROOT", tmp_path)
    monkeypatch.setattr(memory_info, "_PROCESS_CGROUPS", own)
    memory = type("Memory", (), {"total": 64 * GB, "available": 32 * GB})()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)

    def limit(group, most, used, cached=(0, 0)):
        limit_name, used_name, *names = FILES[version]
        folder = root / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / limit_name).write_text(f"{most}\n")
        (folder / used_name).write_text(f"{used}\n")
        fields = dict(zip(names, cached, strict=True)) | {"anon": used}
        (folder / "memory.stat").write_text("".join(f"{name} {value}\n" for name, value in fields.items()))

    return limit


def test_without_a_limit_the_host_counts(limited):
    assert (total_bytes(), available_bytes(), available_bytes(ranks=4)) == (64 * GB, 32 * GB, 8 * GB)
    limited("job/step", "max", 3 * GB)
    limited("", 2**63 - 4096, 40 * GB)
    assert (total_bytes(), available_bytes()) == (64 * GB, 32 * GB)


def test_the_tightest_group_around_the_process_counts(limited):
    limited("job/step", 20 * GB, 5 * GB)
    assert (total_bytes(), available_bytes()) == (20 * GB, 15 * GB)
    limited("job", 10 * GB, 9 * GB)
    assert (total_bytes(), available_bytes()) == (10 * GB, GB)
    limited("other", GB, GB)  # another process's group
    assert available_bytes() == GB
    limited("job", 10 * GB, 11 * GB)
    assert available_bytes() == 0


def test_page_cache_counts_as_free_and_within_a_container_the_root_is_the_own_group(limited):
    limited("job/step", 20 * GB, 18 * GB, (10 * GB, 3 * GB))
    assert available_bytes() == 15 * GB
    limited("", 6 * GB, 2 * GB)
    assert (total_bytes(), available_bytes()) == (6 * GB, 4 * GB)


def test_plans_of_memory_keep_to_the_limit(limited):
    limited("job/step", 8 * GB, 0)
    assert FullInference().limit_on(torch.device("cpu")) <= 8 * GB
    with pytest.raises(ValueError, match="this machine's 8 GB"):
        csc.CSCGraph.from_edge_index(torch.tensor([[0], [1]]), num_nodes=2 * GB)


def test_devices_report_their_own_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7 * GB, 8 * GB))
    assert available_bytes(torch.device("cuda", 0), ranks=2) == 7 * GB
    assert available_bytes(torch.device("meta")) is None
