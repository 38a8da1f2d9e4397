"""The four papers, cell by cell: one script and one page per paper."""
