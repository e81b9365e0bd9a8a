# `make demo` and `make test` start from nothing but a Python 3.10-3.14; 3.11 is taken when there.
# Another interpreter: make test PYTHON=python3.13. Another folder: VENV=…. With a GPU: RUNTIME=gpu VENV=.venv-gpu.

VENV ?= .venv
RUNTIME ?= cpu
WORKERS ?= 2
# The torch that the tests are known to pass with; TORCH='torch>=2.6' takes the newest.
TORCH ?= torch==2.13.0
# Workers start with a half of the tests each, in order, and take from each other at the end: what tests of a file share is
# made once.
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
FITS := import ensurepip, sys, venv; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3.10 python3 python; do \
	$$p -c "$(FITS)" >/dev/null 2>&1 && echo $$p && break; done)

BIN := $(VENV)/bin
# Not quiet: the packages are some hundred MB, and pip's lines say how far it is.
PIP = $(BIN)/python -m pip install --disable-pip-version-check
RELEASE := $(VENV)-release
LOWEST := $(VENV)-lowest

# Tests start some hundred processes of ours, which would compile the sources again each time.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test check test-avx2 test-cpus test-lowest lint format docs model wheel release clean

help:
	@echo "make demo    quantize the digit classifier the repository carries; size, accuracy, latency of float and int8"
	@echo "make test    linters, types, import rules and all tests (make check is the same)"
	@echo "make test-avx2  all tests on this CPU as one without VNNI; needs a CPU and a kernel that let CPUID fault"
	@echo "make test-cpus  quantized files on emulated CPUs without VNNI and on arm64; needs qemu-user, and says what is missing"
	@echo "make test-lowest  all tests with the oldest version that pyproject.toml allows of each package it names"
	@echo "make lint    ruff, mypy, import-linter alone"
	@echo "make format  let ruff format and fix"
	@echo "make docs    write the generated pages of docs/ again: public names, codes, figures"
	@echo "make model   train the demo's model again (installs torch)"
	@echo "make wheel   build dist/: source archive and wheel, checked as PyPI would (make release is the same)"
	@echo "make clean   remove $(VENV) and everything built"

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "no Python 3.10 to 3.14 with venv found: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 1; }
	@"$(PYTHON)" -c "$(FITS)" || { echo "$(PYTHON) is not a Python 3.10 to 3.14 with venv" >&2; exit 1; }
	"$(PYTHON)" -m venv $(VENV)

# One stamp per set of packages; a changed pyproject.toml installs again. For tests nothing is compiled ahead: of 15,000
# modules they import a quarter, and compiling all of them takes one core for three quarters of a minute.
$(VENV)/.demo-$(RUNTIME): pyproject.toml setup.py | $(BIN)/python
	@echo "installing onnxq, ONNX Runtime and what they need into $(VENV): about a minute"
	$(PIP) --editable '.[$(RUNTIME)]'
	@touch $@

$(VENV)/.test-$(RUNTIME): pyproject.toml setup.py | $(BIN)/python
	@echo "installing the engines, torch and the linters into $(VENV): some minutes, the first time"
	$(PIP) --no-compile --editable '.[$(RUNTIME),test,torch]' $(TORCH)
	@touch $@

$(VENV)/.dev: pyproject.toml setup.py | $(BIN)/python
	@echo "installing torch and what training needs into $(VENV): some minutes, the first time"
	$(PIP) --editable '.[dev]'
	@touch $@

demo: $(VENV)/.demo-$(RUNTIME)
	@$(BIN)/python examples/digits/demo.py

# The tests run even when a linter complains, so that one run tells everything; mypy takes one core for half a minute.
test check: $(VENV)/.test-$(RUNTIME)
	@$(MAKE) --no-print-directory --silent lint & lint=$$!; status=0; \
	$(PYTEST) || status=1; \
	wait $$lint || { echo "a linter complains, see above or run make lint" >&2; status=1; }; exit $$status

# The kernels that half the world's servers take, at this CPU's speed.
test-avx2: $(VENV)/.test-$(RUNTIME)
	@$(BIN)/python -m tests.cpus.avx2 $(PYTEST)

# Minutes, not seconds: an emulated CPU is ten to forty times slower. Not part of `make test`.
test-cpus: $(VENV)/.test-$(RUNTIME)
	@$(BIN)/python -m tests.cpus.run --arm64-root $(VENV)-arm64

# Some weeks apart, not part of `make test`. pip cannot choose the lowest versions, uv can; torch is that of the tests, since
# older ones bring gigabytes.
$(LOWEST)/.test: pyproject.toml setup.py
	"$(PYTHON)" -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --disable-pip-version-check 'uv>=0.9'
	echo '$(TORCH)' > $(LOWEST)/torch.txt
	$(LOWEST)/bin/uv pip compile --quiet --resolution lowest-direct --override $(LOWEST)/torch.txt \
		--extra $(RUNTIME) --extra test --extra torch pyproject.toml --output-file $(LOWEST)/versions.txt
	$(LOWEST)/bin/python -m pip install --disable-pip-version-check --no-compile --no-deps \
		--requirement $(LOWEST)/versions.txt --editable .
	@touch $@

test-lowest: BIN := $(LOWEST)/bin
test-lowest: $(LOWEST)/.test
	@$(PYTEST)

# Types are judged with the stubs of the numpy that Python 3.11 and later get; those of 3.10 differ.
lint: $(VENV)/.test-$(RUNTIME)
	@status=0; \
	$(BIN)/ruff format --check --quiet . || { echo "ruff format: run make format" >&2; status=1; }; \
	$(BIN)/ruff check --quiet . || status=1; \
	if $(BIN)/python -c "import sys; sys.exit(sys.version_info < (3, 11))"; then $(BIN)/mypy --no-error-summary && $(BIN)/mypy --no-error-summary --platform win32 || status=1; \
	else echo "mypy: left out on Python 3.10, whose numpy has other type stubs"; fi; \
	$(BIN)/lint-imports --no-logo || status=1; \
	exit $$status

format: $(VENV)/.test-$(RUNTIME)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.test-$(RUNTIME)
	$(BIN)/python docs/make_api.py
	$(BIN)/python -m onnxq.codes > docs/errors.md
	$(BIN)/python benchmarks/house.py --write

model: $(VENV)/.dev
	$(BIN)/python examples/digits/train.py

# build and twine have an environment of their own: nothing else needs them, and they bring thirty packages.
$(RELEASE)/.release: | $(BIN)/python
	@echo "installing build and twine into $(RELEASE)"
	$(BIN)/python -m venv $(RELEASE)
	$(RELEASE)/bin/python -m pip install --disable-pip-version-check 'build>=1.2' 'twine>=6.1'
	@touch $@

# The wheel is made from the source archive, so that one cannot have what the other lacks.
wheel release: $(RELEASE)/.release
	rm -rf build dist
	$(RELEASE)/bin/python -m build --outdir dist .
	$(RELEASE)/bin/python -m twine check --strict dist/*

clean:
	rm -rf $(VENV) $(VENV)-arm64 $(LOWEST) $(RELEASE) build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
