"""Every scenario shows the same behavior of Lightning's Trainer under our strategies as in one process."""

import pickle
import re
from functools import cache, partial

import pytest
import torch

from tests.campaigns import SLICES
from tests.full_graph.launch import observe
from tests.hyscale.behaviour import SCENARIOS
from tests.hyscale.behaviour.task import read_outcomes, run_scenarios
from tests.once import once

ALONE = {False: ("auto", 1, False), True: ("auto", 1, True)}
"""Reference runs: mini-batches and full graphs."""
WAYS = {
    "hyscale": ("hyscale", 2, False),
    "hyscale alone": ("hyscale", 1, False),
    "ascend_hybrid": ("ascend_hybrid", 1, True),
    "ascend_hybrid on two ranks": ("ascend_hybrid", 2, True),
}
"""Strategy, number of ranks, whether batches are full graphs."""
_HOOKS_COME_FIRST = "as under DDP, hooks on parameters see the rank's own gradient, so that they must be linear"
_OWN_ROWS = "as under DDP, what a step writes into the module is of the rank's own nodes, unless it is reduced"
_TWO_RANKS = {
    "hooks_on_parameters_which_are_not_linear": (("weights", "metrics"), _HOOKS_COME_FIRST),
    "a_metric_by_step": (("each", "metrics"), "torchmetrics joins single steps with dist_sync_on_step=True only"),
}
OTHERWISE = {
    "hyscale": _TWO_RANKS
    | {
        "a_mean_without_a_batch_size": (("each", "metrics", "logged"), "it counts seeds, Lightning sampled nodes"),
        "batch_normalization": (("weights", "metrics", "running"), "as under DDP, statistics are of a rank's seeds"),
        "hooks_of_prediction": (("calls",), "rank 0 predicts, and the others wait for what it found"),
    },
    "ascend_hybrid on two ranks": _TWO_RANKS
    | {
        "a_step_without_a_loss_is_skipped": ("Skipping the `training_step`", "Lightning refuses it on several devices"),
        "a_histogram_of_labels": (("labels",), _OWN_ROWS),
        "a_history_of_embeddings": (("history",), _OWN_ROWS),
        "batch_normalization": ("normalizes over all nodes", "statistics would be of each rank's rows"),
        "by_rank_zero_alone": ("rank_zero_only=True", "each rank has some of the rows, and all must log"),
    },
}
"""Expected differences by way and scenario: keys that differ or a pattern of the error, and the reason."""
ALWAYS = (
    "plain_training", "lbfgs_with_a_line_search", "gradients_are_accumulated_by_a_schedule",
    "parameters_are_added_in_mid_training",
    "batch_normalization", "a_step_without_a_loss_is_skipped", "by_hand_two_optimizers_take_turns",
    "training_stops_early", "exponential_weight_averaging", "the_best_are_saved", "training_goes_on_in_mid_epoch",
    "all_stages_one_after_another", "pygs_own_loader", "hooks_of_fitting", "in_all_hooks",
    "validation_within_an_epoch", "a_rate_that_falls_on_a_plateau_of_validation", "a_history_of_embeddings",
)  # fmt: skip
"""Run in all slices for two hyscale trainers: one or two scenarios of each kind."""


def list_names(full):
    return [name for name, scenario in SCENARIOS.items() if scenario.full or not full]


def cases():
    """Yield ways and scenarios: those of ALWAYS run in every slice, each other one in a single slice."""
    for way, (_, _, full) in WAYS.items():
        for place, name in enumerate(list_names(full)):
            marks = [] if way == "hyscale" and name in ALWAYS else [pytest.mark.campaign]
            title = f"{way}-{name}".replace(" ", "-")
            yield pytest.param(way, name, place % SLICES, id=title, marks=marks)


