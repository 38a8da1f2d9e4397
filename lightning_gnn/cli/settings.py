"""``NAME=VALUE`` of commands that take few settings, and no configuration of Hydra's."""

from collections.abc import Sequence
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_gnn.runtime.messages import removed


def parsed(kind: type, settings: Sequence[str], command: str) -> Any:
    """Return a dataclass filled with settings."""
    for name in (setting.partition("=")[0] for setting in settings):
        if (gone := removed(f"{command.rpartition(' ')[2]}.{name}")) is not None:
            raise ValueError(gone)
    try:
        found = OmegaConf.merge(OmegaConf.structured(kind), OmegaConf.from_dotlist(list(settings)))
        missing = sorted(map(str, OmegaConf.missing_keys(found)))
    except OmegaConfBaseException as error:
        raise ValueError(f"{str(error).splitlines()[0]}; see {command} --help") from None
    if missing:
        raise ValueError(f"give {', '.join(f'{name}=' for name in missing)}; see {command} --help")
    return OmegaConf.to_object(found)
