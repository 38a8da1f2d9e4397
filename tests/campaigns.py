"""Campaigns: tests of so many examples that a run takes one slice of them; all slices together are everything.

``make test`` takes the slice that the commit's hash chooses, ``make test-all`` takes all. ``@pytest.mark.campaign`` on
a parametrized test cuts its cases, of which each slice takes one at least. What is marked slow is cut by itself, and a
slice may take none of it: one without cases is in one slice of the ten.
"""

from __future__ import annotations

import subprocess
from typing import TypeVar
from zlib import crc32

import hypothesis
import pytest

SLICES = 10
T = TypeVar("T")
_PLACE = pytest.StashKey[tuple[int, int, int]]()
"""Place among the cases, how many there are, and a number of the test."""


def slice_of_commit(folder):
    """Return the number of the slice that the hash of the checked-out commit chooses; 0 outside of git."""
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return 0
    return int(head.stdout, 16) % SLICES


def campaign(test):
    """Mark a test that is run once per slice, with the slice's number as its argument ``number``."""
    return pytest.mark.campaign(pytest.mark.parametrize("number", range(SLICES))(test))


def place_cases(items):
    """Give the cases of one parametrized test their places, in an order without runs of similar cases."""
    mixed = sorted(items, key=lambda item: crc32(item.name.encode()))
    for place, item in enumerate(mixed):
        item.stash[_PLACE] = place, len(mixed), crc32(item.nodeid.partition("[")[0].encode())


def is_of_slice(item, chosen):
    """Say whether a slice takes a test, as each does with one that is neither slow nor a campaign."""
    slow, campaign = item.get_closest_marker("slow"), item.get_closest_marker("campaign")
    if not slow and not campaign:
        return True
    if "number" in (given := item.callspec.params if hasattr(item, "callspec") else {}):
        return bool(given["number"] == chosen)
    place, count, test = item.stash[_PLACE]
    parts = SLICES if slow else min(SLICES, count)
    return (place + test) % parts == chosen % parts


def cases_of(session, test):
    """Return the parameters of all cases of a test that are run: what a fixture for all of them has to make."""
    return [item.callspec.params for item in session.items if getattr(item, "function", None) is test]


def one_slice(cases, number):
    """Return a slice's share of the cases: every tenth, as neighbors resemble each other."""
    return cases[number::SLICES]


def drawn(count):
    """Make a campaign of a hypothesis test without other arguments: each slice draws its share from its own seed.

    Args:
        count: Examples of all slices together.
    """

    def decorate(test):
        test = hypothesis.settings(max_examples=count // SLICES)(test)

        def run(number):
            hypothesis.seed(number)(test)()

        run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
        return campaign(run)

    return decorate


def fewer_examples(test):
    """Let a test that asks hypothesis for a number of examples have the profile's share of them.

    A profile with a tenth of hypothesis' usual 100 examples gives it a tenth. Tests that ask for none follow the
    profile by themselves. Hypothesis has no public way to the settings of a test.
    """
    share = hypothesis.settings().max_examples / 100
    if share < 1 and hasattr(test, "_hypothesis_internal_settings_applied"):
        asked = test._hypothesis_internal_use_settings
        most = max(1, round(asked.max_examples * share))
        test._hypothesis_internal_use_settings = hypothesis.settings(asked, max_examples=most)
    return test
