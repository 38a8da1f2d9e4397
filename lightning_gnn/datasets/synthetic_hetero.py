"""Seeded, learnable heterogeneous graphs: papers with authors and topics, and users who rate items over time."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch_geometric.data import HeteroData

from lightning_gnn.datasets.synthetic import Labels, check_at_least, check_planted, draw_labels, draw_masks

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
    """Draw a heterogeneous citation graph with planted communities for the classification of papers.

    Each node belongs to a community, and its features are the community mean plus noise; the class of a paper is its
    community. Edge endpoints are drawn from a skewed distribution, which creates hubs.

    Args:
        num_papers, num_authors, num_topics: Number of nodes of each type.
        num_classes, num_features: Number of communities, and of features per node.
        citations, authors, topics: Number of each per paper.
        homophily: Probability that the other endpoint is drawn from the same community instead of from all nodes.
        feature_noise, label_noise, split, labels, seed: Same as for
            :func:`~lightning_gnn.datasets.synthetic.planted_power_law`; labels and split concern the papers.

    Returns:
        ``HeteroData`` with ``x`` float32 ``[N_t, num_features]`` for ``paper``, ``author`` and ``topic``, ``y`` and
        masks for the papers, and the edge types ``(paper, cites, paper)``, ``(author, writes, paper)``,
        ``(topic, describes, paper)`` and their reverses, ``rev_…``, each ``edge_index`` int64 sorted by target.
    """
    sizes = {"paper": num_papers, "author": num_authors, "topic": num_topics}
    check_at_least(num_classes, num_papers=num_papers, num_authors=num_authors, num_topics=num_topics)
    check_at_least(0, citations=citations, authors=authors, topics=topics)
    check_planted(num_classes, num_features, homophily, feature_noise, seed, label_noise, split)
    rng = np.random.Generator(np.random.PCG64(seed))
    data, community = _draw_nodes(rng, sizes, num_classes, num_features, feature_noise)
    for source, relation, per_paper in (("paper", "cites", citations), ("author", "writes", authors),
                                        ("topic", "describes", topics)):  # fmt: skip
        papers = np.repeat(np.arange(num_papers), per_paper)
        others = _draw_partners(rng, community["paper"][papers], community[source], num_classes, homophily)
        # Citations lead from a paper to another one; authors and topics lead to a paper.
        ends = (papers, others) if relation == "cites" else (others, papers)
        data[source, relation, "paper"].edge_index = _sort_by_target(*ends)
        data["paper", f"rev_{relation}", source].edge_index = _sort_by_target(*ends[::-1])

    data["paper"].y = draw_labels(rng, community["paper"], num_classes, labels, label_noise)
    data["paper"].update(draw_masks(rng, num_papers, split))
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
    """Draw a temporal graph of users who rate items, mostly items of their own community.

    Args:
        num_users, num_items, num_ratings: Number of nodes of each type, and of edges.
        num_classes, num_features: Number of communities, and of features per node.
        homophily: Probability that an item is drawn from the user's community instead of from all items.
        feature_noise, seed: Same as for :func:`~lightning_gnn.datasets.synthetic.planted_power_law`.

    Returns:
        ``HeteroData`` with ``x`` float32 ``[N_t, num_features]`` for ``user`` and ``item``, and the edge types ``(user,
        rates, item)`` and ``(item, rev_rates, user)``, with ``time`` int64: 0 for the first rating.
    """
    # Each community needs at least one user and one item.
    check_at_least(num_classes, num_users=num_users, num_items=num_items)
    check_at_least(1, num_ratings=num_ratings)
    check_planted(num_classes, num_features, homophily, feature_noise, seed)
    # Draw communities and features of the nodes.
    rng = np.random.Generator(np.random.PCG64(seed))
    sizes = {"user": num_users, "item": num_items}
    data, community = _draw_nodes(rng, sizes, num_classes, num_features, feature_noise)
    # Squaring skews the distribution: a few users rate much more than the others.
    users = (rng.random(num_ratings) ** 2 * num_users).astype(np.int64)
    items = _draw_partners(rng, community["user"][users], community["item"], num_classes, homophily)
    # A rating and its reverse have the same time, for temporal sampling.
    for kind, ends in ((("user", "rates", "item"), (users, items)), (("item", "rev_rates", "user"), (items, users))):
        data[kind].edge_index = torch.from_numpy(np.stack(ends))
        data[kind].time = torch.arange(num_ratings)
    return data


def _draw_nodes(
    rng: np.random.Generator, sizes: dict[str, int], num_classes: int, num_features: int, noise: float
) -> tuple[HeteroData, dict[str, npt.NDArray[np.int64]]]:
    """Draw communities, and features around the community means."""
    community = {name: rng.permutation(count) % num_classes for name, count in sizes.items()}
    data = HeteroData()
    for name, count in sizes.items():
        means = rng.standard_normal((num_classes, num_features), dtype=np.float32)
        means /= np.linalg.norm(means, axis=1, keepdims=True)
        x = rng.standard_normal((count, num_features), dtype=np.float32) * np.float32(noise)
        data[name].x = torch.from_numpy(x + means[community[name]])
    return data, community


def _draw_partners(
    rng: np.random.Generator, communities: npt.NDArray[np.int64], community: npt.NDArray[np.int64], count: int,
    homophily: float,
) -> npt.NDArray[np.int64]:  # fmt: skip
    """Draw a partner node for each community, from it or (with ``1 - homophily``) from all nodes."""
    nodes = np.argsort(community, kind="stable")
    ends = np.concatenate([[0], np.cumsum(np.bincount(community, minlength=count))])
    quantile = rng.random(communities.size) ** 2  # half of the draws fall on a quarter of the nodes
    inside = ends[communities] + (quantile * (ends[communities + 1] - ends[communities])).astype(np.int64)
    anywhere = (rng.random(communities.size) * len(nodes)).astype(np.int64)
    partners: npt.NDArray[np.int64] = nodes[np.where(rng.random(communities.size) < homophily, inside, anywhere)]
    return partners


def _sort_by_target(source: npt.NDArray[np.int64], target: npt.NDArray[np.int64]) -> Tensor:
    order = np.argsort(target, kind="stable")
    return torch.from_numpy(np.stack([source[order], target[order]]))
