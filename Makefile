# Every target creates .venv itself and is quick when nothing changed.
#   make train PYTHON=python3.12 ARGS="--train-iters 20"

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# torch_npu breaks `import torch` where CANN is missing, so it has an environment of its own.
NPU_VENV ?= .venv-npu
NPU_BIN := $(NPU_VENV)/bin
NPU_STAMP := $(NPU_VENV)/.installed

# The bounds on compiled kernels hold for it. PyTorch's CUDA builds ask for another release, exactly, so it is
# installed over that one instead of being in constraints.txt, with which pip would find no solution.
TRITON := 3.9.0

# Tests are dealt out to so many processes, neighbours together, and who is done takes from those who are not;
# WORKERS=0 runs them in one, as a debugger needs it.
WORKERS ?= auto
XDIST := --numprocesses $(WORKERS) --maxprocesses 8 --dist worksteal

# Threads that spin while they wait starve the others where cores are shared: a step took 0.5 s with this
# and 5 to 14 s without it on a busy machine.
export OMP_WAIT_POLICY ?= passive

# Tests start many processes; each would compile this package, and pytest its asserts, again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help venv train test test-full test-npu lint format bench gpu compat docs

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

venv: $(STAMP)  ## create .venv with the package, its extras and the tools

$(STAMP): setup.py constraints.txt
	@$(PYTHON) -c 'import sys; ok = (3, 10) <= sys.version_info[:2] <= (3, 13); \
		ok or sys.exit("mindspeed_dsa needs Python 3.10 to 3.13, and $(PYTHON) is %d.%d: " \
		"name another one with make PYTHON=python3.12" % sys.version_info[:2])'
	@# A virtual environment without pip is one whose creation was cut short: start it afresh.
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo "setting up $(VENV): once, a few minutes at most"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[megatron,viz,dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
		'triton==$(TRITON); platform_system == "Linux"'
	@touch $@

train: $(STAMP)  ## train a small DeepSeek-V3.2-shaped model with DSA on real text
	$(BIN)/python examples/pretrain_dsa.py --output-dir runs/quickstart $(ARGS)

test: $(STAMP)  ## quick tests: one case per parallel layout
	$(BIN)/python -m pytest $(XDIST) -m "not full" $(ARGS)

test-full: $(STAMP)  ## every test
	$(BIN)/python -m pytest $(XDIST) $(ARGS)

$(NPU_STAMP): setup.py constraints.txt
	@$(NPU_BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(NPU_VENV)
	@echo "setting up $(NPU_VENV): once, a few minutes at most"
	$(NPU_BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[npu,test]'
	@touch $@

test-npu: $(NPU_STAMP)  ## the NPU backend through the real torch_npu, without an NPU (x86-64 Linux, gcc)
	stubs=$$($(NPU_BIN)/python tests/npu/stubs.py) && \
		LD_LIBRARY_PATH="$$stubs$${LD_LIBRARY_PATH:+:$$LD_LIBRARY_PATH}" TORCH_DEVICE_BACKEND_AUTOLOAD=0 \
		$(NPU_BIN)/python -m pytest tests/npu $(ARGS)

# Older and newer releases of Megatron-core, each with what it imports beside what it declares.
# The newer ones need Python 3.12.
MATRIX := 0.12.1 0.15.3 0.19.0
MATRIX_TESTS := tests/matrix tests/features/tensor_parallel
PYTHON312 ?= python3.12

test-matrix: $(MATRIX:%=.venv-matrix/%/.installed)  ## tests on other releases of Megatron-core, for real
	@for release in $(MATRIX); do echo "megatron-core $$release"; \
		.venv-matrix/$$release/bin/python -m pytest -m "not full" $(MATRIX_TESTS) $(ARGS) || exit 1; done

.venv-matrix/%/.installed: setup.py
	$(if $(filter 0.19.%,$*),$(PYTHON312),$(PYTHON)) -m venv --clear .venv-matrix/$*
	.venv-matrix/$*/bin/python -m pip install --quiet --disable-pip-version-check \
		torch==2.13.0 megatron-core==$* psutil --editable '.[megatron,viz,test]'
	@touch $@

lint: $(STAMP)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)  ## rewrite the sources as lint wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## cost of the patch engine
	$(BIN)/python -m benchmarks patch-engine $(ARGS)

gpu: $(STAMP)  ## on an NVIDIA GPU: kernel tests, operators, training steps, one report in runs/gpu
	@mkdir -p runs/gpu
	$(BIN)/python -m benchmarks gpu --report runs/gpu --json runs/gpu/report.json $(ARGS)

compat: $(STAMP)  ## read released megatron-core wheels again into mindspeed_dsa/compat
	$(BIN)/python -m mindspeed_dsa.compat refresh $(ARGS)

docs: $(STAMP)  ## write the generated pages
	$(BIN)/python -m mindspeed_dsa.compat docs
