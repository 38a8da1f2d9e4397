"""Modules by node type or edge type, whatever the types are called."""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from torch import nn
from torch_geometric.nn import HeteroDictLinear
from torch_geometric.nn.module_dict import ModuleDict
from torch_geometric.typing import EdgeType, NodeType

_TAKEN = {*dir(nn.ModuleDict()), *dir(nn.ParameterDict())}
_CODED = re.compile(r"[#%]|(?<=__)_|_$")
_CODE = re.compile(r"%([0-9A-F]{2})?")


@lru_cache(1 << 12)
def type_key(name: str) -> str:
    """Return a name that a module may have, another one for each type, without ``___`` and without ``_`` at its end."""
    coded = _CODED.sub(lambda found: f"%{ord(found[0]):02X}", name).replace(".", "#")
    return coded if name and name not in _TAKEN else f"%{coded}"


class TypeModules(ModuleDict):  # type: ignore[misc]
    """PyG's ``ModuleDict``, in which no two types share a key."""

    def __init__(self, modules: Mapping[Any, nn.Module]) -> None:
        super().__init__()
        self.update(modules)

    @classmethod
    def to_internal_key(cls, key: NodeType | EdgeType) -> str:
        """Return the key of a type in ``state_dict``."""
        return type_key(key) if isinstance(key, str) else f"<{'___'.join(map(type_key, key))}>"

    @classmethod
    def to_external_key(cls, key: str) -> NodeType | EdgeType:
        """Return the type that has a key."""
        if "___" in key:
            source, name, target = map(_name, key[1:-1].split("___"))
            return source, name, target
        return _name(key)


def _name(key: str) -> str:
    return _CODE.sub(lambda found: chr(int(found[1], 16)) if found[1] else "", key.replace("#", "."))


class TypeLinear(HeteroDictLinear):  # type: ignore[misc]
    """PyG's ``HeteroDictLinear`` for types of any name."""

    lins: nn.ModuleDict

    def __init__(self, in_channels: dict[NodeType, int], out_channels: int) -> None:
        super().__init__({type_key(name): width for name, width in in_channels.items()}, out_channels)
        self.lins = TypeModules({name: self.lins[type_key(name)] for name in in_channels})
