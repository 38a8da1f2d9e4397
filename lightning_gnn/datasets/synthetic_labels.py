"""What drawn nodes are labelled with: a class, several labels, or a number."""

from typing import Literal

import numpy as np
import numpy.typing as npt
from torch import Tensor, from_numpy

Labels = Literal["classes", "several", "numbers"]
_SHARE = 0.2  # how likely a community has the label of another one


def planted_labels(
    rng: np.random.Generator, community: npt.NDArray[np.int64], num_classes: int, labels: Labels, noise: float
) -> Tensor:
    """Draw labels that follow from the communities of nodes, but for some noise.

    Args:
        community: The community of each node, int64 ``[N]`` in ``[0, num_classes)``.
        labels: ``"classes"``: a node has the class of its community; ``"several"``: it has the label of its community
            and those of some others, the same for all of the community; ``"numbers"``: it has its community's number,
            drawn from the standard normal distribution.
        noise: Probability that a class, or one of the labels, is redrawn uniformly; of numbers the standard deviation
            of what is added.

    Returns:
        int64 ``[N]``, int64 ``[N, C]`` of 0 and 1, or float32 ``[N]``.
    """
    size = community.size
    if labels == "classes":
        redrawn = rng.random(size) < noise
        return from_numpy(np.where(redrawn, rng.integers(num_classes, size=size), community))
    if labels == "several":
        has = np.eye(num_classes, dtype=np.bool_) | (rng.random((num_classes, num_classes)) < _SHARE)
        redrawn = rng.random((size, num_classes)) < noise
        return from_numpy(np.where(redrawn, rng.integers(2, size=redrawn.shape), has[community]))
    if labels == "numbers":
        numbers = rng.standard_normal(num_classes)[community] + noise * rng.standard_normal(size)
        return from_numpy(numbers.astype(np.float32))
    raise ValueError(f"labels={labels!r} is unknown; use classes, several or numbers")
