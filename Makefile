# make help    says what there is.
#
# Everything is installed in .venv, which `make clean` removes. Another place, or another package than
# this source tree:    make test VENV=/somewhere PACKAGE=dist/trainpipes-0.1.0-py3-none-any.whl

PYTHON ?= python3
# Another Python has an environment of its own: .venv-python3.13
VENV ?= .venv$(addprefix -,$(filter-out python3,$(notdir $(PYTHON))))
FRAMEWORKS ?= $(VENV)-frameworks
RAY ?= $(VENV)-ray
PACKAGE ?= --editable .
# Processes that run tests: more than cores, since many tests wait for processes of their own.
JOBS ?= 4
PYTEST ?=
BENCH ?= --quick
CHECK ?=
DIST ?= dist

# Tests start hundreds of interpreters: without bytecode each compiles the library once more.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
# The pinned versions, always: an unpinned torch brings gigabytes of CUDA. Python compiles what it imports:
# a third of all files, and pip needs half a minute for all of them.
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --no-compile --constraint constraints.txt

.PHONY: help demo test test-all test-frameworks test-ray bench lint format docs docs-check dist clean
.DELETE_ON_ERROR:

help:
	@echo "make demo    train, kill, resume, and compare every batch; about 2 minutes"
	@echo "make test    all tests; PYTEST='-k name' for some of them"
	@echo "make test-all  these, and what takes minutes or thousands of drawn examples; an hour or two"
	@echo "make test-frameworks  with Trainer, Accelerate, TRL, Lightning, Keras and torchft, in an environment of their own"
	@echo "make test-ray  on a Ray cluster of several processes, in an environment of its own"
	@echo "make bench   side by side with other libraries, which it installs; BENCH=--full for an hour;"
	@echo "             BENCH=--check for what README and docs promise, in 10 minutes, with two of them"
	@echo "make lint    ruff and mypy"
	@echo "make format  let ruff format the code"
	@echo "make docs    the documentation as a site: build/site/index.html"
	@echo "make docs-check  every page opened in Chromium: errors, width of a phone, contrast; CHECK=questions.html for one"
	@echo "make dist    an sdist and a wheel in dist/"
	@echo "PYTHON=python3.13 with any of these: on another Python, in an environment of its own, .venv-python3.13"
	@echo "make clean   remove .venv, .venv-frameworks, .venv-ray, caches and what the demo wrote"

demo: $(VENV)/.demo
	$(BIN)/python -m trainpipes_recipes.demo

# Memory is overwritten as soon as it is given back, so that a test sees what is read of it later (glibc).
test: export MALLOC_PERTURB_ = 183
test: export ARROW_DEFAULT_MEMORY_POOL = system

test: $(VENV)/.test
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(PYTEST)

# What takes minutes, and properties on thousands of drawn examples: an hour or two.
test-all: test
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "slow or nightly" $(PYTEST)

# Tests of other rooms that need a framework: where it is missing, they are skipped.
WITH_FRAMEWORKS := tests/package/test_private_names.py tests/sources/test_hf.py \
  tests/sources/test_own_position.py tests/sources/test_arrow_files.py \
  tests/look/test_profile.py::test_a_loader_within_one_of_accelerate

# Frameworks bring much that nothing else needs, and versions that others may not want.
test-frameworks:
	$(MAKE) $(FRAMEWORKS)/.frameworks VENV=$(FRAMEWORKS)
	$(FRAMEWORKS)/bin/python -m pytest -n $(JOBS) --dist loadfile tests/frameworks $(WITH_FRAMEWORKS) $(PYTEST)

# Ray starts processes of its own for each cluster: one test process at a time.
test-ray:
	$(MAKE) $(RAY)/.ray VENV=$(RAY)
	$(RAY)/bin/python -m pytest tests/on_ray tests/package/test_private_names.py $(PYTEST)

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks --install $(BENCH)

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Chromium is the system's: docs/site/check.py says so if there is none.
docs-check: docs $(VENV)/.docs-check
	$(BIN)/python docs/site/check.py $(CHECK)

# The wheel is built from the sdist, which shows that all it needs is in there.
dist: $(VENV)/.dist
	rm -rf $(DIST)
	$(BIN)/python -m build --no-isolation --outdir $(DIST) .

# Each stamp says that what a target needs is installed, as of these two files.

$(VENV)/.pip: constraints.txt
	@echo "making $(VENV)"
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --quiet --upgrade pip
	@touch $@

$(VENV)/.package: $(VENV)/.pip pyproject.toml
	@echo "installing trainpipes and torch (a minute or two)"
	$(INSTALL) $(PACKAGE)
	@touch $@

$(VENV)/.demo $(VENV)/.lint $(VENV)/.bench $(VENV)/.frameworks $(VENV)/.ray $(VENV)/.docs $(VENV)/.docs-check: $(VENV)/.%: $(VENV)/.package
	@echo "installing what make $* needs"
	$(INSTALL) --quiet --group $*
	@touch $@

$(VENV)/.test: $(VENV)/.demo
	@echo "installing what make test needs"
	$(INSTALL) --quiet --group test
	@touch $@

# What builds is known by its content. All else is known by its version: packages with compiled parts have a
# file for each platform and Python, and torch for each kind of GPU, too.
$(VENV)/.dist: $(VENV)/.lint .ci/dist.txt
	$(PIP) install --quiet --force-reinstall --no-deps --only-binary :all: --require-hashes -r .ci/dist.txt
	@touch $@

clean:
	rm -rf .venv-python* $(VENV) $(FRAMEWORKS) $(RAY) build dist demo-output .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
