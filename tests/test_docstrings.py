"""Every public name shows how it is used, and what it shows is what happens."""

import doctest
import io

import pytest

import lightning_gnn

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.mark.parametrize("name", lightning_gnn.__all__)
def test_the_example_of_a_public_name_prints_what_it_says(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # Those of methods too, each in a namespace of its own.
    tests = doctest.DocTestFinder().find(getattr(lightning_gnn, name), name, module=False, globs={})
    assert any(test.name == name and test.examples for test in tests), f"the docstring of {name} holds no example"
    told = io.StringIO()
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    for test in tests:
        runner.run(test, out=told.write)
    assert runner.failures == 0, told.getvalue()
