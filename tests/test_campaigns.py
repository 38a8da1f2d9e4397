"""Campaigns are cut into slices that together are everything, and a run says which it took."""

import shutil
import subprocess
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.campaigns import SLICES, fewer_examples, slice_of_commit

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


def test_a_run_says_its_slice_and_begins_with_what_takes_long(run):
    ran, _, shown = run("--slice=3", "-k", "not test_slow and not test_parts")
    assert "campaigns: slice 3 of 8; repeat it with --slice=3" in shown
    names = [test.rpartition("::")[2] for test in ran]
    assert names[:3] == ["test_kinds[a-3]", "test_kinds[b-3]", "test_cases[3]"]
    others = list(dict.fromkeys(name.partition("[")[0] for name in names[3:]))
    assert others == ["test_grid", "test_few", "test_draws", "test_no_campaign"]


def test_a_test_that_is_named_is_run_whole(run, pytester):
    (path,) = pytester.path.glob("test_*.py")
    assert len(run(f"{path}::test_grid")[0]) == 20
    assert len(run(f"{path}::test_slow")[0]) == 1
    (one,) = run(f"{path}::test_parts[4]")[0]
    assert one.endswith("test_parts[4]")
    # A slice has the same cases, whichever are named with it.
    assert sum(one in run(f"--slice={number}", f"{path}::test_parts")[0] for number in range(SLICES)) == 1
    assert sum(one in run(f"--slice={number}")[0] for number in range(SLICES)) == 1


def test_a_small_profile_draws_a_tenth():
    drawn = Counter()

    @settings(max_examples=60)
    @given(st.integers(0, 10**9))
    def asks_for_60(value):
        drawn["60"] += 1

    before = settings.get_current_profile_name()
    settings.load_profile("small")
    try:

        @given(st.integers(0, 10**9))
        def asks_for_none(value):
            drawn["none"] += 1

        for test in (asks_for_60, asks_for_none):
            fewer_examples(test)()
    finally:
        settings.load_profile(before)
    assert drawn == {"60": 6, "none": 10}


def test_the_commit_chooses(run, tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert slice_of_commit(tmp_path) == 0
    if not shutil.which("git"):
        return
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    chosen = set()
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    for message in map(str, range(30)):
        commit = ["git", "-C", str(tmp_path), *identity, "commit", "-q", "--allow-empty", "-m", message]
        subprocess.run(commit, check=True)
        head = subprocess.check_output(["git", "-C", str(tmp_path), "rev-parse", "HEAD"], text=True)
        assert slice_of_commit(tmp_path) == int(head, 16) % SLICES
        chosen.add(slice_of_commit(tmp_path))
    assert len(chosen) > 2


def test_a_slice_compiles_each_variant_for_one_generation_of_gpus():
    pytest.importorskip("triton", reason="it comes with the extra gpu")
    from tests.triton_kernels.compiling import targets

    variants = list("abcde")
    even, odd = (list(targets(variants, number)) for number in "01")
    for pairs in (even, odd):
        assert sorted(variant for _, variant in pairs) == variants
        assert {generation for generation, _ in pairs} == {80, 90}
    assert sorted(even + odd) == sorted(targets(variants)) == sorted(targets(variants, "all"))
    assert list(targets(variants, "4")) == even
