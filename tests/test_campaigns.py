"""Campaigns are cut into slices that together are everything."""

from collections import Counter

import pytest

from tests.campaigns import SLICES

pytest_plugins = ("pytester",)

TESTS = """
from hypothesis import given
from hypothesis import strategies as st
from tests.campaigns import campaign, drawn, one_slice

@campaign
def test_cases(number):
    for case in one_slice(range(100), number):
        print("\\ncase", case)

@campaign
@pytest.mark.slow
@pytest.mark.parametrize("kind", "ab")
def test_kinds(kind, number):
    pass

@pytest.mark.campaign
@pytest.mark.parametrize("one", range(4))
@pytest.mark.parametrize("two", range(5))
def test_grid(one, two):
    pass

@pytest.mark.slow
@pytest.mark.parametrize("one", range(10))
def test_parts(one):
    pass

@pytest.mark.campaign
@pytest.mark.parametrize("one", range(2))
def test_few(one):
    pass

@pytest.mark.slow
def test_slow():
    pass

@drawn(800)
@given(st.integers(0, 10**9))
def test_draws(value):
    print("\\ndrawn", value)

def test_no_campaign():
    pass
"""


@pytest.fixture
def run(pytester):
    """Run these tests with arguments; returns (the tests that ran, what they printed, everything shown)."""
    pytester.makeini("[pytest]\nmarkers =\n    slow: long\n    campaign: a slice\n")
    pytester.makeconftest("from tests.conftest import *")
    pytester.makepyfile(f"import pytest\n{TESTS}")

    def run_with(*arguments):
        # faulthandler is of the whole process, in which these tests run too.
        result = pytester.runpytest_inprocess("-s", "-p", "no:xdist", "-p", "no:faulthandler", *arguments)
        ran = [
            report.nodeid for report in result.reprec.getreports("pytest_runtest_logreport") if report.when == "call"
        ]
        assert result.ret == 0
        lines = [line.lstrip(".") for line in result.outlines]
        return ran, Counter(line for line in lines if line.startswith(("case", "drawn"))), "\n".join(lines)

    return run_with


@pytest.mark.slow
def test_all_slices_together_are_everything(run):
    parts = [run(f"--slice={number}") for number in range(SLICES)]
    whole, printed, shown = run("--slice=all")
    assert "campaigns: all slices" in shown
    ran = Counter(test for tests, _, _ in parts for test in tests)
    assert ran.keys() == set(whole)
    # Of fewer cases than there are slices, several slices take the same.
    often = {test.rpartition("::")[2].partition("[")[0] for test in ran if ran[test] > 1}
    assert often == {"test_no_campaign", "test_few"}
    for tests, _, _ in parts:
        counts = Counter(test.rpartition("::")[2].partition("[")[0] for test in tests)
        assert counts["test_grid"] in (2, 3)
        assert counts["test_parts"] in (1, 2)
        assert counts["test_few"] == 1
    assert sum((lines for _, lines, _ in parts), Counter()) == printed
    assert {f"case {case}" for case in range(100)} <= printed.keys()
    draws = sum(count for line, count in printed.items() if line.startswith("drawn"))
    assert draws == 800


def test_a_test_that_is_named_is_run_whole(run, pytester):
    (path,) = pytester.path.glob("test_*.py")
    assert len(run(f"{path}::test_grid")[0]) == 20
    assert len(run(f"{path}::test_slow")[0]) == 1
    (one,) = run(f"{path}::test_parts[4]")[0]
    assert one.endswith("test_parts[4]")
    # A slice has the same cases, whichever are named with it.
    assert sum(one in run(f"--slice={number}", f"{path}::test_parts")[0] for number in range(SLICES)) == 1
    assert sum(one in run(f"--slice={number}")[0] for number in range(SLICES)) == 1
