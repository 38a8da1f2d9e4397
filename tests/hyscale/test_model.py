from dataclasses import replace
from itertools import product
from math import e, inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.hyscale.model import ALVEO_U250, TERAFLOPS, DataflowKernel, SpreadWorkload, cpu_gpu, paper_workload
from lightning_gnn.hyscale.analytic import BatchSizes, PerformanceModel, Platform, Processor, Workload
from lightning_gnn.hyscale.costs import TaskMapping

CPU = Processor(flops=4e9, memory_bandwidth=1e9)
GPU = Processor(flops=40e9, memory_bandwidth=20e9)
FPGA = Processor(flops=8e9, memory_bandwidth=5e9, pipelined=True)
SIZES = BatchSizes(100, (5000, 900, 100), (8000, 1500))
"""100 seeds, 5000 sampled nodes, 900 of them expanded; 1500 edges into the seeds, 8000 in total."""
WORK = Workload(100_000, 1_000_000, 1000, 100, (15, 10), (64, 32, 8), measured=(SIZES,))


def test_trainer_time_by_hand():
    # Read 8000 rows of 64 and 1500 rows of 32 numbers; multiply 900 x 64 x 32 and 100 x 32 x 8.
    aggregate1, aggregate2 = 8000 * 64 * 4, 1500 * 32 * 4
    update1, update2 = 2 * 900 * 64 * 32, 2 * 100 * 32 * 8
    model = PerformanceModel(Platform(CPU, 4), WORK)
    forward = aggregate1 / 1e9 + update1 / 4e9 + aggregate2 / 1e9 + update2 / 4e9
    backward = update1 / 4e9 + aggregate2 / 1e9 + 2 * update2 / 4e9
    assert model.trainer_time(CPU, 100) == pytest.approx(forward + backward)
    # Pipelined, the longer of the two counts; in the backward pass, the update of layer 1 runs alone.
    forward = max(aggregate1 / 5e9, update1 / 8e9) + max(aggregate2 / 5e9, update2 / 8e9)
    backward = update1 / 8e9 + max(aggregate2 / 5e9, 2 * update2 / 8e9)
    assert model.trainer_time(FPGA, 100) == pytest.approx(forward + backward)
    assert model.trainer_time(CPU, 0) == 0


def test_stages_by_hand():
    platform = Platform(CPU, 4, GPU, 2, pcie_bandwidth=0.5e9, sampling=1e6, core_bandwidth=0.4e9)
    model = PerformanceModel(platform, WORK)
    mapping = TaskMapping((20, 30, 50), 1, (1, 1, 2))
    times = model.stage_times(mapping)
    assert times.sample_cpu == pytest.approx(8000 / 1e6)
    assert times.load == pytest.approx(5000 * 64 * 4 / 0.4e9)  # all trainers' rows, one thread
    bytes_ = (5000 * 64 * 4 + (2 * 8000 + 5000) * 8) * 0.5  # half of the seeds, with the topology
    assert times.transfer == pytest.approx(bytes_ / 0.5e9)
    half = Processor(2e9, 0.8e9)  # two of the four cores
    assert times.train_cpu == (pytest.approx(model.trainer_time(half, 20)),)
    assert times.train_accelerator == tuple(pytest.approx(model.trainer_time(GPU, n)) for n in (30, 50))
    assert model.sync_time() == pytest.approx(2 * (64 * 32 + 32 * 8) * 4 / 0.5e9)
    expected = max(times.sample_cpu, times.load, times.transfer, max(times.trainers) + model.sync_time())
    assert model.iteration_time(mapping) == pytest.approx(expected)
    assert model.epoch_time(mapping) == pytest.approx(10 * expected)
    assert model.mteps(mapping) == pytest.approx((8000 + 1500) / expected / 1e6)


@pytest.mark.parametrize(("dtype", "row"), [(None, 64 * 4), ("float16", 64 * 2), ("int8", 64 + 4)])
def test_features_may_travel_in_fewer_bits(dtype, row):
    work = replace(WORK, transfer_dtype=dtype)
    model = PerformanceModel(Platform(CPU, 4, GPU, 1, pcie_bandwidth=0.5e9), work)
    topology = (2 * 8000 + 5000) * 8
    assert model.transfer_time(100) == pytest.approx((5000 * row + topology) / 0.5e9)
    mapping = TaskMapping((0, 100), 1)
    assert model.stage_times(mapping).load == pytest.approx(5000 * 64 * 4 / 1e9)  # features are read unquantized
    assert model.sync_time() == pytest.approx(2 * (64 * 32 + 32 * 8) * 4 / 0.5e9)


