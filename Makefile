# Everything happens in .venv; nothing outside this folder is touched.
PYTHON ?= python3
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help demo test lint clean

help:
	@echo "make demo    install Leadline into .venv, then a story, a chat, a recall and a tool call"
	@echo "make test    lint, check types and run the tests"
	@echo "make lint    lint and check types only"
	@echo "make clean   remove .venv and all caches"

demo: .venv/installed
	$(BIN)/leadline generate "Once upon a time" --max-tokens 80
	$(BIN)/python examples/demo.py

test: lint
	$(BIN)/pytest -q -n auto --maxprocesses 8 --dist loadgroup

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Leadline needs Python 3.11 or newer, not {v[0]}.{v[1]}: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv

.venv/installed: .venv/bin/python pyproject.toml scripts/install_torch.sh
	scripts/install_torch.sh $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@
