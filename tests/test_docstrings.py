"""Each public name has an example that runs; messages, docstrings and comments are in plain technical English."""

import ast
import doctest
import io
import re
import tokenize
from pathlib import Path

import pytest

import lightning_gnn

ROOT = Path(__file__).parent.parent
SOURCES = [path for name in ("lightning_gnn", "triton_kernels", "ascend_ops") for path in (ROOT / name).rglob("*.py")]
IN_MESSAGES = re.compile(r" is no |\b(?:is|are) none\b")
"""``X is none`` reads as None; instead of ``X is no file``, messages say ``X is not a file``."""
ANYWHERE = re.compile(r"\b(?:told|whoever|nobody|somebody|anew|alike|who calls)\b", re.IGNORECASE)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.mark.medium
@pytest.mark.parametrize("name", lightning_gnn.__all__)
def test_the_example_of_a_public_name_prints_what_it_says(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # Examples of methods run too, each in a separate namespace.
    tests = doctest.DocTestFinder().find(getattr(lightning_gnn, name), name, module=False, globs={})
    assert any(test.name == name and test.examples for test in tests), f"the docstring of {name} holds no example"
    output = io.StringIO()
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    for test in tests:
        runner.run(test, out=output.write)
    assert runner.failures == 0, output.getvalue()


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_texts_are_plain(path):
    source = path.read_text(encoding="utf-8")
    tree, found = ast.parse(source), []
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            found += [(node.lineno, text[0]) for text in IN_MESSAGES.finditer(node.value)]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            found += [(token.start[0], text[0]) for text in ANYWHERE.finditer(token.string)]
    assert not found, f"{path}: {found}"
