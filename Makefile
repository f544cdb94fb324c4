# Thalweg: `make up` serves a model on :8080, `make test` checks everything. `make help` lists the rest.

MODEL   ?= .cache/models/SmolLM2-135M-Instruct.Q4_1.gguf
HTTP    ?= 127.0.0.1:8080
WORKERS ?= 2
FLAGS   ?=

DIR     ?= gpu
PROFILE ?= dev
SEEDS   ?= 1
FUZZ_SECONDS ?= 20

SHELL       := bash
.SHELLFLAGS := -o pipefail -c

CARGO   ?= cargo
PYTHON  ?= python3
TARGET  := $(or $(CARGO_TARGET_DIR),target)
MODELS  := .cache/models
SMOLLM2 := $(MODELS)/SmolLM2-135M-Instruct.Q4_1.gguf
GEMMA   := $(MODELS)/gemma-3-270m-q4_k_m.gguf
TINY    := .cache/tiny
VENV    := .venv
FUZZ_TARGETS := $(basename $(notdir $(wildcard fuzz/fuzz_targets/*.rs)))
CUDA    := --features cuda --locked
SERVICES := redis-server redis-sentinel etcd-server etcd-client
WITH_NVCC = NVCC="$$($(PYTHON) scripts/nvcc.py --find)"

export THALWEG_TEST_MODELS ?= $(abspath $(MODELS))

.PHONY: help up release test test-models services lint test-rust test-clients test-schemathesis test-lm-eval test-fuzz clients test-long bench fmt kernels test-gpu-build test-gpu
.DEFAULT_GOAL := help

help: ## This list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

up: release $(filter $(SMOLLM2),$(MODEL)) ## Build, fetch the default model once, serve it (MODEL= HTTP= WORKERS= FLAGS=)
	exec $(TARGET)/release/thalweg up --model $(MODEL) --http $(HTTP) --workers $(WORKERS) $(FLAGS)

release: ## The optimised binary
	$(CARGO) build --release --locked

test: lint test-rust test-fuzz test-clients ## Everything that fits 25 minutes on 2 cores, cold build included

lint: kernels ## Format, clippy and documentation, warnings being errors, with and without CUDA
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings
	$(WITH_NVCC) $(CARGO) clippy --workspace --all-targets $(CUDA) -- -D warnings
	$(WITH_NVCC) $(CARGO) clippy --workspace --test gpu $(CUDA) -- -D warnings
	$(WITH_NVCC) RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps $(CUDA)

# One build for all tests: every kernel is compiled for every card, and what needs a GPU is left to test-gpu.
test-rust: test-models services kernels ## Unit and integration tests
	@if $(CARGO) nextest --version >/dev/null 2>&1; \
	then set -x; $(WITH_NVCC) $(CARGO) nextest run --workspace $(CUDA) -E 'not test(/^cuda::/)'; \
	else set -x; $(WITH_NVCC) $(CARGO) test --workspace $(CUDA) --no-fail-fast -- --skip cuda::; fi

# The short form of schemathesis comes with it: a few hundred cases, each quick.
test-clients: test-models clients $(VENV)/schemathesis ## Real clients, Python's and Node's, against a cluster on this machine
	$(WITH_NVCC) $(CARGO) test --workspace $(CUDA) --no-run
	$(VENV)/bin/python -m pytest -q -p no:cacheprovider tests/clients --binary $(TARGET)/debug/thalweg --model $(SMOLLM2) \
	  --node "$$($(PYTHON) scripts/node.py --find)/node" --python-openai2 $(VENV)/openai2/bin/python
	$(SCHEMATHESIS) --examples 25 --cases-min 100

SCHEMATHESIS = $(VENV)/schemathesis/bin/python tests/clients/openapi/run.py --binary $(TARGET)/debug/thalweg --model $(SMOLLM2)

test-schemathesis: test-models $(VENV)/schemathesis ## 2,000 requests made up from /openapi.json (SEEDS=)
	$(WITH_NVCC) $(CARGO) build --workspace $(CUDA)
	for seed in $(SEEDS); do $(SCHEMATHESIS) --examples 200 --phases coverage,fuzzing --cases-min 2000 --seed $$seed || exit 1; done

test-lm-eval: test-models $(VENV)/lm_eval ## lm-evaluation-harness on two small tasks, to their end; installs some 700 MB
	$(WITH_NVCC) $(CARGO) build --workspace $(CUDA)
	$(VENV)/lm_eval/bin/python tests/clients/lm_eval/run.py --binary $(TARGET)/debug/thalweg --model $(SMOLLM2)

clients: $(VENV)/clients-ready $(VENV)/openai2 tests/clients/node_modules ## What the tests of clients need

# Coverage in our own crates alone, so that everything else is what the tests have built.
test-fuzz: kernels ## Every fuzz target for FUZZ_SECONDS=, two at a time
	@command -v c++ >/dev/null || { echo "libFuzzer needs a C++ compiler: install g++" >&2; exit 1; }
	$(WITH_NVCC) RUSTC_WORKSPACE_WRAPPER=$(abspath scripts/fuzz_rustc.sh) \
	  $(CARGO) build --workspace $(CUDA) $(FUZZ_TARGETS:%=--bin fuzz_%)
	printf '%s\n' $(FUZZ_TARGETS) | xargs -P 2 -I{} scripts/fuzz.sh $(TARGET) {} $(FUZZ_SECONDS)

kernels: ## NVIDIA's compiler from PyPI, where this machine has none
	@$(PYTHON) scripts/nvcc.py --find >/dev/null || ($(MAKE) $(VENV)/ready && $(VENV)/bin/python scripts/nvcc.py --install)

test-gpu-build: kernels test-models ## Tests for a machine with a GPU and without Rust, to DIR= (PROFILE=release for figures)
	$(WITH_NVCC) $(PYTHON) scripts/test_gpu_build.py --cargo "$(CARGO)" --profile $(PROFILE) $(DIR)

test-gpu: ## Run what test-gpu-build made in DIR=
	cd $(DIR) && ./run.sh

test-long: test-models services kernels ## Long forms over SEEDS; the last output is in docs/test-long.txt
	: > docs/test-long.txt
	for seed in $(SEEDS); do \
	  THALWEG_TEST_LONG=1 THALWEG_TEST_SEED=$$seed $(WITH_NVCC) $(CARGO) test --workspace $(CUDA) --test 'e2e_*' --test faults -- --nocapture 2>&1 \
	    | tee -a docs/test-long.txt || exit 1; done

bench: release test-models ## Engine speed on both models, as JSON lines
	for model in $(SMOLLM2) $(GEMMA); do for batch in 1 8; do \
	  $(TARGET)/release/thalweg bench engine --model $$model --threads 2 --prompt 512 --output 128 --batch $$batch --json \
	    || exit 1; done; done

fmt: ## Format everything
	$(CARGO) fmt --all

# Tests start their own Redis and etcd on free ports; nothing of the system's is touched.
services: ## Redis and etcd for the tests: Debian's packages, where they are missing
	@for tool in redis-server redis-sentinel etcd etcdctl; do command -v $$tool >/dev/null || missing=1; done; \
	if [ "$$missing" ]; then \
	  root=$$([ "$$(id -u)" = 0 ] || echo sudo); \
	  set -x; $$root apt-get update -qq && $$root apt-get install -y -qq --no-install-recommends $(SERVICES); \
	fi

test-models: $(SMOLLM2) $(GEMMA) $(TINY)/ready ## What tests read, where it is missing

$(SMOLLM2):
	$(PYTHON) scripts/fetch_models.py smollm2

$(GEMMA):
	$(PYTHON) scripts/fetch_models.py gemma

$(TINY)/ready: $(addprefix tests/reference/,adapters.py tiny.py decoder.py families.py tokenizer.py weights.py) | $(VENV)/ready
	$(VENV)/bin/python tests/reference/tiny.py $(@D)
	touch $@

$(VENV)/ready: scripts/requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

$(VENV)/clients-ready: tests/clients/requirements.txt $(VENV)/ready
	$(UV) $(VENV)/bin/python -r $<
	touch $@

# Many packages: pip would take minutes.
UV = $(VENV)/bin/uv pip install --quiet --python

# Environments of their own: these want other versions than the rest.
$(VENV)/openai2: tests/clients/openai2/requirements.txt | $(VENV)/ready
	$(NEW_VENV)
$(VENV)/schemathesis: tests/clients/openapi/requirements.txt | $(VENV)/ready
	$(NEW_VENV)
$(VENV)/lm_eval: tests/clients/lm_eval/requirements.txt | $(VENV)/ready
	$(NEW_VENV)

define NEW_VENV
	$(PYTHON) -m venv $@
	$(UV) $@/bin/python -r $< || { rm -rf $@; exit 1; }
	touch $@
endef

tests/clients/node_modules: tests/clients/package-lock.json | $(VENV)/ready
	$(VENV)/bin/python scripts/node.py --install
	PATH="$$($(PYTHON) scripts/node.py --find):$$PATH" npm ci --prefix tests/clients --silent
	touch $@
