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

PYTHON310 ?= python3.10
PYTHON312 ?= python3.12
PYTHON313 ?= python3.13

.PHONY: train lint check test test-all test-versions test-lowest test-3.12 test-3.13 test-aarch64 bench bench-gpu gpu-machine weight docs clean

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
	$(BIN)/lint-imports --no-logo

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

# The fast tests with the lowest versions that pyproject.toml allows on the oldest Python, and with those of
# constraints.txt on newer Pythons. The other Pythons may be given: make test-versions PYTHON310=path. An index may hold
# only CUDA builds of torch for them, several GB; UV_TORCH_BACKEND=cpu takes CPU builds where PyTorch's own can be reached.
test-versions: test-lowest test-3.12 test-3.13

# $(1) is a Python, $(2) a file of versions.
define test_version
	$(BIN)/uv venv --quiet --clear --python '$(1)' $(VENV)/versions/$@
	$(UV_INSTALL) --python $(VENV)/versions/$@/bin/python --constraint $(2) --editable '.[dev]'
	$(VENV)/versions/$@/bin/python -m pytest --numprocesses auto --dist worksteal \
		-m 'not slow and not medium' --hypothesis-profile small $(ARGS)
endef
UV_INSTALL = $(BIN)/uv pip install --quiet --index-strategy unsafe-best-match $$($(PIP_OPTIONS))

# Tools of the tests have no lowest versions.
test-lowest: $(VENV)/.installed
	mkdir -p $(VENV)/versions
	$(BIN)/uv pip compile --quiet --python '$(PYTHON310)' --resolution lowest-direct --extra convert --extra gpu --extra partition \
		--index-strategy unsafe-best-match $$($(PIP_OPTIONS)) --output-file $(VENV)/versions/lowest.txt pyproject.toml
	$(call test_version,$(PYTHON310),$(VENV)/versions/lowest.txt)

test-3.12: $(VENV)/.installed
	$(call test_version,$(PYTHON312),constraints.txt)

test-3.13: $(VENV)/.installed
	$(call test_version,$(PYTHON313),constraints.txt)

# The fast tests on aarch64, by QEMU: 1 h and more. It needs the rights of root, and skips where something is missing.
test-aarch64: $(VENV)/.installed
	UV_OPTIONS="$$($(PIP_OPTIONS))" tests/aarch64.sh $(ARGS)

bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks.sampling.neighbors $(ARGS)
	$(BIN)/python -m benchmarks.sampling.typed $(ARGS)
	$(BIN)/python -m benchmarks.sampling.minibatch $(ARGS)
	$(BIN)/python -m benchmarks.sampling.negatives $(ARGS)
	$(BIN)/python -m benchmarks.models.epoch $(ARGS)
	$(BIN)/python -m benchmarks.models.sums_ahead $(ARGS)
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

# Lines of Python of each package.
weight:
	@git ls-files '*.py' | awk -F/ '{print ($$1 == "lightning_gnn" && NF > 2 ? $$1 "/" $$2 : $$1) " " $$0}' | \
		while read package file; do echo "$$package $$(wc -l < "$$file")"; done | \
		awk '{lines[$$1] += $$2} END {for (package in lines) printf "%6d %s\n", lines[package], package}' | sort -k2

# The documentation, as a site that can be read from its folder, without a network; its search wants a server.
docs: $(VENV)/.installed
	$(call install,.[docs])
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)
	@echo "open site/index.html, or, to search in it: $(PYTHON) -m http.server --directory site"

# On a machine with a GPU and no network: installs, runs the cuda tests, measures. REHEARSE=1 does so without a GPU.
gpu-machine:
	@tools/gpu_machine.sh $(ARGS)

bench-gpu:
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m benchmarks.gpu.everything $(ARGS)

clean:
	rm -rf $(VENV) build dist site *.egg-info
