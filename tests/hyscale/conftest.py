"""Fixture: replace PyG's own samplers by those of this package for one test."""

import pytest

from lightning_gnn.pyg import enable_pyg_sampling


@pytest.fixture
def pyg_sampling():
    with enable_pyg_sampling():
        yield
