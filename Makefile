# SPDX-License-Identifier: Apache-2.0

# Every target installs what it needs into .venv. Variables that you may set:
#   PYTHON=python3.12            the interpreter for .venv (default: the first python3 >= 3.10)
#   TORCH_SPEC="torch==2.15.0"   another torch; pip's own PIP_* variables also work
VENV ?= .venv
TORCH_SPEC ?= torch==2.13.0

# Write byte code: without it each test that starts an interpreter would compile every module again.
export PYTHONDONTWRITEBYTECODE :=

BIN := $(VENV)/bin
# pip does not compile byte code, because most installed modules are never imported.
INSTALL := $(BIN)/python -m pip --disable-pip-version-check install --no-compile
# Most tests wait for ranks, interpreters and deadlines, so three workers keep two cores busy.
# tests/conftest.py decides which worker runs a file, and when.
WORKERS := -n 3 --dist loadfile --no-loadscope-reorder
BUILD_REQUIRES := $(shell sed -n 's/^requires = \[\(.*\)\]$$/\1/p' pyproject.toml | tr -d ,)
DOCS_REQUIRES := $(shell sed -n 's/^docs = \[\(.*\)\]$$/\1/p' pyproject.toml | tr -d ,)
WHEELS_REQUIRES := $(shell sed -n 's/^wheels = \[\(.*\)\]$$/\1/p' pyproject.toml | tr -d ,)
NATIVE_SOURCES := $(shell find kernels -name '*.h' -o -name '*.cpp')

# Two jobs at a time: make downloads torch while it compiles the native module.
MAKEFLAGS += --jobs=2

.PHONY: demo test test-all check lint native nodes-check tsan model-check fuzz soak cuda-compile oldest-triton ptx-check bench gpu-check
.PHONY: c10d-conformance clean compare emulated-driver integrations matrix pictures site wheels aarch64-check
.DELETE_ON_ERROR:

demo: $(VENV)/.native $(VENV)/.package
	$(BIN)/ringcomm demo

# Skips proofs whose files have not changed since the proof last passed here (tests/proofs.py).
test: $(VENV)/.native $(VENV)/.tools emulated-driver
	$(BIN)/python -m pytest $(WORKERS)

# Runs every case of the tests that use covering arrays (tests/support/covering.py) and every proof,
# and checks the files that each proof opens.
test-all: export RINGCOMM_TEST_CASES := all
test-all: test

# Compiles while pip installs, since pip uses only one core.
emulated-driver: $(VENV)/.native
	@$(BIN)/python -m tests.support.emulated_driver

check: lint
	$(BIN)/python -m pytest $(WORKERS) --ignore=tests/test_style.py

# Runs ruff, clang-format and mypy --strict. The commands are in the test, since CI also runs the
# test.
lint: $(VENV)/.native $(VENV)/.tools
	$(BIN)/python -m pytest -q --durations=0 tests/test_style.py tests/test_layering.py \
		tests/test_internal_names.py tests/test_english.py

# Rebuilds the native module in place, compiling only changed files, and writes its stub.
native: $(VENV)/.package
	$(BIN)/python setup.py -q build_ext --inplace
	$(BIN)/python -m tools.native_stub
	@touch $(VENV)/.native

# Runs the templates and the classes that use them under ThreadSanitizer, litmus tests of every
# memory order, and mutants that these tests must detect. make test does the same without the large
# worlds and with fewer rounds.
tsan: $(VENV)/.native $(VENV)/.tools
	RINGCOMM_TSAN=all $(BIN)/python -m pytest -v tests/proof/races tests/proof/litmus

# Runs mixed collectives on four ranks for an hour; checks that no element is wrong and that memory
# does not grow. Then plays random fault plans, many more than make test; SEED selects them.
MINUTES ?= 60
FAULT_MINUTES ?= 20
SEED ?= 0
soak: $(VENV)/.native $(VENV)/.tools
	$(BIN)/python -m tests.proof.soak --minutes $(MINUTES) --seed $(SEED)
	$(BIN)/python -m tests.proof.faults.soak --minutes $(FAULT_MINUTES) --seed $(SEED)

# Checks the models of the signal protocol with SPIN (apt-get install spin), with larger bounds than
# make test: up to eight minutes.
model-check: $(VENV)/.native $(VENV)/.tools
	RINGCOMM_MODEL_CHECK=all $(BIN)/python -m pytest -v -s tests/proof/model

# Feeds junk from peers, stores and files, fifty times as much as make test.
fuzz: $(VENV)/.native $(VENV)/.tools
	RINGCOMM_FUZZ=50 $(BIN)/python -m pytest -v --timeout=1800 tests/proof/fuzz

