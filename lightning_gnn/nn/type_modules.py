"""Modules by node type or edge type, for arbitrary type names."""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from torch import nn
from torch_geometric.nn import HeteroDictLinear
from torch_geometric.nn.module_dict import ModuleDict
from torch_geometric.typing import EdgeType, NodeType

_RESERVED_NAMES = {*dir(nn.ModuleDict()), *dir(nn.ParameterDict())}
_ENCODED = re.compile(r"[#%]|(?<=__)_|_$")
_ESCAPE = re.compile(r"%([0-9A-F]{2})?")


@lru_cache(1 << 12)
def type_key(name: str) -> str:
    """Encode a type as a unique, valid module name without ``___`` and without a trailing ``_``."""
    coded = _ENCODED.sub(lambda found: f"%{ord(found[0]):02X}", name).replace(".", "#")
    return coded if name and name not in _RESERVED_NAMES else f"%{coded}"


class TypeModules(ModuleDict):  # type: ignore[misc]
    """PyG's ``ModuleDict`` with a unique key for each type."""

    def __init__(self, modules: Mapping[Any, nn.Module]) -> None:
        super().__init__()
        self.update(modules)

    @classmethod
    def to_internal_key(cls, key: NodeType | EdgeType) -> str:
        """Return the key of a type in ``state_dict``."""
        return type_key(key) if isinstance(key, str) else f"<{'___'.join(map(type_key, key))}>"

    @classmethod
    def to_external_key(cls, key: str) -> NodeType | EdgeType:
        """Return the type of a key."""
        if "___" in key:
            source, name, target = map(_decode, key[1:-1].split("___"))
            return source, name, target
        return _decode(key)


def _decode(key: str) -> str:
    return _ESCAPE.sub(lambda found: chr(int(found[1], 16)) if found[1] else "", key.replace("#", "."))


class TypeLinear(HeteroDictLinear):  # type: ignore[misc]
    """PyG's ``HeteroDictLinear`` for arbitrary type names."""

    lins: nn.ModuleDict

    def __init__(self, in_channels: dict[NodeType, int], out_channels: int) -> None:
        super().__init__({type_key(name): width for name, width in in_channels.items()}, out_channels)
        self.lins = TypeModules({name: self.lins[type_key(name)] for name in in_channels})
