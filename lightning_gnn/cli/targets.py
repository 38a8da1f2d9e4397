"""Find what ``_target_`` of a configuration names, before it is built."""

from pkgutil import resolve_name

from omegaconf import DictConfig


def target_of(node: object) -> object:
    """Return the class or function that a node of the configuration names; None if it cannot be imported."""
    target = node.get("_target_") if isinstance(node, DictConfig) else None
    try:
        return resolve_name(target) if isinstance(target, str) else None
    except Exception:  # importing a user's file may raise any error, which building the node reports
        return None


def is_a(node: object, *classes: type) -> bool:
    """Return whether a node of the configuration builds one of these classes or a subclass."""
    target = target_of(node)
    return isinstance(target, type) and issubclass(target, classes)
