"""The size from which on layers are fused, for tests of both paths on small mini-batches."""

from dataclasses import replace

from lightning_gnn.nn.conv.backends import IMPLS


def fuse_from(size, monkeypatch):
    """Fuse layers on mini-batches of at least ``size`` edges times columns."""
    for operator, impls in IMPLS.items():
        monkeypatch.setitem(IMPLS, operator, tuple(replace(impl, least_size=size) for impl in impls))
