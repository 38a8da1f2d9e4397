"""Seeded synthetic graphs with types, learnable: papers with authors and topics, and users who rate items over time."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch_geometric.data import HeteroData

from lightning_gnn.datasets.synthetic import Labels, at_least, check_planted, planted_labels, split_masks

__all__ = ["planted_papers", "planted_ratings"]


def planted_papers(
    num_papers: int = 60_000,
    num_authors: int = 40_000,
    num_topics: int = 2_000,
    num_classes: int = 16,
    num_features: int = 64,
    *,
    citations: int = 8,
    authors: int = 3,
    topics: int = 2,
    homophily: float = 0.6,
    feature_noise: float = 0.8,
    label_noise: float = 0.05,
    split: tuple[float, float, float] = (0.1, 0.05, 0.25),
    labels: Labels = "classes",
    seed: int = 0,
) -> HeteroData:
    """Draw papers that cite papers, have authors and topics, with planted communities; papers are to be classified.

    Each node belongs to a community, whose mean its features lie around; the class of a paper is its community. Each
    end of an edge is drawn with a skew, so that there are hubs.

    Args:
        num_papers, num_authors, num_topics: Nodes of each type.
        num_classes, num_features: Communities, and features of each node.
        citations, authors, topics: How many of them a paper has.
        homophily: Probability that the other end of an edge is drawn from the same community, else from all nodes.
        feature_noise, label_noise, split, labels, seed: As for
            :func:`~lightning_gnn.datasets.synthetic.planted_power_law`, of papers.

    Returns:
        ``HeteroData`` with ``x`` float32 ``[N_t, num_features]`` of ``paper``, ``author`` and ``topic``, the papers'
        ``y`` and masks as there, and the edge types ``(paper, cites, paper)``, ``(author, writes, paper)``,
        ``(topic, describes, paper)`` and their reverses, ``rev_…``, each ``edge_index`` int64 sorted by target.
    """
    sizes = {"paper": num_papers, "author": num_authors, "topic": num_topics}
    at_least(num_classes, num_papers=num_papers, num_authors=num_authors, num_topics=num_topics)
    at_least(0, citations=citations, authors=authors, topics=topics)
    check_planted(num_classes, num_features, homophily, feature_noise, seed, label_noise, split)
    rng = np.random.Generator(np.random.PCG64(seed))
    data, community = _nodes(rng, sizes, num_classes, num_features, feature_noise)
    for source, relation, per_paper in (("paper", "cites", citations), ("author", "writes", authors),
                                        ("topic", "describes", topics)):  # fmt: skip
        papers = np.repeat(np.arange(num_papers), per_paper)
        others = _partners(rng, community["paper"][papers], community[source], num_classes, homophily)
        # A paper cites: its edges lead away from it. Authors and topics lead to it.
        ends = (papers, others) if relation == "cites" else (others, papers)
        data[source, relation, "paper"].edge_index = _sorted(*ends)
        data["paper", f"rev_{relation}", source].edge_index = _sorted(*ends[::-1])

    data["paper"].y = planted_labels(rng, community["paper"], num_classes, labels, label_noise)
    data["paper"].update(split_masks(rng, num_papers, split))
    return data


def planted_ratings(
    num_users: int = 20_000,
    num_items: int = 5_000,
    num_ratings: int = 400_000,
    num_classes: int = 16,
    num_features: int = 32,
    *,
    homophily: float = 0.8,
    feature_noise: float = 0.5,
    seed: int = 0,
) -> HeteroData:
    """Draw users who rate items, one rating after the other, mostly items of their own community.

    Args:
        num_users, num_items, num_ratings: Nodes of each type, and edges.
        num_classes, num_features: Communities, and features of each node.
        homophily: Probability that an item is drawn from the user's community, else from all.
        feature_noise, seed: As for :func:`~lightning_gnn.datasets.synthetic.planted_power_law`.

    Returns:
        ``HeteroData`` with ``x`` float32 ``[N_t, num_features]`` of ``user`` and ``item``, and the edge types ``(user,
        rates, item)`` and ``(item, rev_rates, user)``, with ``time`` int64: 0 for the first rating.
    """
    # Each community needs a user and an item.
    at_least(num_classes, num_users=num_users, num_items=num_items)
    at_least(1, num_ratings=num_ratings)
    check_planted(num_classes, num_features, homophily, feature_noise, seed)
    # Draw nodes with features of their community.
    rng = np.random.Generator(np.random.PCG64(seed))
    sizes = {"user": num_users, "item": num_items}
    data, community = _nodes(rng, sizes, num_classes, num_features, feature_noise)
    # Squaring makes a few users rate much more than the others.
    users = (rng.random(num_ratings) ** 2 * num_users).astype(np.int64)
    items = _partners(rng, community["user"][users], community["item"], num_classes, homophily)
    # A rating and its reverse have the same time, by which they can be sampled.
    for kind, ends in ((("user", "rates", "item"), (users, items)), (("item", "rev_rates", "user"), (items, users))):
        data[kind].edge_index = torch.from_numpy(np.stack(ends))
        data[kind].time = torch.arange(num_ratings)
    return data


def _nodes(
    rng: np.random.Generator, sizes: dict[str, int], num_classes: int, num_features: int, noise: float
) -> tuple[HeteroData, dict[str, npt.NDArray[np.int64]]]:
    """Draw communities, and features around their means."""
    community = {name: rng.permutation(count) % num_classes for name, count in sizes.items()}
    data = HeteroData()
    for name, count in sizes.items():
        means = rng.standard_normal((num_classes, num_features), dtype=np.float32)
        means /= np.linalg.norm(means, axis=1, keepdims=True)
        x = rng.standard_normal((count, num_features), dtype=np.float32) * np.float32(noise)
        data[name].x = torch.from_numpy(x + means[community[name]])
    return data, community


def _partners(
    rng: np.random.Generator, wanted: npt.NDArray[np.int64], community: npt.NDArray[np.int64], count: int,
    homophily: float,
) -> npt.NDArray[np.int64]:  # fmt: skip
    """Draw a node for each wanted community: one of it with that probability, else any; first ones more often."""
    nodes = np.argsort(community, kind="stable")
    ends = np.concatenate([[0], np.cumsum(np.bincount(community, minlength=count))])
    place = rng.random(wanted.size) ** 2  # half of the draws fall on a quarter of the nodes
    inside = ends[wanted] + (place * (ends[wanted + 1] - ends[wanted])).astype(np.int64)
    anywhere = (rng.random(wanted.size) * len(nodes)).astype(np.int64)
    drawn: npt.NDArray[np.int64] = nodes[np.where(rng.random(wanted.size) < homophily, inside, anywhere)]
    return drawn


def _sorted(source: npt.NDArray[np.int64], target: npt.NDArray[np.int64]) -> Tensor:
    order = np.argsort(target, kind="stable")
    return torch.from_numpy(np.stack([source[order], target[order]]))
