# make run    sets everything up, then runs the whole pipeline on SmolLM2 with a real SGLang on the CPU
# make test   sets everything up, then runs the linter, the type checker and the tests, and prints the coverage
# make lab    sets everything up, then opens JupyterLab on the notebooks
# Set-up goes into .venv; PYTHON chooses the interpreter (3.11 or 3.12), KIND=gpu installs SGLang with CUDA.
PYTHON ?= $(firstword $(foreach p,python3.12 python3.11 python3,$(shell $(p) -c 'import sys; (3,11) <= sys.version_info[:2] <= (3,12) and print("$(p)")' 2>/dev/null)))
KIND   ?= cpu
PARAMS ?= params/smollm2-cpu.yaml
VENV   := .venv
PY     := $(VENV)/bin/python

.PHONY: run test chromium lab setup clean
.DEFAULT_GOAL := run

run: setup
	$(PY) -m eagle3lib run $(PARAMS)

test: setup chromium
	$(VENV)/bin/ruff check eagle3lib tests tools benchmarks notebooks
	$(VENV)/bin/mypy
	$(PY) -m pytest --cov=eagle3lib --cov-report=term:skip-covered tests

# The browser test wants Debian's chromium; where it cannot be installed that test is skipped, and says so.
chromium:
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && echo "test: installing chromium" && \
	  apt-get update -qq -o Acquire::http::Timeout=30 && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null; } || \
	  echo "test: no chromium and no way to install it here; the browser test will be skipped"

lab: setup
	$(VENV)/bin/jupyter lab notebooks

setup: $(PY)
	@$(PY) tools/install.py $(KIND)
	@$(PY) -c "from eagle3lib import targets; print('set-up: target', targets.resolve('smollm2'))"

$(PY):
	@test -n "$(PYTHON)" || { echo "Python 3.11 or 3.12 is needed and none was found; name one: make PYTHON=/path/to/python3.12"; exit 2; }
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) .cache
