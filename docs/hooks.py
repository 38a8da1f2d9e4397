"""Hooks of MkDocs: what a page links to outside of docs/ becomes part of the site, under files/.

So a link such as ``../benchmarks/results/epoch.json`` works in the repository and in the site.
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


def _outside(docs: Path, page: str, target: str) -> str | None:
    """Return the path of a file in the repository, seen from its top; None where it lies in docs/ or is none."""
    path = (docs / page).parent.joinpath(target).resolve()
    if path.is_relative_to(docs) or not path.is_relative_to(docs.parent) or not path.is_file():
        return None
    return path.relative_to(docs.parent).as_posix()
