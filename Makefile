# Everything a clone needs: `make train` and `make test` set themselves up in .venv. Needs Python 3.11+, make and gcc.
#   make train       train the same small model in every recipe and write a table and a plot to runs/compare
#   make test        tests that need no GPU, of what takes long a fourth a day (tests/sampling.py); make test-full: all
#   make test-gpu    the GPU tests, with this machine's own python3
#   make test-targets   a sample of what the launchers launch, recorded and compiled for every GPU without one, a third a day (some
#                       minutes on two cores), by which files of kernels/ a call goes, and what kernels' PTX computes, emulated;
#                       some with the newest Triton as well, which is installed beside (300 MB)
#                       make test-targets-full: all of it (hours)
#   make test-distributed   several processes over gloo: FSDP2, torchrun; test-distributed-full: every case, every fault,
#                       and test-distributed-next: some of FSDP2 with torch 2.15, in an environment of its own (5 GB);
#                       test-distributed-next-full: all of it
#   make test-nccl   several processes with a GPU each, over NCCL: what ranks share of layers, experts and FSDP2, with this machine's own
#                       python3; TEST_ARGS='--on cpu' runs them over gloo, to see that the tests work
#   make test-integrations   exports, models and loops of transformers; packages of others read what this one writes (installed into .venv);
#                       test-integrations-full: with 200 steps of torchtitan on two ranks, and its spmd_types with torch 2.15
#   make check       ruff, pyrefly, import-linter      make docs       the documentation into site/
#   make test-docs   every code block, example, link and figure of the documentation, and the site, strict
#   make test-browser   pages of `halfbyte report` and of the documentation in Chromium (apt-get install -y chromium)
#   make test-package   wheel and sdist: built, installed in an empty environment, run        make dist       into dist/
#   make figures     the figures of docs/concepts.md and of the studies, every table that quotes bench/results, and those of docs/agreement.md
#                       whose packages `make test-integrations` has installed, made again
#   make bench       benchmarks on this machine's GPU, with its own python3
# PYTHON=python3.12 make setup chooses the interpreter. TRAIN_ARGS, TEST_ARGS, TARGET_ARGS and BENCH_ARGS reach the command.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OLDER := $(VENV)/transformers-5.17
PEERS := $(VENV)/peers
NEXT := $(VENV)/torch-2.15
NEXT_TESTS := $(addprefix tests/scale/test_,fsdp.py fsdp_matrix.py embedding.py head.py)
# All but the groups of cases and the 200 steps, which take minutes: two cores run them in one.
NEXT_SAMPLE := "(arrives or travels or nan or trace or launches or backward or differ or embedding) and not test_row"
NEWEST_TRITON := $(VENV)/triton-3.9
APART := --quiet --disable-pip-version-check --no-deps --upgrade
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
JOBS ?= 2
# Whose third of the sampled launches `make test-targets` compiles: DAY=2026-11-27 repeats one.
DAY ?= $(shell date -u +%F)
# Launches compiled with the newest Triton too: every kernel once on sm_90, and some others.
NEWEST_COUNT := 72
NEWEST_TARGETS := sm_90
ELSEWHERE := $(addprefix --ignore=tests/,browser gpu nccl clients export integrations docs package scale kernels/test_way.py kernels/test_ptx.py kernels/test_newer_triton.py)
REPOSITORY ?= pypi

.DEFAULT_GOAL := setup
.PHONY: setup train test test-browser test-full test-distributed test-distributed-full torch-next test-distributed-next test-distributed-next-full test-targets test-targets-full test-integrations test-integrations-full test-docs test-package test-gpu test-nccl check bench docs figures dist publish clean

setup: $(VENV)/setup.stamp

$(VENV)/setup.stamp: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "halfbyte needs Python 3.11 or later: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV); this takes a few minutes"
	$(INSTALL) --editable '.[train,test,dev]'
	@$(BIN)/python -m compileall -q halfbyte # pip compiles what it installs, not this; tests start many processes
	@touch $@

$(VENV)/docs.stamp: $(VENV)/setup.stamp
	$(INSTALL) --editable '.[docs]'
	@touch $@

