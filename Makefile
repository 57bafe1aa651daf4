PYTHON ?= python3
BIN = .venv/bin
READY = .venv/.ready
RIVALS = .venv-rivals

.PHONY: demo test slow benchmark rivals interpreters docs format

demo: $(READY)
	$(BIN)/python examples/mg1_queue.py

test: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest --numprocesses 2 --dist loadfile

slow: $(READY)
	$(BIN)/pytest -m slow

benchmark: $(READY)
	$(BIN)/python -m benchmarks $(or $(TASK),foundation)

rivals: $(RIVALS)/.ready
	$(RIVALS)/bin/python -m benchmarks.rivals --tasks $(or $(TASK),queue)

interpreters:
	tests/interpreters.sh

docs: $(READY)
	$(BIN)/pip install --quiet -e '.[docs]'
	$(BIN)/sphinx-build --quiet -W docs docs/_build

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(READY): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[test]'
	touch $(READY)

$(RIVALS)/.ready: pyproject.toml
	$(PYTHON) -m venv $(RIVALS)
	$(RIVALS)/bin/pip install --quiet --disable-pip-version-check -e '.[rivals]'
	touch $(RIVALS)/.ready