# Compiles every CUDA and Triton kernel for every architecture, and checks properties of the machine
# code; needs no GPU. make test compiles some kernels, and at least one for each architecture.
cuda-compile: $(VENV)/.native $(VENV)/.tools
	RINGCOMM_CUDA_COMPILE=all $(BIN)/python -m pytest -v tests/proof/compile \
		tests/optim/test_quotients.py tests/optim/test_refused_turns.py

# Compiles the Triton kernels with the oldest Triton of pyproject.toml, which supports fewer
# features than the Triton of .venv: four minutes on one core.
OLDEST_TRITON := 3.6.0
oldest-triton: $(VENV)/.native $(VENV)/.tools build/triton-$(OLDEST_TRITON)
	PYTHONPATH=$(CURDIR)/build/triton-$(OLDEST_TRITON) RINGCOMM_CUDA_COMPILE=all $(BIN)/python -m pytest -v \
		tests/proof/compile/test_tl_compile.py tests/proof/compile/test_adamw_compile.py \
		tests/proof/compile/test_device_compile.py

build/triton-%: | $(VENV)/.made
	$(INSTALL) --quiet --no-deps --target $@ triton==$*

# Runs every test of devices on the PTX of the CUDA kernels, executed instruction by instruction,
# and every mutant of their memory ordering: half an hour on two cores. make test runs jobs of every
# unit, and a mutant of each kind.
ptx-check: $(VENV)/.native $(VENV)/.tools
	$(BIN)/python -m tests.support.emulator.ptx
	RINGCOMM_PTX_CHECK=all $(BIN)/python -m pytest $(WORKERS) tests/proof/ptx tests/ptx_interpreter
	RINGCOMM_EMULATED_KERNELS=ptx:7 $(BIN)/python -m pytest $(WORKERS) \
		tests/comm/device tests/proof/faults/device tests/gpu

# Runs all tests of host calls that exist over nodes; the ranks are threads on two and three nodes.
nodes-check: $(VENV)/.native $(VENV)/.tools
	for nodes in 2 3; do RINGCOMM_TEST_NODES=$$nodes $(BIN)/python -m pytest $(WORKERS) tests/comm/test_*.py \
		|| exit 1; done

bench: $(VENV)/.native $(VENV)/.tools
	$(BIN)/ringcomm bench

# On a machine with a GPU: builds, tests, sanitizes, times and records, in under ten minutes, or in
# BUDGET seconds. It uses the packages of PYTHON, creates no environment and downloads nothing.
# REHEARSE=1 runs everything on an emulated device, at small sizes, and marks every figure.
gpu-check:
	$(or $(PYTHON),python3) -m tools.gpu_check $(if $(BUDGET),--budget $(BUDGET)) \
		$(if $(REHEARSE),--rehearse)

# Times ringcomm beside Gloo, MPICH, Intel MPI, oneCCL, DDP, FSDP2 and DeepSpeed in one session,
# whose estimated length it announces, and writes tables and a chart to build/compare.
# OPTIONS=--record also puts the tables into docs/performance.md and README.md; OPTIONS=--quick
# tries everything at small sizes. A library that cannot be installed or run here is left out, and
# the tables say why.
compare: export I_MPI_ROOT := $(VENV)/intel
compare: $(VENV)/.native $(VENV)/.tools
	-@MAKEFLAGS="$(filter-out -j% --jobs%,$(MAKEFLAGS))" $(MAKE) --no-print-directory --keep-going \
		$(VENV)/.deepspeed $(VENV)/.intel
	$(BIN)/python -m tools.compare $(OPTIONS)