@pytest.fixture(scope="session")
def outcomes(request, tmp_path_factory):
    """Return a function that runs the scenarios of a way and returns by name what the ranks observed."""
    wanted = {}
    for item in request.session.items:
        if getattr(item, "originalname", "") == test_a_strategy_behaves_like_one_process.__name__:
            given = item.callspec.params
            for way in (WAYS[given["way"]], ALONE[WAYS[given["way"]][2]]):
                wanted.setdefault(way, {})[given["name"]] = None

    @cache
    def find(way):
        name = f"behaviour-{'-'.join(map(str, way))}"
        folder = once(tmp_path_factory, name, partial(run_all, way, list(wanted[way])))
        return pickle.loads((folder / "outcomes.pickle").read_bytes())

    return find


def run_all(way, left, folder):
    """Run scenarios; restart the ranks after one that fails on some ranks only."""
    found = {}
    while left:
        home = folder / str(len(left))
        ended = observe(run_scenarios, way[1], left, way, str(home))
        # After a scenario that only one rank did not survive, later errors are consequences and are dropped.
        found |= read_outcomes(left, way, home) or {left[0]: [("raised", error) for error in ended.errors]}
        left = [name for name in left if name not in found]
    (folder / "outcomes.pickle").write_bytes(pickle.dumps(found))


def compare(expected, found, tolerance, where=""):
    """Yield a description of each difference."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in sorted({*expected, *found}, key=str):
            if key not in expected or key not in found:
                yield f"{where}: {key!r} is only in {'what was found' if key in found else 'what was expected'}"
            else:
                yield from compare(expected[key], found[key], tolerance, f"{where}[{key!r}]")
    elif isinstance(expected, list | tuple) and isinstance(found, list | tuple):
        if len(expected) != len(found):
            yield f"{where}: {len(found)} instead of {len(expected)}: {found} instead of {expected}"
            return
        for place, (one, other) in enumerate(zip(expected, found, strict=True)):
            yield from compare(one, other, tolerance, f"{where}[{place}]")
    elif isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor):
        try:
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
        except AssertionError as error:
            yield f"{where}: {error}"
    elif isinstance(expected, float) and isinstance(found, float):
        # Lightning keeps logs in single precision.
        if found != pytest.approx(expected, rel=max(tolerance, 1e-6), abs=max(tolerance, 1e-6), nan_ok=True):
            yield f"{where}: {found} instead of {expected}"
    elif expected != found:
        yield f"{where}: {found!r} instead of {expected!r}"


def unwrap(outcome):
    kind, observed = outcome
    assert kind == "seen", observed
    return observed


@pytest.mark.slow
@pytest.mark.parametrize(("way", "name", "number"), cases())
def test_a_strategy_behaves_like_one_process(way, name, number, outcomes):
    expected = unwrap(outcomes(ALONE[WAYS[way][2]])[name][0])
    ranks = outcomes(WAYS[way])[name]
    otherwise, _ = OTHERWISE.get(way, {}).get(name, ((), ""))
    if isinstance(otherwise, str):
        assert all(kind == "raised" and re.search(otherwise, observed) for kind, observed in ranks), ranks
        return
    for key in otherwise:
        pairs = [(expected[key], unwrap(rank)[key]) for rank in ranks]
        assert any(list(compare(*pair, SCENARIOS[name].tolerance)) for pair in pairs), f"{key} is as it should be"
    for number, rank in enumerate(ranks):
        left_out = {*otherwise, *(["rank 0"] if number else [])}
        wanted, found = (
            {k: v for k, v in observed.items() if k not in left_out} for observed in (expected, unwrap(rank))
        )
        found = list(compare(wanted, found, SCENARIOS[name].tolerance))
        assert not found, f"rank {number}: " + "\n".join(found)


def test_what_is_always_run_is_a_scenario():
    assert set(ALWAYS) <= set(list_names(False))


def test_every_exception_is_of_a_case():
    assert {(way, name) for way, names in OTHERWISE.items() for name in names} <= {case.values[:2] for case in cases()}
