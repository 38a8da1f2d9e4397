"""An extension of Griffe, which reads docstrings for the reference.

Sphinx roles become links, where there is a target: ``:class:`~lightning_gnn.nn.RGCN``` reads RGCN, and leads to its
entry if the reference has one. Arguments that share a description (``a, b: ...``) become one entry each. Arguments of a
class whose ``__init__`` is another package's, which Griffe does not see, are listed as its attributes.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from griffe import Extension, Object

_ROLE = re.compile(r":(?:class|func|data|mod|meth|attr):`(~?)([\w.]+)`")
_SHARED = re.compile(r"(?m)^( +)(\*{0,2}\w+(?:, \*{0,2}\w+)+)( \([^)]*\))?: (.*(?:\n\1 +.*)*)")
_FOREIGN = ("NamedTuple", "torch.nn.Dropout", "nn.Dropout")
_PUBLIC = set(re.findall(r"(?m)^::: lightning_gnn\.(\w+)$", (Path(__file__).parent / "reference/index.md").read_text()))


class Roles(Extension):
    """Rewrites roles before a docstring is taken apart."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Change the docstring of anything that has one."""
        if obj.docstring is None:
            return
        start, args, rest = _ROLE.sub(_link, obj.docstring.value).partition("Args:\n")
        args, end, rest = (args + rest).partition("\n\n")
        obj.docstring.value = start + _SHARED.sub(_entries, args) + end + rest
        if obj.is_class and "__init__" not in obj.members and any(str(base) in _FOREIGN for base in obj.bases):
            obj.docstring.value = obj.docstring.value.replace("Args:\n", "Attributes:\n")


def _entries(found: re.Match[str]) -> str:
    """Return an entry for each of several arguments."""
    indent, names, kind, text = found.groups(default="")
    return "\n".join(f"{indent}{name}{kind}: {text}" for name in names.split(", "))


def _link(found: re.Match[str]) -> str:
    """Return a link that may lead nowhere."""
    path, name = found[2], found[2].rpartition(".")[2]
    target = f"lightning_gnn.{name}" if name in _PUBLIC else path
    shown = name if found[1] else path
    return f'<autoref identifier="{target}" optional><code>{shown}</code></autoref>'
