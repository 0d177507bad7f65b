# make demo   a chat model from the embedded corpus, on this machine
# make test   the whole suite, as CI runs it
# make lint   ruff and mypy
# make cannsim  the simulated CANN on which the official torch_npu wheel runs without an NPU
# Each target sets up .venv by itself and does nothing twice.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
LINUX := $(filter Linux,$(shell uname -s))
NPU_EXTRA := $(if $(LINUX),$(comma)npu)
comma := ,
TEST_FLAGS ?=

.PHONY: demo test test-fast lint cannsim clean

$(VENV)/.core: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	$(PIP) -e '.[dev$(NPU_EXTRA)]'
	@touch $@

test: $(VENV)/.dev
	$(BIN)/python -m pytest -m '' $(TEST_FLAGS)

test-fast: $(VENV)/.dev
	$(BIN)/python -m pytest $(TEST_FLAGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf cannsim/build build *.egg-info .pytest_cache .mypy_cache .ruff_cache