# Tests Lightning and DeepSpeed, whose installation takes too long for make test, in .venv.
# DeepSpeed compiles an extension of torch's groups at its first use. The command compiles it before
# the tests, whose ranks cannot wait for minutes, and in its own folder, since an interrupted
# compiler leaves a lock for which all others wait.
integrations: export TORCH_EXTENSIONS_DIR := $(CURDIR)/build/torch-extensions
integrations: $(VENV)/.native $(VENV)/.tools $(VENV)/.deepspeed
	$(INSTALL) --quiet lightning
	rm -f $(TORCH_EXTENSIONS_DIR)/*/lock
	$(BIN)/python -c "from deepspeed.comm.torch import build_shm_op; build_shm_op()"
	$(BIN)/python -m pytest -v tests/extras/integrations tests/c10d/test_deepspeed.py tests/bench/test_training.py

c10d-conformance: $(VENV)/.native $(VENV)/.tools
	$(BIN)/python -m tests.c10d.conformance

# Builds and tries the package with every interpreter and compiler of this machine, a few minutes
# each, and prints rows for the table of docs/versions.md. TORCH=2.11.0,2.12.0 adds other versions
# of torch, with their CUDA packages.
matrix:
	python3 -m tools.matrix $(if $(TORCH),--torch $(TORCH))

# Draws the charts of docs/pictures from bench/results.
pictures: $(VENV)/.native $(VENV)/.tools
	$(BIN)/python -m tools.pictures

# Builds the documentation site in build/site; open build/site/index.html. Warnings are errors: a
# broken link, a page that is in no menu, a docstring that names an unknown parameter.
site: $(VENV)/.native $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Builds the sdist and the wheels of a release in dist/, and checks and tries each in an empty
# environment. Needs CPython 3.10, 3.11 and 3.12, on PATH or in pyenv. OPTIONS="--arch x86_64
# --python 3.12" builds one wheel.
wheels: $(VENV)/.wheels
	$(BIN)/python -m tools.wheels $(OPTIONS)

# Runs the wheel for AArch64 of dist/, and C++ programs of the tests (RINGCOMM_TEST_MACHINE), under
# qemu. Needs Debian with qemu-user-static and g++-aarch64-linux-gnu. Builds wheels if dist/ lacks them.
aarch64-check: $(VENV)/.native $(VENV)/.tools $(VENV)/.wheels
	$(BIN)/python -m tools.aarch64 $(OPTIONS)

clean:
	rm -rf $(VENV) build dist *.egg-info ringcomm/_native.*.so ringcomm/_backend.* ringcomm/_kernels
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find ringcomm bench tests -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamp files: each is as new as its installation. There is no build isolation, so that later builds
# find the same tools and compile only changed files.
$(VENV)/.made: tools/make_venv.sh
	sh tools/make_venv.sh $(VENV)
	$(INSTALL) --quiet $(BUILD_REQUIRES)
	@touch $@

$(VENV)/.torch: $(VENV)/.made tools/install_torch.sh
	sh tools/install_torch.sh $(BIN)/python "$(TORCH_SPEC)"
	@touch $@

# The compilation needs no torch, so it runs while torch is downloaded. It is a separate command,
# since pip would hide its progress for minutes.
$(VENV)/.native: $(VENV)/.made setup.py CMakeLists.txt $(NATIVE_SOURCES)
	$(BIN)/python setup.py -q build_ext --inplace
	@touch $@

# A .pth file puts the tree itself on the path of .venv. The finder of the editable install comes
# after the folders of sys.path, so a folder that contains the clone as "ringcomm" would otherwise
# be imported as a namespace package.
$(VENV)/.package: $(VENV)/.torch pyproject.toml setup.py | $(VENV)/.native
	$(INSTALL) --quiet $(BUILD_REQUIRES)
	$(INSTALL) --quiet --no-build-isolation --editable .
	@$(BIN)/python -c "import os, sysconfig; folder = sysconfig.get_paths()['purelib']; \
		open(folder + '/ringcomm-source-tree.pth', 'w').write(os.getcwd() + '\n')"
	@touch $@

# Compiles the byte code that all tests import once, instead of in each of their first processes.
$(VENV)/.tools: $(VENV)/.package
	$(INSTALL) --quiet --no-build-isolation --editable ".[bench,dev,test]"
	@$(BIN)/python -c "import ringcomm, torch._dynamo, hypothesis, pytest"
	@touch $@

$(VENV)/.deepspeed: $(VENV)/.tools
	DS_BUILD_OPS=0 $(INSTALL) --quiet --no-build-isolation deepspeed
	@touch $@

# Intel MPI has files of the same names as MPICH, so it gets a folder of its own. The wheel oneccl has
# oneCCL's C functions; the CPU's library is in oneccl-cpu, whose files replace those of oneccl.
ONECCL := 2022.1.2
INSTALL_INTEL = $(INSTALL) --quiet --ignore-installed --prefix $(VENV)/intel
$(VENV)/.intel: $(VENV)/.made
	$(INSTALL_INTEL) impi-rt
	-$(INSTALL_INTEL) --no-deps oneccl==$(ONECCL)
	-$(INSTALL_INTEL) --no-deps oneccl-cpu==$(ONECCL)
	@touch $@

$(VENV)/.wheels: $(VENV)/.made pyproject.toml
	$(INSTALL) --quiet $(WHEELS_REQUIRES)
	@touch $@

# Only the site needs these.
$(VENV)/.docs: $(VENV)/.package
	$(INSTALL) --quiet $(DOCS_REQUIRES)
	@touch $@
