# Every target creates .venv itself and is quick when nothing changed.
#   make train PYTHON=python3.12 ARGS="--train-iters 20"

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

comma := ,
# torch_npu breaks `import torch` where CANN is missing, so its tests have an environment of their own, one for each
# release: make test-npu NPU_RELEASE=2.9.0.post2
NPU_NEWEST := 2.13.0
NPU_RELEASE ?= $(NPU_NEWEST)
NPU_TORCH := $(firstword $(subst .post, ,$(NPU_RELEASE)))
NPU_TESTS := .venv-npu$(patsubst %,-%,$(filter-out $(NPU_NEWEST),$(NPU_RELEASE)))
# TorchTitan 0.3 needs a newer torch than some releases have.
NPU_TITAN := $(if $(filter $(NPU_NEWEST),$(NPU_RELEASE)),$(comma)torchtitan)
NPU_BIN := $(NPU_TESTS)/bin
NPU_STAMP := $(NPU_TESTS)/.installed
# The long cases as well, fp32 and every layout of Megatron-LM's script among them: make test-npu NPU_MARKS=
NPU_MARKS ?= not full

# On a device the environment is the user's, as it is: the active one, or make npu NPU_VENV=DIR.
NPU_VENV ?=
NPU_PYTHON = $(if $(NPU_VENV),$(NPU_VENV)/bin/python,$(PYTHON))

# Hosts other than Megatron bring packages that a job of Megatron has no use for.
HOSTS_VENV ?= .venv-hosts
HOSTS_BIN := $(HOSTS_VENV)/bin
HOSTS_STAMP := $(HOSTS_VENV)/.installed

# The bounds on compiled kernels hold for it. PyTorch's CUDA builds ask for another release, exactly, so it is
# installed over that one instead of being in constraints.txt, with which pip would find no solution. Python 3.10
# has no such release: it keeps an older one, and its tests skip the bounds.
TRITON := 3.9.0

# Tests are dealt out to so many processes, neighbours together, and who is done takes from those who are not;
# WORKERS=0 runs them in one, as a debugger needs it.
WORKERS ?= auto
XDIST := --numprocesses $(WORKERS) --maxprocesses 8 --dist worksteal
# What took longest is part of the output, so that a test that has become slow is seen where it did.
SLOWEST := --durations 25

# Threads that spin while they wait starve the others where cores are shared: a step took 0.5 s with this
# and 5 to 14 s without it on a busy machine.
export OMP_WAIT_POLICY ?= passive

# Tests start many processes; each would compile this package, and pytest its asserts, again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help venv train soak test test-processors test-full test-npu test-hosts test-matrix test-pythons next lint format bench gpu npu compat docs \
	site dist test-wheel

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
		'triton==$(TRITON); platform_system == "Linux" and python_version >= "3.11"'
	@touch $@

train: $(STAMP)  ## train a small DeepSeek-V3.2-shaped model with DSA on real text
	$(BIN)/python examples/pretrain_dsa.py --output-dir runs/quickstart $(ARGS)

soak: $(STAMP)  ## an hour of kills, full disks, slow links and damaged files, in four layouts; counts at the end
	$(BIN)/python -m tests.soak $(ARGS)

test: $(STAMP)  ## quick tests: one case per parallel layout
	$(BIN)/python -m pytest $(XDIST) $(SLOWEST) -m "not full" $(ARGS)

test-processors: $(STAMP)  ## the quick tests as other processors, thread counts and measurements run them
	$(BIN)/python -m tests.processors $(XDIST) $(ARGS)

test-full: $(STAMP)  ## every test
	$(BIN)/python -m pytest $(XDIST) $(SLOWEST) $(ARGS)

