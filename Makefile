# Two commands do everything on a fresh machine: `make demo` and `make test`. `make help` lists the rest.
SHELL := /bin/bash
.DEFAULT_GOAL := help
VENV ?= .venv
BIN := $(VENV)/bin
export HF_HUB_OFFLINE := 1
export LITELLM_LOCAL_MODEL_COST_MAP := True
# Two busy OpenMP pools on a small machine slow each other down tenfold.
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
# Only the plugins that are used: of every one installed each process would rewrite and import all modules.
PYTEST := $(TEST_ENV) PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $(BIN)/python -m pytest -q -p xdist.plugin -p pytest_timeout \
	-p pytest_asyncio.plugin -p _hypothesis_pytestplugin
# One process per core, at most eight: what more would share are the servers that each of them starts.
WORKERS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN); echo $$((n > 8 ? 8 : n)))
PARALLEL := -n $(WORKERS) --dist loadfile
# Integration tests wait for deadlines and for servers of theirs while a core is free: twice as many, again at most eight.
WAITING_WORKERS ?= $(shell n=$$((2 * $(WORKERS))); echo $$((n > 8 ? 8 : n)))

.PHONY: help install image demo test lint format test-unit test-integration test-e2e test-gpu bench-gpu \
	bench-provider bench-conversation cluster-up cluster-down openapi clean

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

install: ## make the virtual environment (done by every target that needs it)
	@scripts/bootstrap.sh $(VENV)

demo: install ## a 12-turn chat with real weights that survives a killed engine (about 4 minutes)
	$(BIN)/python examples/demo/demo.py --output build/demo.json

test: lint test-unit test-integration test-e2e ## everything CI runs: lint, unit, integration and end-to-end tests
	@echo "not run here: gpu tier (make test-gpu, on a machine with a CUDA device)"
	@missing=$$($(BIN)/python -m tests.e2e.cluster missing); \
		[ "$$missing" = nothing ] || echo "not run here: e2e tier, since $$missing; then: make test-e2e"

lint: install ## ruff, mypy (strict) and the layer contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: install ## format and sort imports
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test-unit: install ## fast tests, in process
	$(PYTEST) $(PARALLEL) tests/unit

test-integration: install ## real servers on loopback, real weights (fetched once)
	$(PYTEST) -p schemathesis.pytest.plugin -n $(WAITING_WORKERS) --dist loadfile --no-loadscope-reorder \
		tests/integration

# What takes minutes (Go programs, base image, Python environment) is made first, outside of any test's time limit.
test-e2e: install ## the operator on a real cluster, built from source (root on Debian, Go; KUBECONFIG=... uses another)
	$(BIN)/python -m tests.e2e.cluster prepare
	$(TEST_ENV) $(BIN)/python -m tests.e2e.run

cluster-up: install ## start that cluster and leave it running: test-e2e then uses it
	$(BIN)/python -m tests.e2e.cluster up

cluster-down: ## remove it
	$(BIN)/python -m tests.e2e.cluster down

# On a bare GPU machine only torch, triton, transformers and pytest are needed: nothing is installed or fetched.
test-gpu: ## kernels on a CUDA device
	PYTHONPATH=kernels:runtime $${PYTHON:-python3} -m pytest tests/gpu -q -p no:cacheprovider -o addopts= -o filterwarnings= \
		$$($${PYTHON:-python3} -c "import xdist" 2>/dev/null && echo "-n 12")  # compiling is most of it: about 1 minute, 7 without xdist

bench-gpu: ## PART=decode, prefill, chat, restore, cold or agreement (MODEL=folder): through the engine, on a CUDA device; JSON to $OUT when it is set
	@case "$(PART)" in decode|prefill|chat|restore|cold|agreement) ;; \
		*) echo "PART must be decode, prefill, chat, restore, cold or agreement"; exit 2 ;; esac
	PYTHONPATH=kernels:runtime:. $${PYTHON:-python3} tests/bench/bench_$(PART).py $(if $(filter agreement,$(PART)),"$(MODEL)")

openapi: install ## regenerate docs/openapi.json
	$(BIN)/python scripts/openapi.py

bench-provider: install ## what the LiteLLM provider adds to a call
	$(BIN)/python tests/bench/bench_provider_overhead.py

bench-conversation: install ## 50 turns in three modes, restores per tier; writes docs/savings.md (about 10 minutes)
	$(TEST_ENV) $(BIN)/python -m tests.bench.bench_conversation
	$(TEST_ENV) $(BIN)/python -m tests.bench.bench_conversation --model "$$($(BIN)/python scripts/fetch_smollm2.py)" \
		--label SmolLM2-135M --turns 12 --words 20 --reply-tokens 16 --window 1280 --tier-turns 4

image: ## TARGET=operator, runtime or runtime-cpu: a container image, by buildah, podman or docker (docs/install.md)
	scripts/build_image.sh $(TARGET)

clean: ## remove what make built in this folder (not the caches outside it)
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
