from importlib import import_module

import pytest

from lightning_gnn.runtime.messages import REMOVED

NAMES = sorted(name for name in REMOVED if name.startswith("lightning_gnn."))


@pytest.mark.parametrize("name", NAMES)
def test_a_removed_name_says_what_to_use_instead(name):
    package, _, attribute = name.rpartition(".")
    with pytest.raises(ImportError) as caught:
        getattr(import_module(package), attribute)
    assert str(caught.value) == f"{name} was removed: {REMOVED[name]}"
    with pytest.raises(AttributeError, match="has no attribute 'other'"):
        import_module(package).other  # noqa: B018
