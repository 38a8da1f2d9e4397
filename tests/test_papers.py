"""Pages of docs/papers are made from their JSON files, and give a reason for every cell far from the paper."""

import pytest

from benchmarks.harness import RESULTS
from benchmarks.papers.page import PAGES, Cell, Page, Table, load


@pytest.mark.parametrize("file", sorted(RESULTS.glob("papers_*.json")), ids=lambda file: file.stem)
def test_a_page_is_made_from_its_file(file):
    page = load(file)
    assert (PAGES / f"{page.name}.md").read_text() == page.markdown()


def test_a_cell_far_from_the_paper_needs_a_reason():
    far = Page("name", "Title", "Text.", [Table("Table 1", "s", [Cell("a", paper=1.0, simulated=1.2)])])
    with pytest.raises(ValueError, match=r"Table 1, a: 1\.20 times the paper needs a reason"):
        far.markdown()
    far.tables[0].why = "Because."
    assert "| a | 1 | 1.2 |  | **1.20** | Because. |" in far.markdown()
