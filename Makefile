# `make train` and `make test` are all a new machine needs: both create .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A worker that runs out of tests takes over some of another's; slow tests come first.
PYTEST = $(BIN)/pytest --numprocesses auto --dist worksteal
OTHER_LIGHTNING = LGNN_LIGHTNING=lightning $(PYTEST) --hypothesis-profile small
ARGS ?=
# Tests start hundreds of processes, each of which would compile every module.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train lint check test test-all bench bench-gpu docs clean

# uv installs in a tenth of pip's time. It takes over the indexes and constraints of pip's configuration; where it
# fails, pip installs.
define install
	$(PYTHON) -c 'import sys; sys.exit("lightning-gnn needs Python 3.10 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 10) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --no-compile uv && \
		$(BIN)/uv pip install --quiet --python $(BIN)/python --index-strategy unsafe-best-match $$($(PIP_OPTIONS)) \
		--constraint constraints.txt --editable '$(1)' $(2) || \
	$(PIP) install --quiet --constraint constraints.txt --editable '$(1)'
endef
PIP := $(BIN)/python -m pip
# One option of uv for each address or file, and the flag no-index if it is on: pip lists the environment's value first, and
# prefers it.
PIP_OPTIONS = $(PIP) config list | tr -d "'" | \
	sed -nE 's/\\n/ /g; s/^([^.]*)\.(index-url|extra-index-url|find-links|constraint|no-index)=/\1 --\2 /p' | \
	awk '$$2 != "--no-index" {for (i = 3; i <= NF; i++) print $$2, $$i} \
		$$2 == "--no-index" && !decided {flag = tolower($$3) ~ /^(1|y|yes|t|true|on)$$/; decided = $$1 == ":env:"} \
		END {if (flag) print "--no-index"}'

# With the tools of developers, a third of .venv. Tests start many processes, so all modules are compiled.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(call install,.[dev],--compile-bytecode)
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
# Then the fast tests of DataModules, strategies and commands with `lightning` in place of `pytorch_lightning`.
test: lint
	$(PYTEST) --hypothesis-profile quarter $(ARGS)
	$(if $(ARGS),,$(OTHER_LIGHTNING) -m 'not slow and not medium' $(addprefix tests/,sampling collective full_graph hyscale runtime))
	$(if $(ARGS),,$(OTHER_LIGHTNING) -m 'not slow' tests/cli/test_run.py)

test-all: lint
	$(PYTEST) --slice all $(ARGS)

bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks.sampling.neighbors $(ARGS)
	$(BIN)/python -m benchmarks.sampling.typed $(ARGS)
	$(BIN)/python -m benchmarks.sampling.minibatch $(ARGS)
	$(BIN)/python -m benchmarks.sampling.negatives $(ARGS)
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
	$(call install,.[docs])
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)
	@echo "open site/index.html, or, to search in it: $(PYTHON) -m http.server --directory site"

bench-gpu:
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m benchmarks.gpu.everything $(ARGS)

clean:
	rm -rf $(VENV) build dist site *.egg-info
