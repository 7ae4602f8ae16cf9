# Two commands on a fresh machine with Python 3.11+ and make: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VISION := $(VENV)-vision
export FLWR_TELEMETRY_ENABLED := 0
# Compiled tests are kept: two workers and two phases would compile all of them again.
unexport PYTHONDONTWRITEBYTECODE
# Files with tests that start an engine: to collect all others too takes as long as some of these.
ENGINES = $(shell grep -rlE "mark\.(ray|deployed)|Conformance" tests --include='test_*.py')
LONG = $(shell grep -rl "mark\.long" tests --include='test_*.py')

# Two processes, and what each prints together, where make knows that (GNU make 4).
BOTH = $(MAKE) --no-print-directory --jobs 2 $(if $(filter output-sync,$(.FEATURES)),--output-sync=target)

.PHONY: demo test unit test-deploy test-oldest test-newest vision check docs bench bench-scale clean

$(STAMP): pyproject.toml constraints.txt
	@echo "Setting up $(VENV): about 2 GB, some minutes."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[simulation,dev,docs]"
	touch $@

demo: $(STAMP)
	$(BIN)/flwr-privacy demo --out runs/demo

# All tests that start no engine, and a few of those that do.
test: unit
	$(BOTH) smoke-ray smoke-deployed

# Two at a time.
unit: $(STAMP)
	$(BIN)/pytest --numprocesses 2 --dist worksteal -m "not ray and not deployed and not long and not vision"

# All schemes, and all faults, on a SuperLink and SuperNodes of their own; beside them all schemes on
# Ray; the long tests as soon as one of the two ends. What each prints comes when it ends.
test-deploy: $(STAMP)
	$(BOTH) all-deployed all-ray all-long

smoke-%: $(STAMP)
	$(BIN)/pytest -m "$* and smoke" $(ENGINES)

all-%: $(STAMP)
	$(BIN)/pytest -m "$* and not smoke" $(ENGINES)

all-long: $(STAMP)
	$(BIN)/pytest -m long $(LONG)

# Some tests on the oldest and on the newest flwr that pyproject.toml allows.
test-oldest test-newest: test-%: $(STAMP)
	$(BIN)/python -m tests.other_flwr $*

# Tests with torchvision, in an environment that has it. It is made once.
vision: $(VISION)/.installed
	$(VISION)/bin/python -m pytest -m vision tests/vision

$(VISION)/.installed: $(STAMP) tests/vision/environment.py tests/environments.py
	@echo "Setting up $(VISION): on Linux another 5 GB, some minutes."
	$(BIN)/python -m tests.vision.environment
	touch $@

# mypy does not follow setuptools' package-dir mapping, so it sees the packages through links.
check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/typing && mkdir -p build/typing/flwr_privacy
	ln -s $(CURDIR)/flwr_privacy/* $(CURDIR)/strategies $(CURDIR)/clients $(CURDIR)/simulations \
		build/typing/flwr_privacy/
	cd build/typing && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml
	$(BIN)/pytest --quiet --doctest-modules flwr_privacy strategies clients simulations

# The site, in build/docs. Links to pages and anchors that do not exist, public names without an entry
# and notebooks that fail are errors.
docs: $(STAMP)
	$(BIN)/python -m sphinx --jobs 2 --fail-on-warning --keep-going --quiet docs build/docs

bench: $(STAMP)
	$(BIN)/python -m benchmarks

# 100,000 simulated clients, 1000 a round: seconds and memory, round by round.
bench-scale: $(STAMP)
	$(BIN)/python -m benchmarks.simulators.scale

clean:
	rm -rf $(VENV) $(VENV)-oldest $(VENV)-newest $(VISION) build dist runs *.egg-info
