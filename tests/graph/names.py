"""Names of node types and edge types that PyG's ``HeteroData`` takes."""

from hypothesis import strategies as st

EDGES = [(0, 1), (1, 2), (2, 0), (0, 2), (2, 2)]
"""Source and target types of each edge type, as indices."""
_ODD = ["", "keys", "training", "items", "weight", "type", "forward", "<keys>", "%keys", "%23", "rev_", "x", "CON"]
_ODD += ["to"]
_TEXTS = st.text("a_", max_size=4), st.text("aA_.#/\\ <>%\n:é", max_size=3), st.text(max_size=3)
_NAME = st.one_of(st.sampled_from(_ODD), *_TEXTS)


def name_types(nodes, relations):
    """Return node types and edge types; edge types with equal relations connect different node types."""
    return nodes, [(nodes[s], name, nodes[t]) for (s, t), name in zip(EDGES, relations, strict=True)]


NAMES = st.builds(
    name_types, st.lists(_NAME, min_size=3, max_size=3, unique=True), st.lists(_NAME, min_size=5, max_size=5)
)
