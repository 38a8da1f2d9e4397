"""All ranks of a node split the work identically at every iteration, however far each of them prefetches."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gnn.hyscale.costs import TaskMapping, split_seeds
from lightning_gnn.hyscale.drm import BalanceController, Decision, StageClock, StepReport
from lightning_gnn.hyscale.options import NOMINAL_SEEDS, TrainerSet
from lightning_gnn.hyscale.staged_prefetcher import BatchShare

CPU = torch.device("cpu")
TOTAL = 40


def make_trainers(num_cpu, num_accelerators):
    return TrainerSet.of(num_cpu, [CPU] * num_accelerators)


def make_mapping(who, weights, total, threads, sampling=0.0):
    seeds = tuple(stop - start for start, stop in split_seeds(total, weights))
    return TaskMapping(seeds, who.num_cpu, threads, sampling)


class Rank:
    """The balance of one rank, which splits some mini-batches ahead of training."""

    def __init__(self, who, number, weights, **options):
        options = {"drm": True, **options}
        mapping = make_mapping(who, weights, options.pop("total", TOTAL), (3, 2, 4), options.pop("sampling", 0.0))
        self.balance = BalanceController(who, mapping, is_logging_rank=number == 0, **options)
        self.cut, self.in_force, self.next = {}, {}, 0

    def run_to(self, number, sizes):
        """Split the mini-batches up to this one, as a pipeline may do."""
        for each in range(self.next, number + 1):
            self.cut[each] = self.balance.split(sizes(each), each)
        self.next = max(self.next, number + 1)

    def begin(self):
        self.balance.begin()
        mapping = self.balance.current
        self.in_force[self.balance.iteration - 1] = (list(mapping.seeds), mapping.threads, mapping.accelerator_sampling)


def make_report(seeds, seconds, there=-1.0):
    """Return the report of a rank that needs these seconds per seed in each of its stages."""
    if seeds == 0:
        return StepReport(0.0, there, train=0.0)
    work = seeds * seconds
    return StepReport(
        seeds, there, sample=work / 10, sample_accelerator=work / 10, load=work / 20, train=work, iteration=work
    )


def train(ranks, iterations, ahead, depths, seconds, sizes=lambda number: TOTAL, begin=0):
    """Train with pipelines of these depths; ranks exchange the times of the previous iteration."""
    for number in range(begin, begin + iterations):
        for place, rank in enumerate(ranks):
            rank.run_to(number + depths(number, place) % (ahead + 1), sizes)
            rank.begin()
        reports = [StepReport()] * len(ranks)
        if number > begin:
            cut = ranks[0].cut[number - 1]
            reports = [make_report(stop - start, seconds(number, place)) for place, (start, stop) in enumerate(cut)]
            slowest = max(report.iteration for report in reports)  # all ranks wait for it
            reports = [report._replace(iteration=slowest) for report in reports]
        decisions = [rank.balance.observe(reports) for rank in ranks]
        assert all(decision == decisions[0] for decision in decisions)


def check_ranks(ranks, iterations, sizes=lambda number: TOTAL, begin=0):
    """Check that splits and threads agree on all ranks from the same iteration on, and cover each seed once."""
    for number in range(begin, begin + iterations):
        assert all(rank.cut[number] == ranks[0].cut[number] for rank in ranks)
        assert all(rank.in_force[number] == ranks[0].in_force[number] for rank in ranks)
        slices = ranks[0].cut[number]
        assert [start for start, _ in slices] == [0, *(stop for _, stop in slices[:-1])]
        assert slices[-1][1] == sizes(number)
        assert slices == split_seeds(sizes(number), ranks[0].in_force[number][0])  # splits match the weights in force


@settings(max_examples=25)
@given(st.integers(0, 2), st.integers(0, 3), st.integers(1, 8), st.data())
def test_ranks_that_run_ahead_by_different_amounts_agree(num_cpu, num_accelerators, ahead, data):
    if not num_cpu + num_accelerators >= 2:
        num_cpu, num_accelerators = 1, 1
    who = make_trainers(num_cpu, num_accelerators)
    count = len(who.devices)
    weights = [1 / count] * count
    speeds = data.draw(st.lists(st.sampled_from([1e-3, 3e-3, 2e-2]), min_size=count, max_size=count))
    turn = data.draw(st.integers(5, 40))
    steps = data.draw(st.lists(st.integers(0, ahead), min_size=7, max_size=7))
    last = data.draw(st.integers(1, TOTAL))

    def seconds(number, place):
        return speeds[place] if number < turn else speeds[-1 - place]  # slow and fast are swapped

    def sizes(number):
        return last if number % 11 == 10 else TOTAL

    ranks = [Rank(who, number, weights, ahead=ahead, sampling=0.3 * bool(num_accelerators)) for number in range(count)]
    train(ranks, 60, ahead, lambda number, place: steps[(3 * number + 5 * place) % 7], seconds, sizes)
    check_ranks(ranks, 60, sizes)
    logs = [list(rank.balance.manager.log) for rank in ranks]
    assert all(log == logs[0] for log in logs)


def test_a_slow_trainer_gets_fewer_seeds_as_soon_as_no_rank_can_have_begun_without():
    who, ahead = make_trainers(2, 0), 4
    ranks = [Rank(who, number, [0.5, 0.5], ahead=ahead) for number in range(2)]
    train(ranks, 80, ahead, lambda number, place: ahead * place, lambda number, place: [1e-2, 2e-3][place])
    check_ranks(ranks, 80)
    assert ranks[0].cut[79][0][1] < 12 < 20 == ranks[0].cut[0][0][1]
    # Decided from the times of iteration n - 1, which arrive in iteration n.
    log = [decision for decision in ranks[0].balance.manager.log if decision.observation]
    changes = [n for n in range(1, 80) if ranks[0].in_force[n] != ranks[0].in_force[n - 1]]
    assert changes
    assert changes == [n for n in (decision.observation + ahead + 1 for decision in log) if n < 80]


def assign(seeds, threads=(3, 2, 4), there=0.0, num_cpu=1):
    return TaskMapping(tuple(seeds), num_cpu, threads, there)


@st.composite
def decision_logs(draw):
    """Draw decisions at any observations, also in consecutive iterations."""
    numbers = sorted(draw(st.sets(st.integers(1, 25), max_size=8)))
    decisions = []
    for number in [0, *numbers]:
        first = draw(st.integers(0, TOTAL))
        second = draw(st.integers(0, TOTAL - first))
        threads = draw(st.permutations([1, 3, 5]))
        there = draw(st.sampled_from([0.0, 0.25, 1.0]))
        decisions.append(
            Decision(assign((first, second, TOTAL - first - second), tuple(threads), there), "drawn", "start", number)
        )
    return decisions


def write_log(folder, decisions):
    path = Path(folder) / "decisions.jsonl"
    path.write_text("".join(decision.to_json() + "\n" for decision in decisions))
    return path


@settings(max_examples=25)
@given(decision_logs(), st.integers(1, 7), st.lists(st.integers(0, 7), min_size=5, max_size=5), st.integers(2, 30))
def test_a_replay_puts_decisions_into_force_where_they_were_also_after_a_stop(decisions, ahead, steps, stop):
    who = make_trainers(1, 2)

    def depths(number, place):
        return steps[(number + 2 * place) % 5]

    def others(number, place):
        return place + 1

    with TemporaryDirectory() as folder:
        path = write_log(folder, decisions)

        def make():
            return [Rank(who, number, [0.1, 0.4, 0.5], drm=path, ahead=ahead) for number in range(3)]

        whole = make()
        train(whole, 40, ahead, depths, lambda number, place: 1e-3)
        check_ranks(whole, 40)
        for number in range(40):
            at = max(d.observation for d in decisions if d.observation == 0 or d.observation + ahead + 1 <= number)
            expected = next(d.mapping for d in decisions if d.observation == at)
            assert whole[0].in_force[number][0] == list(expected.seeds)
            assert whole[0].in_force[number][1:] == (expected.threads, expected.accelerator_sampling)
        # A run that is stopped there, and one that resumes from its state with pipelines of another depth.
        stopped, resumed = make(), make()
        train(stopped, stop, ahead, depths, lambda number, place: 1e-3)
        for old, new in zip(stopped, resumed, strict=True):
            new.balance.load_state_dict(json.loads(json.dumps(old.balance.state_dict())))
            new.next = stop
        train(resumed, 40 - stop, ahead, others, lambda number, place: 1e-3, begin=stop)
        check_ranks(resumed, 40 - stop, begin=stop)
        for number in range(stop, 40):
            assert resumed[0].in_force[number] == whole[0].in_force[number]
            assert resumed[0].cut[number] == whole[0].cut[number]


def test_what_is_recorded_is_replayed_iteration_by_iteration_also_from_a_run_that_was_resumed(tmp_path):
    who, ahead, record = make_trainers(1, 1), 3, tmp_path / "folder" / "decisions.jsonl"

    def seconds(number, place):
        return [1e-2, 1e-3][(place + (number > 50)) % 2]

    def begin(**options):
        return [Rank(who, number, [0.5, 0.5], ahead=ahead, **options) for number in range(2)]

    first = begin(record=record)
    train(first, 40, ahead, lambda number, place: place, seconds)
    second = begin(record=record)
    for old, new in zip(first, second, strict=True):
        new.balance.load_state_dict(json.loads(json.dumps(old.balance.state_dict())))
        new.next = 40
    train(second, 80, ahead, lambda number, place: place, seconds, begin=40)
    check_ranks(second, 80, begin=40)
    in_force = {**first[0].in_force, **second[0].in_force}
    assert len({tuple(shares) for shares, *_ in in_force.values()}) > 2
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert [line["observation"] for line in lines] == sorted({line["observation"] for line in lines})
    replayed = begin(drm=record)
    train(replayed, 120, ahead, lambda number, place: 2 * place, lambda number, place: 1.0)
    check_ranks(replayed, 120)
    assert replayed[0].in_force == in_force


def test_a_state_of_another_version_begins_anew(tmp_path):
    who = make_trainers(1, 2)
    path = write_log(tmp_path, [Decision(assign((10, 10, 20)), "drawn", "start", 0)])
    measured, replays = Rank(who, 0, [0.25, 0.25, 0.5]).balance, Rank(who, 0, [0.2, 0.4, 0.4], drm=path).balance
    before = replays.state_dict()
    replays.load_state_dict(measured.state_dict())  # a state of the other kind
    replays.load_state_dict({"first": before["first"], "iteration": 9})  # a state of a run with drm=False
    assert replays.state_dict() == before
    kind = type(replays.manager).__name__
    with pytest.warns(UserWarning, match="hyscale rebalances"):
        replays.load_state_dict({"kind": kind, "manager": {"observation": 3}, "iteration": 5})
    assert replays.state_dict() == before
    with pytest.raises(ValueError, match="it is for 3 trainers, 1 on the CPU, and 40 seeds"):
        Rank(make_trainers(2, 1), 0, [0.2, 0.4, 0.4], drm=path)
    with pytest.raises(ValueError, match=r"but this run has 3, 1 and 20"):
        Rank(who, 0, [0.2, 0.4, 0.4], drm=path, total=20)


def test_a_record_that_cannot_be_written_on_is_warned_about_once(tmp_path, recwarn):
    record = tmp_path / "decisions.jsonl"
    ranks = [Rank(make_trainers(2, 0), number, [0.5, 0.5], ahead=2, record=record) for number in range(2)]
    record.unlink()
    record.mkdir()
    train(ranks, 60, 2, lambda number, place: 0, lambda number, place: [1e-2, 1e-3][place])
    check_ranks(ranks, 60)
    assert len(ranks[0].balance.manager.log) > 2
    assert len([warning for warning in recwarn if "so a replay would differ" in str(warning.message)]) == 1
    with pytest.raises(OSError, match="Is a directory"):
        Rank(make_trainers(2, 0), 0, [0.5, 0.5], record=record)


def test_the_clock_counts_a_ranks_own_work(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    clock = StageClock(CPU)
    assert clock.report == StepReport()

    def step(share, work, wait):
        clock.next_iteration(share)
        for part in work:
            with clock.working():
                now[0] += part
            now[0] += wait

    step(BatchShare(0, 8, 10, {"sample": 2.0, "load": 3.0}), [1.0, 4.0], 7.0)
    assert clock.report == StepReport()
    step(BatchShare(1, 0, 10, {"sample": 1.0}, sampled_on_accelerator=True), [0.5], 0.25)
    assert clock.report == StepReport(8.0, sample=2.0, load=3.0, train=5.0, iteration=19.0)
    step(BatchShare(2, 5, 10), [], 0)
    assert clock.report == StepReport(0.0, 1.0, sample=1.0, train=0.5, iteration=0.75)
    step(BatchShare(3, 5, 10, {"gpu_batching": 1.0, "uva": 2.0}), [0.5], 0)
    step(BatchShare(4, 5, 10), [], 0)
    assert clock.report == StepReport(5.0, train=3.5, iteration=0.5, gpu_batching=1.0, uva=2.0)
    step(BatchShare(0, 5, 10), [], 0)
    assert clock.report.iteration == -1.0  # the time between epochs does not count


@given(st.integers(0, 60), st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any))
def test_seeds_are_cut_in_proportion(num_seeds, weights):
    slices = split_seeds(num_seeds, weights)
    assert [start for start, _ in slices] == [0, *(stop for _, stop in slices[:-1])]
    assert slices[-1][1] == num_seeds
    sizes = [stop - start for start, stop in slices]
    assert min(sizes) >= 0
    working = sum(map(bool, weights))
    for size, weight in zip(sizes, weights, strict=True):
        assert weight or not size
        assert size or not weight or num_seeds < working + sum(map(bool, sizes))
        assert abs(size - num_seeds * weight / sum(weights)) < len(weights) + 1
    assert split_seeds(sum(weights), weights) == split_seeds(sum(weights), [7 * weight for weight in weights])
    assert [stop - start for start, stop in split_seeds(sum(weights), weights)] == weights


@pytest.mark.parametrize("total", [0, TOTAL])
def test_threads_follow_the_shares_also_of_mini_batches_of_unknown_sizes(total):
    who = make_trainers(1, 1)
    balance = BalanceController(who, make_mapping(who, [0.25, 0.75], total or NOMINAL_SEEDS, (8, 4, 3), 0.3), False)
    assert [balance.rank_threads(trainer) for trainer in range(2)] == [(2, 1, 3), (6, 3, 1)]
    assert [balance.current.sampled_fraction(trainer) for trainer in range(2)] == pytest.approx([0.0, 0.4])
