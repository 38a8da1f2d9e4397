"""Campaigns: tests with so large a number of cases that a run takes one slice; all slices together cover all cases.

``make test`` takes the slice that the commit's hash selects, ``make test-all`` takes all. ``@pytest.mark.campaign`` on
a parametrized test distributes its cases over the slices, at least one for each. Tests marked slow are distributed
separately: one without parameters is in one slice of the twelve, so a slice may have none of a slow test's cases.
"""

from __future__ import annotations

import subprocess
from typing import TypeVar
from zlib import crc32

import hypothesis
import pytest

SLICES = 12
T = TypeVar("T")
_PLACE = pytest.StashKey[tuple[int, int, int]]()
"""Index among the cases of a test, number of cases, and a hash of the test."""


def slice_of_commit(folder):
    """Return the slice that the hash of the checked-out commit selects; 0 outside of git."""
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return 0
    return int(head.stdout, 16) % SLICES


def campaign(test):
    """Mark a test that runs once per slice, with the slice as its argument ``number``."""
    return pytest.mark.campaign(pytest.mark.parametrize("number", range(SLICES))(test))


def place_cases(items):
    """Index the cases of one parametrized test, in an order without runs of similar cases."""
    mixed = sorted(items, key=lambda item: crc32(item.name.encode()))
    for place, item in enumerate(mixed):
        item.stash[_PLACE] = place, len(mixed), crc32(item.nodeid.partition("[")[0].encode())


def is_of_slice(item, chosen):
    """Return whether a slice includes a test; every slice includes those that are neither slow nor a campaign."""
    slow, campaign = item.get_closest_marker("slow"), item.get_closest_marker("campaign")
    if not slow and not campaign:
        return True
    if "number" in (given := item.callspec.params if hasattr(item, "callspec") else {}):
        return bool(given["number"] == chosen)
    place, count, test = item.stash[_PLACE]
    parts = SLICES if slow else min(SLICES, count)
    return (place + test) % parts == chosen % parts


def cases_of(session, test):
    """Return the parameters of all selected cases of a test, for fixtures that prepare all of them."""
    return [item.callspec.params for item in session.items if getattr(item, "function", None) is test]


def one_slice(cases, number):
    """Return a slice's share of the cases: every twelfth, because adjacent cases are similar."""
    return cases[number::SLICES]


def drawn(count):
    """Make a campaign of a hypothesis test of ``count`` examples; each slice draws its share from its own seed."""

    def decorate(test):
        test = hypothesis.settings(max_examples=count // SLICES)(test)

        def run(number):
            hypothesis.seed(number)(test)()

        run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
        return campaign(run)

    return decorate


def fewer_examples(test):
    """Scale the number of examples that a hypothesis test sets to the profile's share of the default of 100.

    Tests without such a setting follow the profile anyway. Hypothesis has no public access to the settings of a test.
    """
    share = hypothesis.settings().max_examples / 100
    if share < 1 and hasattr(test, "_hypothesis_internal_settings_applied"):
        asked = test._hypothesis_internal_use_settings
        most = max(1, round(asked.max_examples * share))
        test._hypothesis_internal_use_settings = hypothesis.settings(asked, max_examples=most)
    return test
