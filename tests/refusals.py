"""What a test of a refusal says: the error, words of its message, and the call."""

import pytest


def refuses(error, words, call, *args, **options):
    """Assert that a call raises an error whose message the pattern ``words`` finds."""
    with pytest.raises(error, match=words):
        call(*args, **options)
