"""Hydra with the configurations of this package and of installed systems."""

from collections.abc import Callable
from typing import Any

import hydra
from hydra import initialize_config_module
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig

from lightning_gnn.systems import find_configurations

_CONF = "lightning_gnn.conf"


class InstalledSystems(SearchPathPlugin):
    """Adds the folder ``conf`` of each installed system to Hydra's search path, behind this package's."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the folders, in the order of the systems' names."""
        for name, folder in find_configurations():
            search_path.append(provider=name, path=f"file://{folder}")


def initialize() -> initialize_config_module:
    """Return a context within which ``hydra.compose`` finds all configurations."""
    Plugins.instance().register(InstalledSystems)
    return initialize_config_module(_CONF, version_base="1.3")


def run_application(job: Callable[[DictConfig], Any], config_name: str) -> None:
    """Run a function as a Hydra application, with the options in ``sys.argv``."""
    Plugins.instance().register(InstalledSystems)
    hydra.main(version_base="1.3", config_path=f"pkg://{_CONF}", config_name=config_name)(job)()
