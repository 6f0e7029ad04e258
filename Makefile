PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint docs bench clean

demo: .venv/report  ## train VHP-EKVAE (CO) on the pendulum's pictures and show what it found
	rm -rf runs/demo
	$(BIN)/deepssm train pendulum-vhp-ekvae-co --out runs/demo

test: lint  ## lint, types, unit and end-to-end tests
	$(BIN)/python -m pytest

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/docs  ## build the documentation into site/
	$(BIN)/mkdocs build --strict

bench: .venv/bench  ## speed, as ratios taken in one run
	$(BIN)/python benchmarks/run.py

clean:
	rm -rf .venv site build dist runs

.venv/%: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[$*]'
	touch $@