@given(
    st.sampled_from([1, 2, 3, 8]),
    st.integers(1, 6),
    st.integers(0, 3),
    st.integers(0, 2),
    st.floats(0.05, 20),
    st.floats(1e4, 1e7),
    st.sampled_from([0.0, 1e5]),
)
def test_best_mapping_is_the_best_of_all(cores, spare, accelerators, cpus, factor, sampling, there):
    if cpus + accelerators == 0:
        return
    gpu = Processor(4e9 * factor, 1e9 * factor)
    platform = Platform(
        CPU, cores, gpu if accelerators else None, accelerators, 1e9, sampling, there if accelerators else 0.0, 4e8
    )
    work = replace(WORK, batch_size=24)
    model = PerformanceModel(platform, work)
    threads = max(2 + cpus, min(2 + cpus + spare, cores))  # more threads than tasks do not help
    best = model.best_mapping(cpus, threads)
    assert best.total == 24
    assert sum(best.threads) == threads or not cpus
    assert len(best.seeds) == cpus + accelerators
    least = inf
    for sampler, loader in product(range(1, threads), repeat=2):
        trainer = threads - sampler - loader
        if trainer < max(cpus, 0) or (not cpus and trainer):
            continue
        rates = platform.sampling * sampler
        share = platform.accelerator_sampling * accelerators / (rates + platform.accelerator_sampling * accelerators)
        for on_cpu in range(25):
            if (on_cpu and not cpus) or (on_cpu < 24 and not accelerators):
                continue
            seeds = (*_even(on_cpu, cpus), *_even(24 - on_cpu, accelerators))
            own = min(share, 1 - on_cpu / 24)  # accelerators sample their own mini-batches only
            least = min(least, model.iteration_time(TaskMapping(seeds, cpus, (sampler, loader, trainer), own)))
    # Seeds are integers, and the split is optimized for the trainers: at most one seed of 24 could still be gained.
    # Where threads share cores, seeds are tried in steps.
    assert model.iteration_time(best) <= least * (1 + 1 / 24 if threads <= cores else 1.1)


