"""Pages that need nothing but themselves: text is escaped wherever it comes from, and nothing is fetched."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from lightning_gnn.runtime.files import read_text

LARGEST_TEXT = 1 << 20

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Even if something slipped in, a browser would neither run nor fetch it."""

_STYLE = """
:root { color-scheme: light dark; --back: #ffffff; --ink: #30343b; --dim: #6b7280; --rule: #dfe2e6; --card: #f6f7f9;
  --c0: #3b6fb6; --c1: #c8701a; --c2: #3a8a5d; --c3: #b8473d; --c4: #7a5bb0; --c5: #8a8f98; }
@media (prefers-color-scheme: dark) { :root { --back: #16181c; --ink: #e4e6ea; --dim: #9aa1ac; --rule: #343941;
  --card: #1f2228; --c0: #7aa8e6; --c1: #eda45c; --c2: #6fc498; --c3: #e8857c; --c4: #b49be6; --c5: #9aa1ac; } }
body { background: var(--back); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; margin: 0 auto;
  max-width: 70rem; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.35rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 2.2rem 0 .6rem; }
p { margin: .4rem 0; overflow-wrap: anywhere; }
.dim { color: var(--dim); font-size: .87rem; } .bad { color: var(--c3); }
.wide { overflow-x: auto; } .wide + .wide { margin-top: 1rem; } .wide svg { min-width: 44rem; }
.row { display: grid; gap: 1.2rem; grid-template-columns: repeat(auto-fill, minmax(min(24rem, 100%), 1fr)); }
table { border-collapse: collapse; } th { text-align: left; font-weight: 600; white-space: nowrap; }
td, th { padding: .22rem .9rem .22rem 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.name { white-space: nowrap; }
pre { background: var(--card); border-radius: 6px; font-size: .85rem; overflow-x: auto;
  padding: .7rem .9rem; margin: .4rem 0; }
svg { display: block; height: auto; width: 100%; } svg text { fill: var(--ink); font: 11px system-ui, sans-serif; }
svg .title { font-weight: 600; font-size: 12px; } svg .faint { stroke: var(--rule); } svg .end { text-anchor: end; }
svg .middle { text-anchor: middle; } svg polyline { fill: none; stroke-width: 1.8; }
svg .dashed { stroke-dasharray: 5 4; }
a { color: var(--c0); } summary { cursor: pointer; }
""" + "".join(f".s{i} {{ stroke: var(--c{i}); }} .f{i} {{ fill: var(--c{i}); }}\n" for i in range(6))


class Html(str):
    """Text that is markup already."""


def tag(element: str, /, *children: object, **attributes: object) -> Html:
    """Return an element.

    Args:
        *children: :class:`Html` as it is, anything else as escaped text; None is left out.
        **attributes: Values are escaped; None leaves one out. A ``_`` at the end is dropped, others become ``-``.
    """
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    opened = "".join([element, *(f' {key}="{escape(str(value))}"' for key, value in given.items())])
    if element == "meta":
        return Html(f"<{opened}>")
    return Html(f"<{opened}>{joined(children)}</{element}>")


def joined(children: Iterable[object]) -> Html:
    """Return elements and texts behind one another."""
    return Html(
        "".join(child if isinstance(child, Html) else escape(str(child)) for child in children if child is not None)
    )


def table(rows: Iterable[Sequence[object]], head: Sequence[str] = (), numbers: Iterable[int] = ()) -> Html:
    """Return a table; the columns ``numbers`` are set to the right."""
    right = set(numbers)
    body = [
        tag("tr", *(tag("td", cell, class_="number" if i in right else None) for i, cell in enumerate(row)))
        for row in rows
    ]
    first = [tag("tr", *(tag("th", cell) for cell in head))] if head else []
    return tag("div", tag("table", *first, *body), class_="wide")


def file_of(path: Path) -> Html | None:
    """Return a text file to be unfolded; None if there is none, or it is too large."""
    try:
        text = read_text(path, LARGEST_TEXT)
    except (OSError, ValueError):
        return None
    return tag("details", tag("summary", path.name), tag("pre", text))


def section(title: str, *content: Html | None) -> Html | None:
    """Return what is under a heading; None where there is nothing."""
    return joined([tag("h2", title), *content]) if any(part is not None for part in content) else None


def page(title: str, *sections: object) -> str:
    """Return a whole document."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", Html(_STYLE)),
    )
    return f"<!DOCTYPE html>\n{tag('html', head, tag('body', *sections), lang='en')}\n"