# fouroversix's setup.py asks for CUDA even where it is told to build nothing for it; TransformerEngine's files are only read.
$(VENV)/integrations.stamp: $(VENV)/setup.stamp $(wildcard tests/clients/*.txt)
	$(INSTALL) --editable '.[integrations]'
	$(BIN)/python -m pip install $(APART) --target $(OLDER) --requirement tests/clients/transformers-5.17.txt
	$(BIN)/python -m pip install $(APART) --target $(PEERS)/transformer-engine --requirement tests/clients/transformer-engine.txt
	$(BIN)/python -m pip install $(APART) --target $(PEERS)/lightning --requirement tests/clients/lightning.txt
	$(BIN)/python -m pip install $(APART) --target $(PEERS)/torchtitan --requirement tests/clients/torchtitan.txt
	$(BIN)/python -m pip install $(APART) --target $(PEERS)/trl --requirement tests/clients/trl.txt
	CUDA_HOME=/none SKIP_CUDA_BUILD=1 $(BIN)/python -m pip install $(APART) --no-build-isolation --target $(PEERS)/fouroversix --requirement tests/clients/fouroversix.txt
	@touch $@

train: setup
	$(BIN)/halfbyte compare $(TRAIN_ARGS)

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests $(ELSEWHERE) -n $(JOBS) --dist worksteal --timeout 300 -m "not full" -q $(TEST_ARGS)

test-full: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests $(ELSEWHERE) -n $(JOBS) --dist worksteal --timeout 300 -q $(TEST_ARGS)

test-distributed: setup
	@$(BIN)/python -m compileall -q halfbyte # what changed since setup, which each of many processes would compile
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/scale -n $(JOBS) --dist worksteal --timeout 300 -m "not full" -q $(TEST_ARGS)

test-distributed-full: setup test-distributed-next-full
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/scale --timeout 1800 -q $(TEST_ARGS)

# What rests on FSDP2, with the torch that rewrote it; with the Triton whose interpreter the tests need.
$(NEXT).stamp: $(VENV)/setup.stamp tests/scale/torch-2.15.txt
	$(PYTHON) -m venv $(NEXT)
	$(NEXT)/bin/python -m pip install --quiet --disable-pip-version-check --requirement tests/scale/torch-2.15.txt
	$(NEXT)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps 'triton==3.6.*'
	@touch $@

torch-next: $(NEXT).stamp

# torchtitan's spmd_types on several ranks needs an FSDP2 that holds plain parts.
$(NEXT)/titan.stamp: $(NEXT).stamp tests/clients/torchtitan.txt tests/clients/torchtitan-2.15.txt
	$(NEXT)/bin/python -m pip install --quiet --disable-pip-version-check --requirement tests/clients/torchtitan-2.15.txt
	$(NEXT)/bin/python -m pip install $(APART) --target $(NEXT)/peers/torchtitan --requirement tests/clients/torchtitan.txt
	@touch $@

test-distributed-next: torch-next
	PYTHONPATH=. OMP_NUM_THREADS=1 $(NEXT)/bin/python -m pytest $(NEXT_TESTS) -k $(NEXT_SAMPLE) --timeout 300 -q $(TEST_ARGS)

test-distributed-next-full: torch-next
	PYTHONPATH=. OMP_NUM_THREADS=1 $(NEXT)/bin/python -m pytest $(NEXT_TESTS) --timeout 900 -q $(TEST_ARGS)

$(NEWEST_TRITON).stamp: $(VENV)/setup.stamp
	$(BIN)/python -m pip install $(APART) --target $(NEWEST_TRITON) 'triton==3.9.*'
	@touch $@

test-targets: $(NEWEST_TRITON).stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m halfbyte.kernels.record --jobs $(JOBS) --day $(DAY) $(TARGET_ARGS)
	PYTHONPATH=$(NEWEST_TRITON) OMP_NUM_THREADS=1 $(BIN)/python -m halfbyte.kernels.record --jobs $(JOBS) --count $(NEWEST_COUNT) $(NEWEST_TARGETS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/kernels/test_kernels_compile.py -m full -q
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/kernels/test_way.py tests/kernels/test_ptx.py tests/kernels/test_newer_triton.py -n $(JOBS) --dist worksteal --timeout 300 -m "not full" -q

test-targets-full: $(NEWEST_TRITON).stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m halfbyte.kernels.record --jobs $(JOBS) --all $(TARGET_ARGS)
	PYTHONPATH=$(NEWEST_TRITON) OMP_NUM_THREADS=1 $(BIN)/python -m halfbyte.kernels.record --jobs $(JOBS) --all $(TARGET_ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/kernels/test_ptx.py tests/kernels/test_newer_triton.py -n $(JOBS) --timeout 900 -q

test-integrations: $(VENV)/integrations.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/clients -n $(JOBS) --dist worksteal --timeout 300 -m "not full" -q $(TEST_ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/export tests/integrations -n $(JOBS) --dist worksteal --timeout 300 -m "not full" -q $(TEST_ARGS)
	PYTHONPATH=$(OLDER) OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/clients/test_families.py tests/clients/test_trainer.py tests/integrations/test_device_map.py -n $(JOBS) --dist worksteal --timeout 300 -q $(TEST_ARGS)

# What takes minutes, one after another, with what it measured.
test-integrations-full: test-integrations $(NEXT)/titan.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/clients -m full -rP --show-capture=stdout -q $(TEST_ARGS)
	PYTHONPATH=. OMP_NUM_THREADS=1 $(NEXT)/bin/python -m pytest tests/clients/test_torchtitan_types.py --timeout 600 -q $(TEST_ARGS)

test-docs: $(VENV)/docs.stamp
	OMP_NUM_THREADS=1 NO_MKDOCS_2_WARNING=1 $(BIN)/python -m pytest tests/docs -n $(JOBS) --dist loadfile --timeout 300 -q $(TEST_ARGS)

test-browser: $(VENV)/docs.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/browser --timeout 300 -q $(TEST_ARGS)

test-package: setup
	$(BIN)/python -m pytest tests/package --timeout 300 -q $(TEST_ARGS)

test-gpu:
	python3 tests/gpu/run.py $(TEST_ARGS)

test-nccl:
	python3 tests/nccl/run.py $(TEST_ARGS)

check: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyrefly check --summarize-errors
	$(BIN)/lint-imports

bench:
	python3 -m halfbyte.cli bench $(BENCH_ARGS)

docs: $(VENV)/docs.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

figures: setup
	$(BIN)/python docs/figures/draw.py
	$(BIN)/python docs/figures/leagues.py
	$(BIN)/python -m bench.tables --write
	$(BIN)/python -m bench.plan_tables --write
	PYTHONPATH=$(PEERS)/fouroversix $(BIN)/python -m bench.agreement --write --te $(PEERS)/transformer-engine

dist: setup
	rm -rf dist build *.egg-info # of before, which setuptools would believe
	$(BIN)/python -m build --outdir dist .

publish: dist
	$(BIN)/python -m pip install --quiet --disable-pip-version-check twine
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python -m twine upload --repository $(REPOSITORY) dist/*

clean:
	rm -rf $(VENV) build dist site runs *.egg-info .pytest_cache .hypothesis .ruff_cache .import_linter_cache