$(NPU_STAMP): setup.py constraints.txt
	@$(NPU_BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(NPU_TESTS)
	@echo "setting up $(NPU_TESTS): once, a few minutes at most"
	@sed 's/^torch==.*/torch==$(NPU_TORCH)/' constraints.txt > $(NPU_TESTS)/constraints.txt
	@# torch_npu's wheels for x86-64 ask for the CPU build of torch by its name, which PyPI does not have. The other
	@# build serves as well, so pip is not asked.
	$(NPU_BIN)/python -m pip install --quiet --disable-pip-version-check --retries 0 \
		--extra-index-url https://download.pytorch.org/whl/cpu --constraint $(NPU_TESTS)/constraints.txt torch
	$(NPU_BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps torch_npu==$(NPU_RELEASE)
	$(NPU_BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint $(NPU_TESTS)/constraints.txt pyyaml --editable '.[megatron,test$(NPU_TITAN)]' \
		--requirement examples/megatron_lm/requirements.txt
	@touch $@

test-npu: $(NPU_STAMP)  ## the NPU backend through the real torch_npu, without an NPU (x86-64 Linux, gcc)
	libraries=$$($(NPU_BIN)/python -m tests.npu.device.libraries) && \
		LD_LIBRARY_PATH="$$libraries$${LD_LIBRARY_PATH:+:$$LD_LIBRARY_PATH}" TORCH_DEVICE_BACKEND_AUTOLOAD=0 \
		$(NPU_BIN)/python -m pytest $(XDIST) --dist loadfile -m "$(NPU_MARKS)" tests/npu $(ARGS)

FRAMEWORKS := tests/hosts/frameworks/requirements.txt

$(HOSTS_STAMP): setup.py constraints.txt $(FRAMEWORKS)
	@$(HOSTS_BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(HOSTS_VENV)
	@echo "setting up $(HOSTS_VENV): once, a few minutes at most"
	$(HOSTS_BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[megatron,transformers,torchtitan,test]'
	@# Frameworks around Megatron without what they ask for, most of which needs CUDA.
	$(HOSTS_BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --no-deps --requirement $(FRAMEWORKS)
	@# TorchTitan's generation before, with the same packages, beside it.
	$(HOSTS_BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
		--target $(HOSTS_VENV)/torchtitan-0.2 torchtitan==0.2.2
	@touch $@

test-hosts: $(HOSTS_STAMP)  ## other hosts than Megatron, and frameworks around it, with their real packages
	$(HOSTS_BIN)/python -m pytest $(XDIST) $(SLOWEST) tests/hosts $(ARGS)

# Releases of Megatron-core, each with what Megatron-LM imports beside what it declares. All of them run one case
# for each feature and layout, which is what the compatibility page calls trained; a few are tested closely.
# MEGATRON_LM=DIR:DIR... adds pretrain_gpt.py of checkouts of these releases.
MATRIX := 0.12.1 0.13.1 0.14.0 0.15.3 0.16.1 0.17.1 0.18.2 0.19.0 0.19.2
MATRIX_TABLE := $(addprefix tests/matrix/test_,$(addsuffix .py,features dsa_model example_job memory local_modules norm_weights \
	other_attention padding page_commands pairs_of_microbatches pretrain_gpt weights_in_training whole_checkpoints whole_jobs))
CLOSELY := 0.12.1 0.15.3 0.19.0
CLOSELY_TESTS := tests/matrix tests/features/tensor_parallel
# The newer ones need Python 3.12.
PYTHON312 ?= python3.12
IN_MATRIX = -m pytest $(XDIST) -m "not full"

test-matrix: $(STAMP) $(MATRIX:%=.venv-matrix/%/.installed)  ## every feature on every release; writes the table of the page
	@rm -rf runs/matrix; status=0; for release in $(MATRIX); do echo "megatron-core $$release"; \
		case " $(CLOSELY) " in *" $$release "*) tests="$(CLOSELY_TESTS)";; *) tests="$(MATRIX_TABLE)";; esac; \
		MATRIX_RECORD=runs/matrix/$$release.json .venv-matrix/$$release/bin/python $(IN_MATRIX) $$tests $(ARGS) \
		|| status=1; done; \
	$(BIN)/python -m mindspeed_dsa.tools.compat trained runs/matrix $(if $(ARGS),--part) || status=1; exit $$status

.venv-matrix/%/.installed: setup.py
	$(if $(filter 0.17.% 0.18.% 0.19.% next,$*),$(PYTHON312),$(PYTHON)) -m venv --clear .venv-matrix/$*
	.venv-matrix/$*/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 \
		$(if $(filter next,$*),,megatron-core==$*) -r examples/megatron_lm/requirements.txt \
		--editable '.[megatron,viz,test]'
	@touch $@

next: .venv-matrix/next/.installed  ## the newest wheel, and MEGATRON_LM=DIR (a checkout of main): what broke, by feature
	.venv-matrix/next/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --pre megatron-core
	@rm -rf runs/next; status=0; for source in installed $(MEGATRON_LM); do \
		checkout=; record=runs/next/wheel.json; \
		[ $$source = installed ] || { checkout=$$source; record=runs/next/checkout.json; }; \
		PYTHONPATH=$$checkout MATRIX_RECORD=$$record .venv-matrix/next/bin/python $(IN_MATRIX) $(MATRIX_TABLE) $(ARGS); \
		.venv-matrix/next/bin/python -m mindspeed_dsa diff $$source --trained $$record || status=1; \
	done; exit $$status

# The other versions of Python that setup.py allows; each with an environment of its own.
PYTHONS ?= 3.10 3.12 3.13

test-pythons:  ## the quick tests once on each of the other Pythons
	@for version in $(PYTHONS); do echo "Python $$version"; \
		$(MAKE) --no-print-directory test PYTHON=python$$version VENV=.venv-$$version || exit 1; done

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

# torch_npu is imported by name: by itself it would be loaded with torch, which fails where CANN is missing.
npu:  ## on an Ascend NPU, in your own environment: operators, layers, ranks, one report in runs/npu; installs nothing
	@mkdir -p runs/npu
	TORCH_DEVICE_BACKEND_AUTOLOAD=0 $(NPU_PYTHON) -m benchmarks npu --report runs/npu \
		--json runs/npu/report.json $(ARGS)

compat: $(STAMP)  ## read released megatron-core wheels again into mindspeed_dsa/session/targets.json
	$(BIN)/python -m mindspeed_dsa.tools.compat refresh $(ARGS)

docs: $(STAMP)  ## write the generated pages
	$(BIN)/python -m mindspeed_dsa.tools.compat docs
	$(BIN)/python -m benchmarks.plan.page
	$(BIN)/python -m benchmarks.plan.recipes
	$(BIN)/python -m benchmarks.figures

site: $(STAMP)  ## the pages as a site in runs/site; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build $(ARGS)

# Files in archives get the time of the commit: two builds of one commit are the same bytes.
dist: $(STAMP)  ## wheel and source distribution in dist/, reproducible
	rm -rf build dist
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -m build --no-isolation --outdir dist .

# What a user does first, in an environment that is made for it: everything that the wheel needs is downloaded.
test-wheel: dist  ## install the wheel into a fresh environment, and try it there
	rm -rf .venv-wheel runs/wheel
	$(PYTHON) -m venv .venv-wheel
	mkdir -p runs/wheel
	cd runs/wheel && ../../.venv-wheel/bin/python -m pip install --quiet --disable-pip-version-check \
		--constraint ../../constraints.txt "$$(ls ../../dist/*.whl)[megatron,viz]" && \
		../../.venv-wheel/bin/python -m mindspeed_dsa --version && \
		../../.venv-wheel/bin/python -m mindspeed_dsa doctor --use-fused-dsa && \
		../../.venv-wheel/bin/python -m mindspeed_dsa try $(or $(ARGS),--quick)
