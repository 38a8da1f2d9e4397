"""An extension of Griffe, which reads docstrings for the reference: Sphinx roles become links, where there is a target.

``:class:`~lightning_gnn.nn.RGCN``` reads RGCN, and leads to its entry if the reference has one.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_ROLE = re.compile(r":(?:class|func|data|mod|meth|attr):`(~?)([\w.]+)`")
_PLACES = ("NeighborDataModule", "PersistentSamplerDataModule", "NeighborSampler", "CSCGraph", "CompressedGraph")


class Roles(Extension):
    """Rewrites roles before a docstring is taken apart."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Change the docstring of anything that has one."""
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(_link, obj.docstring.value)


def _link(found: re.Match[str]) -> str:
    """Return a link that may lead nowhere."""
    path = found[2]
    target = f"lightning_gnn.{path}" if path in _PLACES else path
    shown = path.rpartition(".")[2] if found[1] else path
    return f'<autoref identifier="{target}" optional><code>{shown}</code></autoref>'
