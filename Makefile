# Every target does its own set-up, in .venv. What it takes from outside:
#   PYTHON=python3.12            the interpreter for .venv (default: the first python3 >= 3.10)
#   TORCH_SPEC="torch==2.15.0"   another torch; pip's own PIP_* variables work as ever
VENV ?= .venv
TORCH_SPEC ?= torch==2.13.0

# Each test that starts an interpreter would compile every module again without its byte code.
export PYTHONDONTWRITEBYTECODE :=

BIN := $(VENV)/bin
# Most of what is installed is never imported, so pip compiles none of it.
INSTALL := $(BIN)/python -m pip --disable-pip-version-check install --no-compile
# Most tests wait: for ranks, interpreters and deadlines. Three workers keep two cores busy;
# tests/conftest.py decides which of them runs a file, and when.
WORKERS := -n 3 --dist loadfile --no-loadscope-reorder
BUILD_REQUIRES := $(shell sed -n 's/^requires = \[\(.*\)\]$$/\1/p' pyproject.toml | tr -d ,)
DOCS_REQUIRES := $(shell sed -n 's/^docs = \[\(.*\)\]$$/\1/p' pyproject.toml | tr -d ,)
WHEELS_REQUIRES := $(shell sed -n 's/^wheels = \[\(.*\)\]$$/\1/p' pyproject.toml | tr -d ,)
NATIVE_SOURCES := $(shell find kernels -name '*.h' -o -name '*.cpp')

# Two at a time: torch is fetched while the native module is compiled.
MAKEFLAGS += --jobs=2

.PHONY: demo test test-all check lint native nodes-check tsan model-check fuzz soak cuda-compile oldest-triton ptx-check bench gpu-check
.PHONY: c10d-conformance clean emulated-driver integrations matrix pictures site wheels
.DELETE_ON_ERROR:

demo: $(VENV)/.native $(VENV)/.package
	$(BIN)/ringcomm demo

# Proofs that read nothing which has changed since they last passed here are left out (tests/proofs.py).
test: $(VENV)/.native $(VENV)/.tools emulated-driver
	$(BIN)/python -m pytest $(WORKERS)

# Every case of the tests that have covering arrays or values for it (tests/support/covering.py),
# every proof, and the files that each opens.
test-all: export RINGCOMM_TEST_CASES := all
test-all: test

# Compiled while pip installs: that keeps one core busy.
emulated-driver: $(VENV)/.native
	@$(BIN)/python -m tests.support.emulated_driver

check: lint
	$(BIN)/python -m pytest $(WORKERS) --ignore=tests/test_style.py

# ruff, clang-format and mypy --strict: the commands stand in the test, since CI runs it.
lint: $(VENV)/.native $(VENV)/.tools
	$(BIN)/python -m pytest -q --durations=0 tests/test_style.py tests/test_layering.py \
		tests/test_internal_names.py

# Rebuilds the native module in place, only what changed, and writes its stub.
native: $(VENV)/.package
	$(BIN)/python setup.py -q build_ext --inplace
	$(BIN)/python -m tools.native_stub
	@touch $(VENV)/.native

# The templates and their owners under ThreadSanitizer, litmus tests of every memory order, and
# mutants that they must reject. make test runs it, too, without the large worlds and with fewer
# rounds.
tsan: $(VENV)/.native $(VENV)/.tools
	RINGCOMM_TSAN=all $(BIN)/python -m pytest -v tests/proof/races tests/proof/litmus

# An hour of mixed collectives on four ranks: no wrong element, and nothing that grows. Then random
# plans of faults, many more than make test plays; SEED says which.
MINUTES ?= 60
FAULT_MINUTES ?= 20
SEED ?= 0
soak: $(VENV)/.native $(VENV)/.tools
	$(BIN)/python -m tests.proof.soak --minutes $(MINUTES) --seed $(SEED)
	$(BIN)/python -m tests.proof.faults.soak --minutes $(FAULT_MINUTES) --seed $(SEED)

# The models of the signal protocol under SPIN (apt-get install spin), with larger bounds than in make
# test: up to eight minutes.
model-check: $(VENV)/.native $(VENV)/.tools
	RINGCOMM_MODEL_CHECK=all $(BIN)/python -m pytest -v -s tests/proof/model

# Junk from peers, stores and files, fifty times as much of it as make test tries.
fuzz: $(VENV)/.native $(VENV)/.tools
	RINGCOMM_FUZZ=50 $(BIN)/python -m pytest -v --timeout=1800 tests/proof/fuzz

# Every CUDA and Triton kernel for every architecture, and what its machine code must be; no GPU is
# needed.
# make test takes some of them, and each architecture with one at least.
cuda-compile: $(VENV)/.native $(VENV)/.tools
	RINGCOMM_CUDA_COMPILE=all $(BIN)/python -m pytest -v tests/proof/compile

# The Triton kernels among them by the oldest Triton of pyproject.toml, which takes less than the one of
# .venv: four minutes on one core.
OLDEST_TRITON := 3.6.0
oldest-triton: $(VENV)/.native $(VENV)/.tools build/triton-$(OLDEST_TRITON)
	PYTHONPATH=$(CURDIR)/build/triton-$(OLDEST_TRITON) RINGCOMM_CUDA_COMPILE=all $(BIN)/python -m pytest -v \
		tests/proof/compile/test_tl_compile.py tests/proof/compile/test_adamw_compile.py \
		tests/proof/compile/test_device_compile.py

build/triton-%: | $(VENV)/.made
	$(INSTALL) --quiet --no-deps --target $@ triton==$*

