# TORCH=cpu, with any target that sets .venv up, takes PyTorch's CPU build instead of the one with CUDA
# make run       execute every notebook into build/ and print the table of claims; TARGET=sm_90 or sm_80 executes
#                compiled code without a GPU, into build/sm_90/
# make lab       open the notebooks in JupyterLab
# make modes     run every notebook in every mode of Triton and record which claims hold in which
# make test      every behaviour by its quick tests, committed outputs against fresh ones
# make test-all  everything CI checks: all tests, and the committed pictures against fresh ones as well
# make compiled  compile every launch of notebooks and kernel tests for every target, and record what came of it, in an
#                hour or more; TARGETS=sm_80,sm_90 and SLICE=2/8 do a part
# make site      web pages of notebooks, claims and package in build/site, without running anything
# make fuzz      the property suites at length: SEED=, EXAMPLES= (cases in all) and TESTS= repeat a run
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
# Into .venv, wherever the reader's own settings of pip send what is installed.
PIP = $(PY) -m pip install --no-user --target '' --root / --prefix "$$PWD/$(VENV)" --quiet --disable-pip-version-check -c constraints.txt
# Committed outputs come from the CPU interpreter, so they are compared there on every machine.
ON_CPU := env TRITON_INTERPRET=1 CASCADE_LAB_TARGET= CUDA_VISIBLE_DEVICES= HIP_VISIBLE_DEVICES=

# Only from make's command line: a TARGET of the environment belongs to somebody else.
TORCH :=
TARGET :=
TARGETS :=
SLICE :=

.DEFAULT_GOAL := run
.PHONY: run lab modes compiled test test-all fuzz refresh lint bench clean venv

run: venv
	$(PY) -m cascade_lab run $(if $(TARGET),--target $(TARGET))

lab: venv
	$(PY) -m jupyterlab notebooks

modes: venv
	$(PY) -m cascade_lab modes

compiled: venv
	$(PY) -m tools.compile_launches $(if $(TARGETS),--targets $(TARGETS)) $(if $(SLICE),--slice $(SLICE))

TEST := $(PY) -m pytest tests -n 2 --dist loadfile --durations 10
# As a reader's Jupyter runs them: cell by cell, without the runner of this package.
NBVAL := $(ON_CPU) $(PY) -m pytest notebooks --nbval --nbval-current-env --nbval-cell-timeout=120 -n 2 -p no:cacheprovider -q

test: lint
	$(TEST) -m "not long"
	$(PY) -m cascade_lab check --no-run
	$(NBVAL)

test-all: lint
	$(TEST)
	$(PY) -m cascade_lab check
	$(NBVAL)

EXAMPLES ?= 120000
TESTS ?= tests/properties

fuzz: venv
	@seed=$${SEED:-$$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')}; \
	echo "make fuzz SEED=$$seed EXAMPLES=$(EXAMPLES) TESTS=$(TESTS)"; \
	FUZZ_SEED=$$seed FUZZ_EXAMPLES=$(EXAMPLES) $(PY) -m pytest $(TESTS) -n 2 -q -p no:cacheprovider

refresh: venv
	$(PY) -m cascade_lab refresh

lint: venv
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

bench: venv
	$(PY) -m cascade_lab bench --cpu

site: venv
	$(PY) -m cascade_lab site

# JupyterLab and the site in a real browser; its own packages come on top of the environment.
browser-test: venv
	@command -v chromium chromium-browser google-chrome >/dev/null || { \
		[ "$$(id -u)" = 0 ] || { echo "browser-test needs Chromium; on Debian: apt-get install chromium" >&2; exit 1; }; \
		apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; }
	$(PIP) -e '.[dev,browser]'
	$(PY) -m pytest tests/browser/check_site.py tests/browser/check_jupyterlab.py -p no:cacheprovider

clean:
	rm -rf build dist .venv .pytest_cache .ruff_cache *.egg-info
	find cascade_lab tests notebooks -name __pycache__ -prune -exec rm -rf {} +

# .venv carries the state it was made from: interpreter and place on the first line, declared packages on the second.
# Another interpreter or place makes a new environment, other declarations update it, the same state costs no pip call.
venv:
	@set -e; \
	case "$$PWD" in *"{"*"}"*) echo "setuptools cannot install from a path with braces: $$PWD" >&2; exit 1;; esac; \
	python_state=$$($(PYTHON) -c 'import os, sys; print(sys.version.split()[0], sys.base_prefix, os.getcwd())'); \
	case "$$python_state" in 3.1[1-9]*|3.[2-9][0-9]*) ;; *) \
		echo "Python 3.11 or newer is needed, $(PYTHON) is $${python_state%% *}: make PYTHON=python3.12 takes another" >&2; exit 1;; esac; \
	package_state=$$(cat pyproject.toml constraints.txt | cksum); \
	state=$$(printf '%s\n%s' "$$python_state" "$$package_state"); \
	if [ "$$(cat $(VENV)/state 2>/dev/null)" = "$$state" ] && $(PY) -c '' 2>/dev/null; then exit 0; fi; \
	if [ "$$(head -n 1 $(VENV)/state 2>/dev/null)" != "$$python_state" ] || ! $(PY) -m pip --version >/dev/null 2>&1; then \
		echo "making $(VENV) with $(PYTHON)"; \
		$(PYTHON) -m venv --clear $(VENV); \
	fi; \
	rm -f $(VENV)/state; \
	$(if $(filter cpu,$(TORCH)),$(PIP) uv; $(PY) -m uv pip install --torch-backend cpu --quiet -c constraints.txt torch;) \
	$(PIP) -e '.[dev]'; \
	printf '%s\n' "$$state" > $(VENV)/state
