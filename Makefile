# The two commands are `make demo` and `make test`; each sets up what it needs in $(VENV).
# bench, gpu-test, sanitize and their like run in the $(PYTHON) given, which has a CUDA torch, and install nothing.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV   ?= .venv
PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip --disable-pip-version-check install --quiet

HOST      := build/host
HAS_CXX   := $(shell command -v $(firstword $(CXX)))
HOST_SRC  := $(wildcard tests/csrc/test_*.cpp)
HOST_BIN  := $(if $(HAS_CXX),$(HOST_SRC:tests/csrc/%.cpp=$(HOST)/%))
# Contraction is written out (fma) where the arithmetic means it, and never left to the compiler.
HOST_FLAGS := -std=c++17 -O1 -g -Wall -Wextra -Werror -Wno-unknown-pragmas -ffp-contract=off \
    -fsanitize=address,undefined -fno-sanitize-recover=all -Icsrc/include
HEADERS   := $(wildcard csrc/include/rl_logp/*)
KERNEL_SRC := $(wildcard csrc/*.h csrc/cuda/* csrc/cpu/*)
BUILD_SRC := setup.py $(wildcard tools/*_build.py)
CXX_FILES := $(wildcard csrc/include/rl_logp/* tests/csrc/*.cpp tests/csrc/*.h) $(KERNEL_SRC)

# The CPU kernel with ASan and UBSan, in a copy of the package. Linked to libasan, it can be loaded
# only where that was loaded first.
SANITIZED  := build/sanitized
SANITIZERS := -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
# libstdc++ beside it, or the first exception ends the process: ASan looks for __cxa_throw at its start.
SANITIZE   := cd $(SANITIZED) && \
    LD_PRELOAD="$$(for l in asan stdc++; do $(or $(CXX),c++) -print-file-name=lib$$l.so; done | xargs)" \
    ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=$(abspath $(SANITIZED)) $(abspath $(PY))
FUZZ_CASES ?= 5000

.PHONY: help
help: ## Show this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sort | \
	    awk -F ':.*## ' '{ printf "  make %-14s %s\n", $$1, $$2 }'
	@printf '  %s\n' 'PYTHON=... is the Python to use (default python3), VENV=... the environment (default .venv)'

.PHONY: demo
demo: $(VENV)/.kernels ## Train a small language model with fused_logp, and save the reward curve
	$(PY) examples/grpo.py

.PHONY: test
test: host-test $(VENV)/.kernels ## Run every test, the documentation's examples included
	$(PY) -m pytest --timeout=900 tests compile_tests

.PHONY: host-test
host-test: $(HOST_BIN) ## Run the kernels' arithmetic on the host, under ASan and UBSan
	@$(if $(HAS_CXX),,echo "no host tests: there is no C++ compiler ($(CXX))")
	@for binary in $(HOST_BIN); do echo "$$binary"; "$$binary"; done

.PHONY: lint
lint: $(VENV)/.lint ## Check style and types: ruff, clang-format, pyright
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(if $(CXX_FILES),$(VENV)/bin/clang-format --dry-run -Werror $(CXX_FILES))
	$(VENV)/bin/pyright --pythonpath $(PY)

.PHONY: format
format: $(VENV)/.lint ## Format Python and C++ in place
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format
	$(if $(CXX_FILES),$(VENV)/bin/clang-format -i $(CXX_FILES))

.PHONY: compile-cuda
compile-cuda: $(if $(CUDA_HOME),$(VENV)/.dev,$(VENV)/.nvcc) ## Compile the kernels for every architecture, without a GPU
	$(PY) tools/compile_cuda.py

.PHONY: build-cuda
build-cuda: ## Build the CUDA kernels in place with $(PYTHON)
	RL_LOGP_BUILD=cuda $(PYTHON) setup.py --quiet build_ext --inplace

.PHONY: build-cpu
build-cpu: ## Build the CPU kernel in place with $(PYTHON)
	RL_LOGP_BUILD=cpu $(PYTHON) setup.py --quiet build_ext --inplace

.PHONY: wheel
wheel: $(VENV)/.dev ## Build a wheel, with the kernels that can be built, in dist/; install and try it
	@rm -rf dist/rl_logp-*.whl build/lib* build/bdist*
	$(PY) -m pip --disable-pip-version-check wheel --no-build-isolation --no-deps --no-cache-dir --wheel-dir dist .
	$(PY) tools/check_wheel.py dist/rl_logp-*.whl

.PHONY: sanitize-cpu
sanitize-cpu: $(SANITIZED)/.built ## Fuzz the CPU kernel and run its tests, under ASan and UBSan
	$(SANITIZE) $(abspath tests/fuzz_cpu.py) --cases $(FUZZ_CASES)
	$(SANITIZE) -m pytest --quiet --rootdir=$(CURDIR) -c $(abspath pyproject.toml) \
	    $(abspath tests/test_cpu_kernel.py)

.PHONY: gpu-test
gpu-test: build-cuda ## Build the kernels, and run the tests that need a GPU
	$(PYTHON) -m pytest -m cuda tests compile_tests

.PHONY: gpu2-test
gpu2-test: build-cuda ## Build the kernels, and run the tests that need two GPUs
	$(PYTHON) -m pytest -m two_gpus tests compile_tests

.PHONY: sanitize
sanitize: build-cuda ## Run the kernels under compute-sanitizer's four tools
	@for tool in memcheck racecheck initcheck synccheck; do \
	    echo "compute-sanitizer --tool $$tool"; \
	    compute-sanitizer --tool "$$tool" --error-exitcode 1 $(PYTHON) tests/sanitize.py; \
	done

.PHONY: bench
bench: build-cuda ## Measure speed, memory and accuracy beside other implementations
	$(PYTHON) -m benchmarks.run

.PHONY: bench-cpu
bench-cpu: build-cpu ## Measure the CPU kernel beside what torch offers, on an idle machine
	$(PYTHON) -m benchmarks.cpu

.PHONY: bench2
bench2: build-cuda ## Measure a vocabulary that two GPUs share
	$(PYTHON) -m benchmarks.two_gpus

.PHONY: plots
plots: $(VENV)/.dev ## Draw the figures in docs/ from benchmarks/results
	$(PY) -m benchmarks.plot

.PHONY: clean
clean: ## Remove builds and the virtual environment
	rm -rf build dist *.egg-info rl_logp/*.so $(VENV)

# --- what the above need; a stamp file is as new as what it stands for --------------------------------
$(VENV)/.venv:
	@$(PYTHON) -c 'import sys; v = sys.version_info; \
	    sys.exit(f"expected Python 3.10 or later, got {v[0]}.{v[1]}: make PYTHON=..." if v < (3, 10) else 0)'
	@echo "setting up $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	    echo "$(PYTHON) -m venv failed: on Debian and Ubuntu, install python3-venv" >&2; exit 1; }
	@touch $@

$(VENV)/.dev: requirements/dev.txt pyproject.toml $(VENV)/.venv
	@echo "installing requirements/dev.txt"
	@$(PIP) -r requirements/dev.txt
	@RL_LOGP_BUILD=none $(PIP) --no-build-isolation --no-deps --editable .
	@touch $@

$(VENV)/.kernels: $(VENV)/.dev $(BUILD_SRC) $(HEADERS) $(KERNEL_SRC)
	@$(PY) setup.py --quiet build_ext --inplace
	@[ -z "$(HAS_CXX)" ] || \
	    $(PY) -c 'import rl_logp, torch; rl_logp.require_kernel("cpu", torch.float32)'
	@touch $@

# A flag that the build gives itself comes later, and stands.
$(SANITIZED)/.built: $(VENV)/.dev $(BUILD_SRC) $(HEADERS) $(KERNEL_SRC) $(wildcard rl_logp/*.py)
	@rm -rf $(SANITIZED)
	CFLAGS="$(SANITIZERS)" LDFLAGS="$(SANITIZERS)" RL_LOGP_BUILD=cpu $(PY) setup.py --quiet build \
	    --build-lib $(SANITIZED) --build-temp $(SANITIZED)/objects
	@$(SANITIZE) -c 'import rl_logp, torch; rl_logp.require_kernel("cpu", torch.float32); \
	    assert "__asan_init" in open("/proc/self/maps").read() + \
	    open(rl_logp._library._loaded["cpu"], "rb").read().decode("latin-1")'
	@touch $@

$(VENV)/.lint: requirements/lint.txt $(VENV)/.dev
	@echo "installing requirements/lint.txt"
	@$(PIP) -r requirements/lint.txt
	@touch $@

$(VENV)/.nvcc: requirements/cuda.txt $(VENV)/.dev
	@echo "installing requirements/cuda.txt"
	@$(PIP) -r requirements/cuda.txt
	@touch $@

$(HOST)/%: tests/csrc/%.cpp $(HEADERS) $(wildcard tests/csrc/*.h)
	@mkdir -p $(@D)
	$(CXX) $(HOST_FLAGS) $< -o $@
