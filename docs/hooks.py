"""Hooks of MkDocs: files outside of docs/ that pages link to, and ``llms.txt``, the list of pages for language models.

A linked file becomes part of the site, under files/, so that a link such as ``../benchmarks/results/epoch.json`` works
in the repository and in the site.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

_LINK = re.compile(r"(?<=\]\()(?P<path>(?:\.\./)+[^)#\s]+)(?=[)#])")


def on_files(files: Any, config: Any) -> Any:
    """Add the files that pages link to."""
    docs = Path(config["docs_dir"])
    for page in list(files.documentation_pages()):
        for found in _LINK.finditer(page.content_string):
            outside = _outside(docs, page.src_uri, found["path"])
            if outside is not None and files.get_file_from_path(f"files/{outside}") is None:
                files.append(File.generated(config, f"files/{outside}", abs_src_path=str(docs.parent / outside)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Point links that leave docs/ to the copies in the site."""
    docs = Path(config["docs_dir"])

    def moved(found: re.Match[str]) -> str:
        outside = _outside(docs, page.file.src_uri, found["path"])
        depth = page.file.src_uri.count("/")
        return found["path"] if outside is None else f"{'../' * depth}files/{outside}"

    return _LINK.sub(moved, markdown)


def on_nav(nav: Any, config: Any, files: Any) -> Any:
    """Collect the sections of the navigation."""
    config["extra"]["sections"] = [
        (section.title, section.children if section.is_section else [section]) for section in nav.items
    ]
    return nav


def on_post_build(config: Any) -> None:
    """Write ``llms.txt``: the site's name and summary, and a link with the first sentence of each page, by section."""
    lines = [f"# {config['site_name']}", "", f"> {config['site_description']}"]
    for title, pages in config["extra"].pop("sections"):
        lines += ["", f"## {title}", ""]
        for page in pages:
            lines.append(f"- [{page.title}]({page.canonical_url or page.url}){_first_sentence(page.markdown)}")
    Path(config["site_dir"], "llms.txt").write_text("\n".join(lines) + "\n")


def _first_sentence(markdown: str) -> str:
    """Return ``": "`` and the first sentence of a page that is prose, without links; empty if the page has none."""
    for paragraph in re.sub(r"```.*?```", "", markdown, flags=re.DOTALL).split("\n\n"):
        if re.match(r"[\w`]", paragraph):
            text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(paragraph.split()))
            return ": " + re.split(r"(?<=\.)\s", text)[0].rstrip(":.") + "."
    return ""


def _outside(docs: Path, page: str, target: str) -> str | None:
    """Return the path of a file in the repository, relative to its root; None if it is in docs/ or not a file."""
    path = (docs / page).parent.joinpath(target).resolve()
    if path.is_relative_to(docs) or not path.is_relative_to(docs.parent) or not path.is_file():
        return None
    return path.relative_to(docs.parent).as_posix()
