# Every target does its own set-up: a virtual environment in .venv with the packages of the lock, and for the tests the
# database servers. A second run finds all of it in place and starts at once.

SHELL := /bin/bash
PYTHON ?= python3
ARGS ?=
export PYTHON
# Where it is set, each process compiles all modules again: twice the time to collect the tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test quick bench faults flaky coverage soak lint docs lock clean
.DEFAULT_GOAL := help

help: ## show this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 16

demo: ## the main job end to end, on the embedded default (no root, no server)
	@tools/setup-venv run
	.venv/bin/python examples/demo.py

test: ## lint, types and all tests (ARGS="-k consume" narrows them)
	@tools/setup-venv dev
	@tools/setup-servers
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	tools/run-tests $(ARGS)

quick: ## the fast part of the tests, in less than a minute: no Spark, no waiting, SQLite alone
	@tools/setup-venv dev
	.venv/bin/python -m pytest -q --on sqlite -m "not spark and not timing" -k "not postgres and not mysql and not redis and not duckdb" \
		tests/settings tests/connections tests/streams tests/pipelines tests/testing tests/test_arrows.py $(ARGS)

bench: ## measure speed, each number as a ratio to a yardstick of the same run
	@tools/setup-venv dev
	@tools/setup-servers
	.venv/bin/python -m bench $(ARGS)

faults: ## what the tests leave out or run in brief, in full: hours
	@tools/setup-venv dev
	@tools/setup-servers full
	.venv/bin/python -m pytest --full --timeout=14400 $(ARGS)

flaky: ## the tests that depend on processes, signals or time, 30 times each
	@tools/setup-venv dev
	@tools/setup-servers
	.venv/bin/python -m pytest -m timing --repeat 30 --processes 5 $(ARGS)

coverage: ## which lines and branches of src/weft all tests reach, those of subprocesses too
	@tools/setup-venv dev
	@tools/setup-servers
	tools/measure-coverage

soak: ## a streaming pipeline for two hours (SOAK=rows, windows or joins): every row there once, memory flat
	@tools/setup-venv dev
	@tools/setup-servers
	.venv/bin/python -m tests.faults.soak

lint: ## ruff and mypy
	@tools/setup-venv dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

docs: ## write the tables of options and the JSON Schema in docs/ again
	@tools/setup-venv dev
	.venv/bin/python -m tools.docs_tables

# The dev lock is compiled under the other one, so that both name the same versions and share one .venv.
COMPILE = .venv/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	--no-emit-index-url --no-emit-find-links --custom-compile-command "make lock" $(if $(UPGRADE),--upgrade)

lock: ## pin the packages that pyproject.toml asks for (UPGRADE=1: the newest ones)
	@tools/setup-venv dev
	$(COMPILE) --all-extras --group build pyproject.toml -o requirements.lock
	$(COMPILE) --all-extras --group dev --constraints requirements.lock pyproject.toml -o requirements-dev.lock

clean: ## remove the virtual environment, caches and build results
	rm -rf .venv .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis dist build
	find src tests tools bench examples -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
