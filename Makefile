# Everything runs in .venv, which is made once and brought up to date when pyproject.toml or constraints.txt change.
#   make demo    plan and train a small model on four CPU ranks
#   make test    the tests: pure ones on two cores, then those with processes of their own (ARGS="tests/pure -k name" narrows them)
#   make lint    ruff, pyright, import-linter

PYTHON ?= $(firstword $(foreach p,python3.11 python3.12 python3 python,$(shell $(p) -c 'import ensurepip, sys, venv; print("$(p)") if sys.version_info >= (3, 11) else None' 2>/dev/null)))
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
export OMP_NUM_THREADS ?= 1

.PHONY: help venv demo test lint format clean

help:
	@sed -n 's/^#   //p' Makefile

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "autoplan needs Python 3.11 or newer with its venv module; name one with: make venv PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PY) -c '' 2>/dev/null || { rm -rf $(VENV); $(PYTHON) -m venv $(VENV); }
	@echo "Installing into $(VENV) (once; a few minutes where torch has to be downloaded) ..."
	@$(PY) -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[models,dev]'
	@touch $@

demo: venv
	@$(PY) -m autoplan demo $(ARGS)

ifdef ARGS
test: venv
	@$(PY) -m pytest $(ARGS)
else
test: venv
	@failed=0; $(PY) -m pytest -n 2 --dist loadfile tests/pure || failed=1; $(PY) -m pytest tests/dist tests/gpu || failed=1; exit $$failed
endif

lint: venv
	@$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check . && $(VENV)/bin/pyright && $(VENV)/bin/lint-imports

format: venv
	@$(VENV)/bin/ruff check --fix . ; $(VENV)/bin/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