def _even(total, parts):
    return [total // parts + (index < total % parts) for index in range(parts)] if parts else []


def test_platform_of_the_paper():
    # Table IV's 2048 multiply-accumulate units at 300 MHz are table II's 0.6 TFLOPS and the divisor of equation 12.
    assert ALVEO_U250.flops / 2 == 2048 * 300e6
    assert pytest.approx(TERAFLOPS["U250"], rel=0.03) == 2048 * 300e6 / 1e12
    model = PerformanceModel(Platform(CPU, 1), paper_workload("ogbn-papers100M", 1))
    vertices = model.workload.sizes(1024).vertices[1]
    assert model.update_time(1, 1024, ALVEO_U250.flops) == pytest.approx(vertices * 128 * 256 / (2048 * 300e6))
    # Introduction: (7.2 + 27.8) / 27.8 = 1.26, and table VII's seconds x TFLOPS of the CPU-FPGA platform.
    assert (cpu_gpu(1).cpu.flops + 27.8e12) / cpu_gpu(1).accelerator.flops == pytest.approx(1.26, abs=0.005)
    teraflops = 2 * TERAFLOPS["EPYC 7763"] + 4 * TERAFLOPS["U250"]
    for seconds, normalized in [(0.27, 2.59), (0.49, 4.70), (1.91, 18.34), (1.69, 16.20), (3.67, 35.23)]:
        assert seconds * teraflops == pytest.approx(normalized, abs=0.03)


def test_dataflow_kernel_by_hand():
    kernel = DataflowKernel(8e9, 5e9, True, pes=4, frequency=1e6, lanes=8, on_chip_bytes=900 * 32 * 4)
    model = PerformanceModel(Platform(CPU, 4), WORK)
    # The PEs add 4 x 8 numbers a cycle; each of 5000 rows is read once, however many edges it has.
    assert model.aggregate_time(1, 100, kernel) == pytest.approx(8000 * 64 / 32e6)
    fast = replace(kernel, frequency=1e12)
    assert model.aggregate_time(1, 100, fast) == pytest.approx(5000 * 64 * 4 / 5e9)
    # The 900 rows between the layers fit the chip; what does not fit is written and read again.
    assert model.aggregate_time(2, 100, fast) == pytest.approx(1500 * 32 / 32e12)
    half = replace(fast, on_chip_bytes=450 * 32 * 4)
    assert model.aggregate_time(2, 100, half) == pytest.approx(2 * 450 * 32 * 4 / 5e9)
    forward = max(5000 * 64 * 4 / 5e9, 2 * 900 * 64 * 32 / 8e9) + 2 * 100 * 32 * 8 / 8e9
    backward = 2 * 900 * 64 * 32 / 8e9 + 2 * 2 * 100 * 32 * 8 / 8e9
    assert model.trainer_time(fast, 100) == pytest.approx(forward + backward)


@pytest.mark.medium
def test_hybrid_speedup_of_the_paper_where_only_flops_count():
    endless = cpu_gpu(1)
    platform = replace(
        endless,
        cpu=replace(endless.cpu, memory_bandwidth=1e30),
        accelerator=replace(endless.accelerator, memory_bandwidth=1e30),
        pcie_bandwidth=1e30,
    )
    model = PerformanceModel(platform, paper_workload("ogbn-products", 1))
    best = model.best_mapping(1, platform.cores + 2)  # all cores for training
    alone = TaskMapping((0, 1024), 1, best.threads)
    assert model.iteration_time(alone) / model.iteration_time(best) == pytest.approx(1.26, abs=0.005)


def test_spread_degrees_by_hand():
    work = SpreadWorkload(10**12, 10**13, 1, 1, (-1, -1), (4, 4, 4), degree_spread=1.0)
    assert work.sizes(1).edges == (pytest.approx(10 + 100), pytest.approx(10))
    by_degree = replace(work, undirected=True)  # the mean degree at the end of an edge is E[d^2] / E[d] = 10 e
    assert by_degree.sizes(1).edges == (pytest.approx(10 + 100 * e, rel=1e-4), pytest.approx(10))
    assert replace(work, fanouts=(5, 5)).sizes(1).edges[1] < 5  # some vertices have fewer neighbors


def test_scattered_rows_slow_cpu_trainers_only():
    platform = Platform(CPU, 4, scattered_bandwidth=0.1e9)
    assert PerformanceModel(platform, WORK).cpu_trainer(4, 2) == Processor(2e9, 0.05e9)
    mapping = TaskMapping((100,), 1)
    assert PerformanceModel(platform, WORK).stage_times(mapping).load == pytest.approx(5000 * 64 * 4 / 1e9)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Processor(0, 1), "positive"),
        (lambda: DataflowKernel(1, 1, True, pes=0), "pes, lanes and frequency must be positive"),
        (lambda: Platform(CPU, 0), "positive"),
        (lambda: Platform(CPU, 4, GPU), "give both or neither"),
        (lambda: Platform(CPU, 4, num_accelerators=2), "give both or neither"),
        (lambda: Platform(CPU, 4, sampling=0.0), "positive"),
        (lambda: replace(WORK, widths=(64, 32)), "2 fanouts need 3 widths"),
        (lambda: replace(WORK, fanouts=(15, -2)), "-1"),
        (lambda: replace(WORK, batch_size=0), "positive"),
        (lambda: SpreadWorkload(1, 1, 1, 1, (1,), (1, 1), degree_spread=-1), "must not be negative, but is -1"),
        (lambda: replace(WORK, transfer_dtype="int4"), "None or one of"),
        (lambda: replace(WORK, measured=(BatchSizes(1, (1, 1), (1,)),)), "1 layers"),
        (lambda: PerformanceModel(Platform(CPU, 4), WORK).best_mapping(0), "nothing to train on"),
        (lambda: PerformanceModel(Platform(CPU, 4), WORK).best_mapping(1, 2), "need 3"),
        (lambda: PerformanceModel(Platform(CPU, 4), WORK).stage_times(TaskMapping((50, 50), 1)), "1 accelerators"),
        (
            lambda: PerformanceModel(Platform(CPU, 4, GPU, 1), WORK).stage_times(
                TaskMapping((50, 50), 1, (1, 1, 1), 0.5)
            ),
            "accelerator_sampling is 0",
        ),
    ],
)
def test_bad_input_says_what_is_wrong(make, message):
    with pytest.raises(ValueError, match=message):
        make()
