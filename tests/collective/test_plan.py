from math import floor

import pytest
from hypothesis import strategies as st

from lightning_gnn.collective.plan import CollectivePlan, Duration, StageTimes
from lightning_gnn.collective.published import cpu_buffer_size

TIMES = StageTimes(
    Duration(0.08, 0.004), Duration(0.002, 1e-5), Duration(0.004), Duration(0.003, 1e-300), Duration(0.005), 8
)
seconds = st.floats(0, 1e6)
durations = st.builds(Duration, seconds, seconds)
model_durations = st.builds(Duration, st.floats(1e-9, 1e3))
stage_times = st.builds(StageTimes, *4 * [durations], model_durations, st.integers(1, 99))
plans = st.builds(
    CollectivePlan,
    mode=st.sampled_from(["collective", "cpu", "gpu"]),
    gpu_buffer_size=st.integers(1, 1000),
    cpu_buffer_size=st.integers(1, 1000),
    num_batches=st.integers(0, 10**9),
    ratio=st.none() | seconds,
    times=st.none() | stage_times,
    epoch_s=st.dictionaries(st.sampled_from(["collective", "cpu", "gpu"]), seconds),
    rounds=st.integers(0, 100),
    lead=st.none() | st.integers(0, 10**6),
    row=st.integers(0, 10**6),
    cpu_part=st.none() | st.floats(0, 1),
)


def test_file_round_trip(tmp_path):
    plan = CollectivePlan("collective", 10, 8, 500, 1.2, TIMES, {"collective": 2.0, "cpu": 3.0}, 4)
    plan.save(tmp_path / "plan.yaml")
    assert CollectivePlan.load(tmp_path / "plan.yaml") == plan
    assert hash(plan) == hash(CollectivePlan.load(str(tmp_path / "plan.yaml")))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "both"}, "mode must be one of collective, cpu, gpu, but is 'both'"),
        ({"gpu_buffer_size": 0}, "gpu_buffer_size must be a whole number of at least 1, but is 0"),
        ({"gpu_buffer_size": 2.5}, "gpu_buffer_size must be a whole number"),
        ({"lead": -1}, "lead must be a whole number of at least 0, but is -1"),
        ({"mode": "gpu", "cpu_buffer_size": -1}, "cpu_buffer_size must be a whole number of at least 0, but is -1"),
        ({"rounds": None}, "rounds must be a whole number of at least 0, but is None"),
        ({"ratio": 10**400}, "ratio must be a finite number"),
        ({"epoch_s": {"npu": 1.0}}, "epoch_s must map collective, cpu and gpu to seconds, but is {'npu': 1.0}"),
        ({"epoch_s": {"cpu": float("inf")}}, r"epoch_s\['cpu'\] must be a finite number"),
    ],
)
def test_nonsense_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        CollectivePlan(**{"mode": "collective", "gpu_buffer_size": 10, "cpu_buffer_size": 8, **changes})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a plan must be a mapping of .*, but is None"),
        ("mode: [", "not YAML"),
        ("!!python/object/apply:os.system ['true']", "not YAML"),
        ("mode: gpu\ngpu_buffer_size: 1", "a plan lacks cpu_buffer_size"),
        ("{mode: gpu, gpu_buffer_size: 1, cpu_buffer_size: 0, gbs: 3}", "a plan has unknown fields gbs"),
        ("{mode: gpu, gpu_buffer_size: 1, cpu_buffer_size: 0, ratio: much}", "ratio must be a finite .* 'much'"),
        ("{mode: gpu, gpu_buffer_size: 1, cpu_buffer_size: 0, times: {dma: 1}}", "times lacks cpu_batching"),
        (
            "{mode: gpu, gpu_buffer_size: 1, cpu_buffer_size: 0, "
            "times: {cpu_batching: 1, dma: {mean: null}, gpu_batching: 1, uva: 1, model: 1}}",
            "times: dma: mean must be a finite number of at least 0, but is None",
        ),
        (
            "{mode: gpu, gpu_buffer_size: 1, cpu_buffer_size: 0, "
            "times: {cpu_batching: 1, dma: 1, gpu_batching: 1, uva: 1, model: 0}}",
            "the mean time of the model must be positive",
        ),
    ],
)
def test_a_broken_file_is_named(tmp_path, text, message):
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"broken.yaml is not a valid plan of collective batching: .*{message}"):
        CollectivePlan.load(path)


def test_prints_as_a_table():
    epochs = {"collective": 2.0, "cpu": 3.0, "gpu": 2.5}
    table = str(CollectivePlan("collective", 10, 8, 500, 1.2, TIMES, epochs, 4))
    lines = [line.split() for line in table.splitlines()]
    assert "the CPU prepares about 44% of the mini-batches, each 18 ahead of training" in table
    for expected in (
        "cpu_batching 80 ms 4 ms",
        "dma 2 ms 0.01 ms",
        "cpu_batching / 8 workers 10 ms",
        "10 8 18 0 1.2 4",
        "this plan 2 1.00x",
        "CPU only 3 1.50x",
        "GPU only 2.5 1.25x",
    ):
        assert expected.split() in lines
    stages = [line for line in table.splitlines() if line.endswith(" ms")]
    assert len({len(line) for line in stages if not line.strip().startswith("cpu_batching /")}) == 1
    assert "row" not in lines[1]  # its times do not depend on it
    said = str(CollectivePlan("collective", 10, 8, lead=44, row=5)).splitlines()
    assert said[1] == "  row 5: after 5 consecutive mini-batches, the CPU leaves 10 to the GPU"
    assert ["10", "8", "44", "5", "0"] in [line.split() for line in said]
    assert "the CPU prepares all" in str(CollectivePlan("cpu", 10, 8))
    assert "the GPU prepares all" in str(CollectivePlan("gpu", 10, 0))


TABLE_6 = {
    ("PA", "A"): (0.65, 15),
    ("PA", "B"): (2.00, 5),
    ("PA", "C"): (0.90, 11),
    ("TW", "A"): (0.29, 20),
    ("TW", "B"): (1.12, 8),
    ("TW", "C"): (0.41, 24),
    ("UK", "A"): (0.19, 30),
    ("UK", "B"): (0.83, 12),
    ("UK", "C"): (0.36, 28),
}
"""Initial x with two decimals, and the CPU buffer size for gbs = 10, from table 6 of the paper."""


def test_table_6_of_the_paper():
    """The table shows refined buffer sizes: seven of nine follow from the initial x, two were reduced."""
    refined = {}
    for setting, (x, size) in TABLE_6.items():
        smallest, largest = (cpu_buffer_size(10, x + rounding) for rounding in (0.005, -0.005))
        if not smallest <= size <= largest:
            refined[setting] = (floor(10 / x), size)
    assert refined == {("TW", "A"): (34, 20), ("UK", "A"): (52, 30)}
    shares = [CollectivePlan("collective", 10, size).cpu_share for _, size in TABLE_6.values()]
    assert min(shares) == pytest.approx(0.33, abs=0.005)  # section 5.5: from 33% to 75%
    assert max(shares) == 0.75
