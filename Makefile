# The commands of README, of CI and of every day. Needs python3 and make; the rest comes from wheels.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test unit check coverage chaos clean

demo: $(READY)
	$(BIN)/python -m bridge demo

# four at a time, because most tests wait for a process; each of the four has servers of its own, and takes over work
test: $(READY)
	$(BIN)/python -m pytest -n 4 --dist worksteal $(ARGS)

unit: $(READY)
	$(BIN)/python -m pytest tests/unit $(ARGS)

# branches, in the workers' processes and their children too; thousands of jobs under a tracer would show nothing more
coverage: $(READY)
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -n 4 --dist worksteal -q -k 'not thousand' $(ARGS)
	$(BIN)/coverage combine -q
	$(BIN)/coverage report

# one fault after another on a real cluster; ARGS="--minutes 3", "--plain" for Celery alone, "--only silence"
chaos: $(READY)
	$(BIN)/python -m tests.chaos $(ARGS)

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $(READY)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis dist build
