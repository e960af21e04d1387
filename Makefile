# `make` or `make help` lists what there is.
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-full check bench torture

PYTHON := .venv/bin/python
KILLS ?= 200
SEED ?=

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## .venv with all that the checks and tests need (quick when nothing changed)
	@scripts/setup dev

demo: ## set up and watch the main job for a minute, with a kill -9 in the middle
	@scripts/demo

test: setup ## every promise once: format, lint, types, imports, all tests that are not slow
	@scripts/test

test-full: setup ## the same with the slow tests
	@scripts/test --full

check: setup ## format, lint, types and import contracts only
	@scripts/check

bench: setup ## measure against the peers that are installed; a table, and JSON in bench-results/
	@$(PYTHON) -m benchmarks $(ARGS)

torture: setup ## SIGKILL a real daemon at random moments: KILLS=200 SEED=1
	@$(PYTHON) -m tests.crash.torture --kills $(KILLS) $(if $(SEED),--seed $(SEED))
