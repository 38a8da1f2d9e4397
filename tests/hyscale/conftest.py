"""PyG's own loaders on this package's sampler, for one test at a time."""

import pytest

from lightning_gnn.pyg import enable_pyg_sampling


@pytest.fixture
def pyg_sampling():
    with enable_pyg_sampling():
        yield
