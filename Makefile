# Every target makes its own environment: .venv with the pinned packages of requirements*.lock. pip checks the hash of every
# file but torch's, also of those that build packages: in an isolated build it would fetch these unchecked.
IS_NEW_ENOUGH := import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13; do $$p -c '$(IS_NEW_ENOUGH)' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
READY := $(VENV)/.ready
PYTEST = $(BIN)/python -m pytest
# pip would compile what it installs on one core: all cores do that afterwards, in half the time.
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
DEMO ?= --resume
# Many tests wait for other processes: one worker more than cores, and at most five.
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min(5, (os.cpu_count() or 1) + 1))')
export OMP_NUM_THREADS ?= 1
# The tests start many processes: each would compile the sources anew where Python may not keep what it has compiled.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo quick test check vllm lmeval mutants format lint types security audit docs house lock setup clean

help:  ## Show this list
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

demo: $(INSTALLED)  ## A swarm of four nodes that learn from each other, on this machine
	@exec $(BIN)/swarm testbed --nodes 4 $(DEMO)

# A test that takes longer is not quick: start it from a file that imports what it needs (tests/quick.py says how).
quick: $(READY) format lint types  ## While you work: format, lint, types and the quick unit tests, in about a minute
	$(PYTEST) -n $(WORKERS) --timeout 60 $$($(BIN)/python -m tests.quick)

STATIC = $(MAKE) --no-print-directory -j 2 format lint types security audit docs
# What takes long comes first; tests whose deadlines bear no load (`alone`) run after all others, one at a time.
TESTS = tests/e2e tests/swarm tests/unit tests/fuzz
TOGETHER = $(PYTEST) -n $(WORKERS) --dist worksteal $(TESTS)
# A test that failed beside others runs once more by itself, and counts if it fails again. It is named both times: repair it.
# Only failed tests (exit code 1) get that; a run that broke off has failed.
AGAIN = [ $$? = 1 ] && echo "Failed once; once more, one at a time:" && $(PYTEST) -v --last-failed --last-failed-no-failures none
# Property tests draw 25 examples each, and 100 in `make check`.
SHORT = --hypothesis-profile short -m
test: $(READY)  ## Most of the checks, which CI runs at each change: about ten minutes
	@$(STATIC)
	$(TOGETHER) $(SHORT) "not alone and not long" || { $(AGAIN) $(SHORT) "not alone and not long"; }

check: $(READY)  ## All checks, before a release and each night: also the tests that take long (tests/long.py)
	@$(STATIC)
	$(TOGETHER) -m "not alone" || { $(AGAIN) -m "not alone"; }
	$(PYTEST) tests/e2e -m alone || { $(AGAIN) -m alone; }

VLLM ?= $(if $(shell command -v nvidia-smi),cuda,cpu)
VLLM_VENV := .venv-vllm
# vLLM needs other versions of some packages than the lock has, so it has an environment of its own.
vllm:  ## vLLM in .venv-vllm, for a GPU where there is one (VLLM=cuda or cpu), and the tests of its engine
	@$(MAKE) --no-print-directory setup VENV=$(VLLM_VENV)
	@$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --require-hashes \
		-r requirements-vllm.lock -r requirements-vllm-$(VLLM).lock
	$(VLLM_VENV)/bin/python -m pytest --timeout 900 tests/unit/test_engine_contract.py tests/unit/test_vllm_engine.py

LM_EVAL_VENV := .venv-lm-eval
# It asks for some thirty further packages, so it has an environment of its own.
lmeval:  ## lm-eval in .venv-lm-eval, and the test that measures an exported policy with it
	@$(MAKE) --no-print-directory setup VENV=$(LM_EVAL_VENV)
	@$(LM_EVAL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --require-hashes \
		-r requirements-lmeval.lock
	$(LM_EVAL_VENV)/bin/python -m pytest tests/e2e/test_use_a_policy.py -k lm_eval

SEED ?= 1
SAMPLE ?= 60
mutants: $(READY)  ## Whether tests notice small changes of the code: SAMPLE of them, drawn by SEED
	$(BIN)/python -m tests.mutants $(SEED) $(SAMPLE)

format: $(READY)
	$(BIN)/ruff format --check .

# Without a cache: the order of imports depends on other files too, of which ruff's cache knows nothing.
lint: $(READY)
	$(BIN)/ruff check --no-cache .

types: $(READY)
	$(BIN)/pyright

security: $(READY)  ## What bandit finds in the code; exclusions with reasons in pyproject.toml
	$(BIN)/bandit --quiet --recursive --configfile pyproject.toml swarm

# Where no index answers, nothing is known of any package: that is told, and is no failure of the code.
audit: $(READY)  ## Known vulnerabilities of the pinned packages, where an index answers
	@rm -f $(VENV)/audit.json
	@$(BIN)/pip-audit --requirement requirements.lock --requirement requirements-dev.lock --no-deps --disable-pip \
		--progress-spinner off --timeout 15 --format json --output $(VENV)/audit.json 2>$(VENV)/audit.log || true
	@$(BIN)/python -m tests.audit $(VENV)/audit.json

# No warning of the theme about what may come after it, no request to anybody.
docs: $(READY)  ## The documentation as a site, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

UPGRADE ?=
lock: $(READY)  ## The lock files, from pyproject.toml; UPGRADE="NAME ..." or UPGRADE=all for newer versions
	@$(BIN)/python packaging/lock.py $(UPGRADE)

house: $(READY)  ## Counts of the source tree: modules, rooms, constructors, import circles
	@$(BIN)/python -m tests.house

setup: $(READY)  ## Only the environment

# The stamps are written last: an interrupted set-up goes on at the next call. Nothing here needs a compiler (`make lock`).
$(INSTALLED): requirements-build.lock requirements.lock requirements-torch.lock pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11, 3.12 or 3.13 is needed, found none; set PYTHON=/path/to/python3.11"; exit 1; }
	@echo "setting up $(VENV) with $(PYTHON) (a few minutes, once)"
	@$(PYTHON) -m venv --clear $(VENV) || { echo "Python's venv is needed; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	@$(PIP) --no-deps --require-hashes -r requirements-build.lock
	@$(PIP) --no-build-isolation --no-deps --require-hashes -r requirements.lock
	@$(PIP) -r requirements-torch.lock  # its CUDA build brings more packages
	@$(PIP) --no-build-isolation --no-deps --editable .
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true  # a package may have files that are not for this Python
	@touch $(INSTALLED)

$(READY): $(INSTALLED) requirements-dev.lock
	@echo "adding the tools of development to $(VENV)"
	@$(PIP) --no-build-isolation --no-deps --require-hashes -r requirements-dev.lock
	@touch $(READY)

clean:  ## Remove the environment and caches; runs/ stays
	rm -rf $(VENV) $(VLLM_VENV) $(LM_EVAL_VENV) .pytest_cache .ruff_cache .hypothesis site
