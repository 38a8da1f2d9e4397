"""The Hydra configuration, as a package so that it is found wherever the project is installed."""
