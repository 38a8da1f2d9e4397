"""Assertion for refused calls."""

import pytest


def refuses(error, words, call, *args, **options):
    """Assert that a call raises an error with a message that matches the pattern ``words``."""
    with pytest.raises(error, match=words):
        call(*args, **options)
