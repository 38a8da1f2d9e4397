# `make train` and `make test` are all a new machine needs: both create .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A worker that runs out of tests takes over some of another's; slow tests come first.
PYTEST = $(BIN)/pytest --numprocesses auto --dist worksteal
ARGS ?=
# Tests start hundreds of processes, each of which would compile every module.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train lint check test test-all bench bench-gpu docs clean

# pip would compile all modules on one core. Those of torch are compiled while pip installs the rest.
define install
	$(PYTHON) -c 'import sys; sys.exit("lightning-gnn needs Python 3.10 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 10) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt torch
	$(BIN)/python -m compileall -qq $(VENV)/lib & \
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '$(1)' || exit; \
	wait
endef

# With the tools of developers, a third of .venv. Tests start many processes, so all modules are compiled; files that are
# not of this Python version fail.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(call install,.[dev])
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	touch $@

# Without them.
$(VENV)/.trains: pyproject.toml constraints.txt
	$(call install,.)
	touch $@

train: $(if $(wildcard $(VENV)/.installed),$(VENV)/.installed,$(VENV)/.trains)
	$(BIN)/lgnn $(ARGS)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The fast loop: everything not marked slow or medium, with few examples.
check: lint
	$(PYTEST) -m 'not slow and not medium' --hypothesis-profile small $(ARGS)

# Everything, with a quarter of the examples, of the campaigns the slice that the commit chooses; another with ARGS=--slice=3.
test: lint
	$(PYTEST) --hypothesis-profile quarter $(ARGS)

test-all: lint
	$(PYTEST) --slice all $(ARGS)

bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks.sampling.neighbors $(ARGS)
	$(BIN)/python -m benchmarks.sampling.typed $(ARGS)
	$(BIN)/python -m benchmarks.sampling.minibatch $(ARGS)
	$(BIN)/python -m benchmarks.models.epoch $(ARGS)
	$(BIN)/python -m benchmarks.models.typed_epoch $(ARGS)
	$(BIN)/python -m benchmarks.models.time_to_accuracy $(ARGS)
	$(BIN)/python -m benchmarks.data.several_machines $(ARGS)
	$(BIN)/python -m benchmarks.data.exchange $(ARGS)
	$(BIN)/python -m benchmarks.collective.epochs $(ARGS)
	$(BIN)/python -m benchmarks.collective.planner $(ARGS)
	$(BIN)/python -m benchmarks.ops.aggregate $(ARGS)
	$(BIN)/python -m benchmarks.ops.aggregate_update $(ARGS)
	$(BIN)/python -m benchmarks.ops.gather $(ARGS)
	$(BIN)/python -m benchmarks.hyscale.epochs $(ARGS)
	$(BIN)/python -m benchmarks.hyscale.node_planner $(ARGS)
	$(BIN)/python -m benchmarks.hyscale.node_planner --sleeping 100 $(ARGS)
	$(BIN)/python -m benchmarks.papers.pgsampler $(ARGS)
	$(BIN)/python -m benchmarks.papers.morphgl $(ARGS)
	$(BIN)/python -m benchmarks.papers.hyscale $(ARGS)
	$(BIN)/python -m benchmarks.papers.neutron_ascend $(ARGS)
	$(BIN)/python -m benchmarks.data.shared_memory $(ARGS)
	$(BIN)/python -m benchmarks.full_graph.epochs $(ARGS)
	$(BIN)/python -m benchmarks.ops.ascend_cycles $(ARGS)

# The documentation, as a site that can be read from its folder, without a network; its search wants a server.
docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)
	@echo "open site/index.html, or, to search in it: $(PYTHON) -m http.server --directory site"

bench-gpu:
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m benchmarks.gpu.everything $(ARGS)

clean:
	rm -rf $(VENV) build dist site *.egg-info
