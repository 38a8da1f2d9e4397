import pickle
from importlib import import_module

import pytest

from lightning_gnn.features import FeatureTable
from lightning_gnn.runtime.messages import REMOVED
from lightning_gnn.runtime.moved_names import MOVED_MODULES, MOVED_NAMES

NAMES = sorted(name for name in REMOVED if name.startswith("lightning_gnn."))


@pytest.mark.parametrize("name", NAMES)
def test_a_removed_name_says_what_to_use_instead(name):
    package, _, attribute = name.rpartition(".")
    with pytest.raises(ImportError) as caught:
        getattr(import_module(package), attribute)
    assert str(caught.value) == f"{name} was removed: {REMOVED[name]}"
    with pytest.raises(AttributeError, match="has no attribute 'other'"):
        import_module(package).other  # noqa: B018


@pytest.mark.parametrize(("old", "new"), MOVED_NAMES.items())
def test_a_moved_name_is_found_where_it_was(old, new):
    package, _, name = old.rpartition(".")
    with pytest.warns(DeprecationWarning, match=f"{old} is {new} now"):
        found = getattr(import_module(package), name)
    room, _, name = new.rpartition(".")
    assert found is getattr(import_module(room), name)


@pytest.mark.parametrize(("old", "new"), MOVED_MODULES.items())
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_moved_module_is_the_same_module(old, new):
    assert import_module(old) is import_module(new)
    assert import_module(new).__spec__.name == new


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_was_pickled_before_is_read():
    table = pickle.dumps(FeatureTable, protocol=0).replace(
        b"lightning_gnn.features.table", b"lightning_gnn.graph.features"
    )
    assert pickle.loads(table) is FeatureTable
