# `make` or `make help` lists what there is.
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-full coverage check bench torture simulate observe report docs

# Not PYTHON: that is the interpreter that scripts/setup is to use.
VENV_PYTHON := .venv/bin/python
KILLS ?= 200
SEED ?=
SEEDS ?= 1000
STORE ?= sqlite
PEERS ?= usual
FAULTS ?=
FIRST ?=
DAEMONS ?= 1
PROCESSES ?= 1
NODES ?= 0
SHARDS ?= 16
MIRROR ?= yes
NEMESIS ?= kills
MINUTES ?= 1
KIND ?=

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## .venv with all that the checks and tests need (quick when nothing changed)
	@scripts/setup dev

demo: ## set up and watch the main job for a minute, with a kill -9 in the middle (STORE=postgresql: on PostgreSQL)
	@scripts/demo

test: setup ## every promise once: format, lint, types, imports, all tests that are not slow
	@scripts/test

test-full: setup ## the same with the slow tests
	@scripts/test --full

coverage: setup ## how much of the program the tests reach that are not slow (at least 85 %)
	@scripts/test --coverage

check: setup ## format, lint, types and import contracts only
	@scripts/check

bench: setup ## measure against the peers that are installed (STORE=redis|postgresql; PEERS=all: npm and pip install more); JSON in bench-results/
	@$(VENV_PYTHON) -m benchmarks --store $(STORE) --peers $(PEERS) $(ARGS)

torture: setup ## kill -9 a real daemon at random: KILLS=200 SEED=1 STORE=redis|sentinel|cluster|postgresql [FAULTS=redis|postgresql | DAEMONS=2] [MIRROR=no]; PROCESSES=2; NODES=4 SHARDS=16 FAULTS=100 [STORE=redis] [ARGS=--judge-gaps]; NEMESIS=groups,clock,network,resources,kills, or NEMESIS=watch,groups MINUTES=5, or NEMESIS=everything MINUTES=1
	@$(VENV_PYTHON) -m tests.crash.torture --kills $(KILLS) --store $(STORE) --daemons $(DAEMONS) --processes $(PROCESSES) --mirror $(MIRROR) \
		--nodes $(NODES) --shards $(SHARDS) --nemesis $(NEMESIS) --minutes $(MINUTES) \
		$(if $(FAULTS),--faults $(FAULTS)) $(if $(SEED),--seed $(SEED)) $(ARGS)

simulate: setup ## daemons, store, network and clients in one process, from a seed: SEEDS=1000 [FIRST=1] [KIND=daemons|nodes|whole], or KIND=nodes SEED=7 for the trace of one run
	@PYTHONPATH=.:tests $(VENV_PYTHON) -m simulation --seeds $(SEEDS) \
		$(if $(FIRST),--first $(FIRST)) $(if $(SEED),--seed $(SEED)) $(if $(KIND),--kind $(KIND)) $(ARGS)

observe: setup ## a daemon, load and a Prometheus with our rules, until Ctrl-C; prints the addresses
	@scripts/observe $(ARGS)

report: setup ## a daemon that writes its history under load for 25 s, and the report of it: an HTML page
	@scripts/report $(ARGS)

docs: setup ## the documents as a site: site/index.html
	@scripts/docs