# Every test of devices on the PTX of the CUDA kernels, executed instruction by instruction, and every
# mutant of what orders memory there: half an hour on two cores.
# make test takes jobs of every unit, and a mutant of each kind.
ptx-check: $(VENV)/.native $(VENV)/.tools
	RINGCOMM_PTX_CHECK=all $(BIN)/python -m pytest $(WORKERS) tests/proof/ptx tests/ptx_interpreter
	RINGCOMM_EMULATED_KERNELS=ptx:7 $(BIN)/python -m pytest $(WORKERS) \
		tests/comm/device tests/proof/faults/device tests/gpu

# All tests of calls on the host with ranks that are threads of two and three nodes, as far as calls
# exist over nodes.
nodes-check: $(VENV)/.native $(VENV)/.tools
	for nodes in 2 3; do RINGCOMM_TEST_NODES=$$nodes $(BIN)/python -m pytest $(WORKERS) tests/comm/test_*.py \
		|| exit 1; done

bench: $(VENV)/.native $(VENV)/.tools
	$(BIN)/ringcomm bench

# On a machine with a GPU: builds, tests, sanitizes, times and records, in under ten minutes, or in
# BUDGET seconds. It takes the packages that PYTHON has, makes no environment and fetches nothing.
# REHEARSE=1 runs all of it on an emulated device, at small sizes, and marks every figure.
gpu-check:
	$(or $(PYTHON),python3) -m tools.gpu_check $(if $(BUDGET),--budget $(BUDGET)) \
		$(if $(REHEARSE),--rehearse)

# Lightning and DeepSpeed, which make test has no time to fetch, in .venv beside the rest. DeepSpeed compiles
# what it adds to torch's groups at their first use: here before the tests, whose ranks have no minutes to
# wait, and in a folder of its own, since a compiler that was stopped leaves a lock that all others wait for.
integrations: export TORCH_EXTENSIONS_DIR := $(CURDIR)/build/torch-extensions
integrations: $(VENV)/.native $(VENV)/.tools
	$(INSTALL) --quiet lightning
	DS_BUILD_OPS=0 $(INSTALL) --quiet --no-build-isolation deepspeed
	rm -f $(TORCH_EXTENSIONS_DIR)/*/lock
	$(BIN)/python -c "from deepspeed.comm.torch import build_shm_op; build_shm_op()"
	$(BIN)/python -m pytest -v tests/extras/integrations tests/c10d/test_deepspeed.py tests/bench/test_training.py

c10d-conformance: $(VENV)/.native $(VENV)/.tools
	$(BIN)/python -m tests.c10d.conformance

# Every interpreter and compiler that is here builds and tries the package, some minutes each, and has a
# row for the table of docs/versions.md. TORCH=2.11.0,2.12.0 adds other versions of torch, with their CUDA packages.
matrix:
	python3 -m tools.matrix $(if $(TORCH),--torch $(TORCH))

# The charts of docs/pictures, from bench/results.
pictures: $(VENV)/.native $(VENV)/.tools
	$(BIN)/python -m tools.pictures

# The documentation as a site, in build/site: build/site/index.html opens from the disk. A warning is an
# error: a link that leads nowhere, a page that no menu has, a parameter that a docstring makes up.
site: $(VENV)/.native $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# The sdist and the wheels of a release, in dist/, each checked and tried in a bare environment. Needs
# CPython 3.10, 3.11 and 3.12, of PATH or pyenv. OPTIONS="--arch x86_64 --python 3.12" makes one.
wheels: $(VENV)/.wheels
	$(BIN)/python -m tools.wheels $(OPTIONS)

clean:
	rm -rf $(VENV) build dist *.egg-info ringcomm/_native.*.so ringcomm/_backend.* ringcomm/_kernels
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find ringcomm bench tests -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps: each is as new as what it installed. Without build isolation, so that later builds find the
# same tools and compile only what changed.
$(VENV)/.made: tools/make_venv.sh
	sh tools/make_venv.sh $(VENV)
	$(INSTALL) --quiet $(BUILD_REQUIRES)
	@touch $@

$(VENV)/.torch: $(VENV)/.made tools/install_torch.sh
	sh tools/install_torch.sh $(BIN)/python "$(TORCH_SPEC)"
	@touch $@

# The compilation needs no torch, and is done while that is fetched; it stands by itself, since pip
# would hide its progress for minutes.
$(VENV)/.native: $(VENV)/.made setup.py CMakeLists.txt $(NATIVE_SOURCES)
	$(BIN)/python setup.py -q build_ext --inplace
	@touch $@

# The tree itself is on the path of .venv: the editable install's finder comes after the folders of
# sys.path, and a folder with the clone in it, as "ringcomm", would be taken for a namespace package.
$(VENV)/.package: $(VENV)/.torch pyproject.toml setup.py | $(VENV)/.native
	$(INSTALL) --quiet $(BUILD_REQUIRES)
	$(INSTALL) --quiet --no-build-isolation --editable .
	@$(BIN)/python -c "import os, sysconfig; folder = sysconfig.get_paths()['purelib']; \
		open(folder + '/ringcomm-source-tree.pth', 'w').write(os.getcwd() + '\n')"
	@touch $@

# What all tests import is compiled once, and not by each of their first processes.
$(VENV)/.tools: $(VENV)/.package
	$(INSTALL) --quiet --no-build-isolation --editable ".[bench,dev,test]"
	@$(BIN)/python -c "import ringcomm, torch._dynamo, hypothesis, pytest"
	@touch $@

$(VENV)/.wheels: $(VENV)/.made pyproject.toml
	$(INSTALL) --quiet $(WHEELS_REQUIRES)
	@touch $@

# Only the site needs these.
$(VENV)/.docs: $(VENV)/.package
	$(INSTALL) --quiet $(DOCS_REQUIRES)
	@touch $@
