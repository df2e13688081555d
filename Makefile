# What a newcomer types first: `make quickstart` and `make test`. Each makes .venv when there is none.
# The targets that take MODEL, CHECKPOINT, ARENA or URL are for a user's CI. They fail where the command fails; make itself then exits 2 whatever
# the command's code was, so with EXIT_CODE=FILE the code is written there (docs/ci.md).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
GEMQ := $(BIN)/gemq
READY := $(VENV)/ready
SHARED_DATA ?= ../shared/data

.PHONY: bench-gpu bench-served bench-client help quickstart test test-slow test-blackbox test-vllm lint wheel bench-quantize bench-quality bench-slice constraints clean quantize eval-ppl package check serve-env fuzz
.DELETE_ON_ERROR:

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools -e

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] < (3, 11))' || { echo "gemq needs Python 3.11 or newer: make PYTHON=python3.11 ..."; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(READY): pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) '.[dev]'
	touch $@

# what a newcomer waits for: gemq and the demo model's reader, half of what the tests need
$(VENV)/quick: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) '.[demo]'
	touch $@

quickstart: $(VENV)/quick  ## quantize the demo model (Gemma 3 270M) to 4 bits and show its perplexity beside the source's
	$(GEMQ) quantize gemma-3-270m --recipe w4a16-g32 --samples 16 --length 128 --eval-records 8 --output $${OUTPUT:-out/gemma-3-270m-w4a16-g32}

PYTEST = OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -q -n 2 --dist loadgroup

test: $(READY)  ## run the tests, in two processes; test-slow, test-blackbox and test-vllm run the others
	$(PYTEST) -m "not vllm and not slow" --ignore tests/blackbox

test-slow: $(READY)  ## run the tests that take longest: power cuts at every step, simulated searches, real weights
	$(PYTEST) -m "slow and not vllm" --ignore tests/blackbox

test-blackbox: $(READY)  ## run the tests that use gemq through its command line alone; GEMQ_BLACKBOX_SEED=N interrupts at other moments
	$(PYTEST) tests/blackbox

test-vllm: $(READY)  ## run the tests that start a real vLLM; `make serve-env` first
	@test -x .venv-vllm/bin/python || { echo "there is no .venv-vllm: run make serve-env first"; exit 2; }
	$(BIN)/python -m pytest -q -m vllm

serve-env:  ## make .venv-vllm, the environment that vLLM serves in (2.7 GB, some minutes)
	$(PYTHON) serve/environment.py

lint: $(READY)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/mypy

FUZZ_READY := .venv-fuzz/ready
FUZZ_SECONDS ?= 60
FUZZ_READERS ?= seal provenance measured shard shard-audit config recipe records calibration-set

$(FUZZ_READY): $(READY) tests/fuzz/requirements.txt
	$(PYTHON) -m venv .venv-fuzz
	.venv-fuzz/bin/python -m pip install --quiet --disable-pip-version-check -r tests/fuzz/requirements.txt
	# what gemq needs is in $(VENV) already: this environment sees it, and adds the fuzzer
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
	  > "$$(.venv-fuzz/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/gemq.pth"
	touch $@

fuzz: $(FUZZ_READY)  ## [FUZZ_SECONDS=60] [FUZZ_READERS=...]: strangers' bytes for each reader in turn, guided by coverage
	mkdir -p out/fuzz
	cd out/fuzz && for reader in $(FUZZ_READERS); do \
	  echo "fuzzing $$reader for $(FUZZ_SECONDS) s"; \
	  ../../.venv-fuzz/bin/python ../../tests/fuzz/fuzz.py $$reader --seconds $(FUZZ_SECONDS) --corpus corpus/$$reader > $$reader.log 2>&1 \
	    || { tail -n 30 $$reader.log; exit 1; }; \
	  grep executed_units $$reader.log; \
	done

wheel: $(READY)  ## sdist -> wheel -> clean environment; checks what is in it
	$(BIN)/python -m tests.check_wheel

bench-quantize: $(READY)  ## time and memory beside llm-compressor, in one run
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,bench]'
	$(BIN)/python -m benchmarks.quantize --data $(SHARED_DATA)

bench-quality: $(READY)  ## perplexity and KL beside llm-compressor, in one run
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,bench]'
	$(BIN)/python -m benchmarks.quality --data $(SHARED_DATA)

bench-slice: $(READY)  ## memory on slices of E4B's widths, beside llm-compressor
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,bench]'
	$(BIN)/python -m benchmarks.slice

bench-gpu: $(READY)  ## E4B's whole shape on this machine's GPU, random weights
	$(BIN)/python -m benchmarks.gpu --work $${WORK:-out/bench-gpu}

bench-client: $(READY)  ## what the measuring client costs against a stub at 2,000 tokens a second
	$(BIN)/python -m benchmarks.client

bench-served: $(READY)  ## CHECKPOINT=... [OPTIONS=...]: a checkpoint on a real vLLM with and without the int4 plugin, gemq bench on each
	$(BIN)/python -m benchmarks.served --work out/bench-served --row stock=$(CHECKPOINT) --plugin plugin=$(CHECKPOINT) $(OPTIONS)

MODEL ?= google/gemma-4-E4B-it
RECIPE ?= w4a16
BUDGET ?= 5%
CHECKPOINT ?= out/$(notdir $(MODEL))-$(RECIPE)
ARENA ?= efficient-gemma
PACKAGE ?= $(CHECKPOINT)-$(ARENA)
URL ?= http://127.0.0.1:8000
OPTIONS ?=
# a command, its code kept in the file EXIT_CODE if one is named
keep = $(1); code=$$?; $(if $(EXIT_CODE),echo $$code > $(EXIT_CODE);) exit $$code
$(if $(EXIT_CODE),$(shell rm -f $(EXIT_CODE)))

quantize: $(READY)  ## MODEL=... RECIPE=... [CHECKPOINT=...]: make a checkpoint
	$(call keep,$(GEMQ) quantize $(MODEL) --recipe $(RECIPE) --output $(CHECKPOINT) $(OPTIONS))

eval-ppl: $(READY)  ## CHECKPOINT=... REFERENCE=... DATA=... [BUDGET=5%]: hold a checkpoint to a budget
	$(call keep,$(GEMQ) eval-ppl $(CHECKPOINT) --reference $(REFERENCE) --data $(DATA) --budget $(BUDGET) $(OPTIONS))

package: $(READY)  ## CHECKPOINT=... ARENA=efficient-gemma|lowbarena [PACKAGE=...]: what an arena asks for
	$(call keep,$(GEMQ) package $(CHECKPOINT) --arena $(ARENA) --output $(PACKAGE) $(OPTIONS))

check: $(READY)  ## URL=http://HOST:PORT: hold an endpoint to the contract
	$(call keep,$(GEMQ) check $(URL) $(OPTIONS))

constraints:  ## print what an unconstrained install would bring
	$(PYTHON) -m venv .venv-constraints && .venv-constraints/bin/pip install --quiet '.[dev]' && .venv-constraints/bin/pip freeze

clean:  ## remove what the targets made, the environment too
	rm -rf $(VENV) .venv-constraints .venv-fuzz build dist src/*.egg-info out
