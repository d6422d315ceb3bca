# SPDX-License-Identifier: Apache-2.0
# Everything starts from `make help`. The environment lives in .venv, what is built in build/.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# The first interpreter that is new enough; PYTHON=... overrides.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
PY := .venv/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check

SOURCES := $(wildcard csrc/*.c csrc/*.h kvio/*.pyx kvio/*.pxd kvio/*.pxi) kvio/uring/_build.py
CLANG_FORMATTED = $(wildcard csrc/*.c csrc/*.h tests/engine/*.c bench/*.c)
ARGS ?=

.PHONY: help setup bench test lint format sanitize nightly clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo '  ARGS="..." is passed on to bench (kvio bench options) and test (pytest options).'
	@echo '  MEMBERS="/dev/nvme1n1 /dev/nvme2n1" make bench reads real namespaces; nothing is written'
	@echo '  to them unless ARGS holds --allow-destroy.'

setup: .venv/.built ## packages, environment, build; quick when nothing changed
	@echo "kvio is built; .venv/bin/kvio and .venv/bin/python use it"

bench: .venv/.built ## the main job: four striped members, GB/s and latency, fio beside it, a plot
	@$(PY) bench/main.py $(ARGS)

test: .venv/.built .venv/.test ## the whole suite
	@$(PY) -m pytest -m "not nightly" $(if $(CI),--expected-skips=suite) $(ARGS)

lint: .venv/.built .venv/.test .venv/.lint ## ruff, mypy, cython-lint, clang-format
	@.venv/bin/ruff check --quiet .
	@.venv/bin/ruff format --quiet --check .
	@.venv/bin/mypy --no-error-summary
	@PATH="$(CURDIR)/.venv/bin:$$PATH" .venv/bin/cython-lint $(wildcard kvio/*.pyx kvio/*.pxd)
	@.venv/bin/clang-format --dry-run --Werror $(CLANG_FORMATTED)
	@echo "lint: clean"

format: .venv/.lint ## rewrites the sources as lint wants them
	@.venv/bin/ruff check --quiet --fix . ; .venv/bin/ruff format --quiet .
	@.venv/bin/clang-format -i $(CLANG_FORMATTED)

sanitize: .venv/.built .venv/.test ## the engine's tests over a core built with ASan and UBSan
	@tools/sanitize $(if $(CI),--expected-skips=sanitize) $(ARGS)

nightly: .venv/.built .venv/.test ## random mixed traffic for ten minutes, and what else is long
	@KVIO_STRESS_SECONDS=$${KVIO_STRESS_SECONDS:-600} $(PY) -m pytest -m "stress or nightly" --timeout=3600 $(ARGS)

clean: ## removes the environment and everything built
	rm -rf .venv build dist bench-results *.egg-info kvio/*.so kvio/uring/*.so kvio/uring/_liburing.c
	rm -rf .hypothesis .mypy_cache .ruff_cache .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- stamps: each says that a step was done for the files it depends on ---

build/.system: tools/system-packages
	@[ -n "$(PYTHON)" ] || { echo "kvio needs Python 3.11 or newer (PYTHON=... names one)" >&2; exit 1; }
	@tools/system-packages $(PYTHON)
	@mkdir -p build && touch $@

.venv/.made: build/.system tools/make-venv
	@tools/make-venv $(PYTHON) .venv
	@touch $@

# what the build needs stays in the environment, so that a rebuild does not fetch it again
.venv/.installed: .venv/.made pyproject.toml setup.py
	@$(PY) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")' > build/requires.txt
	@$(PIP) -r build/requires.txt
	@$(PIP) --no-build-isolation --editable '.[plot]'
	@touch $@

.venv/.built: .venv/.installed $(SOURCES)
	@$(PY) setup.py --quiet build_ext --inplace
	@touch $@

.venv/.test: .venv/.installed
	@$(PIP) $$($(call extra,test))
	@touch $@

.venv/.lint: .venv/.installed
	@$(PIP) $$($(call extra,lint))
	@touch $@

# prints the requirements of one extra, so that installing them does not build kvio once more
extra = $(PY) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["$(1)"])'
