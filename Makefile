# Two commands do everything on a fresh machine: `make train` and `make test`.

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
FUZZ_ARGS ?=
FAULTS_ARGS ?=
REAL_FILES_ARGS ?=
FLEET_ARGS ?=
UV ?= uv

BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
NO_DEPENDENCIES := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps

# A part of Shakespeare's plays, which are in the public domain, put together by Andrej Karpathy.
SHAKESPEARE ?= https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt
SHAKESPEARE_SHA256 := 86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed

.PHONY: help train open-model test test-all test-fast test-slow test-hf test-gpu claims mutations certified fuzz fuzz-data faults real-files check docs pages bench-overhead bench-guards bench-pipeline bench-pipeline-cuda bench-gpu bench-torch bench-cpu gpu-hour cuda-compiler aot fleet plan-table schema constraints

help:  ## this list
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 16

train: $(VENV)/installed  ## a tiny GPT on 8 simulated devices, no download; run it again and it resumes
	$(BIN)/spmdtrain train configs/quickstart.toml --simulate-devices 8

open-model: build/tinyshakespeare.txt $(VENV)/installed  ## a small Llama on Shakespeare, its samples and its certificate (docs/open_model.md): a quarter of an hour
	$(BIN)/spmdtrain train configs/open_model.toml
	$(BIN)/spmdtrain sample runs/open_model --prompt "ROMEO:" --length 500
	$(BIN)/spmdtrain certify configs/open_model.toml --out runs/open_model/certificate

build/tinyshakespeare.txt:
	mkdir -p build
	$(PYTHON) -c 'import sys, urllib.request; urllib.request.urlretrieve(*sys.argv[1:])' $(SHAKESPEARE) $@.part
	echo "$(SHAKESPEARE_SHA256)  $@.part" | sha256sum --check --quiet
	mv $@.part $@

test: $(VENV)/installed-dev  ## every room, on CPU: of a test that takes seconds its first case; a quarter of an hour
	$(PYTEST) --share first $(PYTEST_ARGS)

test-all: $(VENV)/installed-dev  ## every test, on CPU: make test-all PYTEST_ARGS="-k mesh"; without PYTEST_ARGS an hour
	$(PYTEST) $(PYTEST_ARGS)

test-fast: $(VENV)/installed-dev  ## the tests of less than a second, which compile little: most of what a change breaks, in two minutes
	$(PYTEST) -m "not long and not seconds" $(PYTEST_ARGS)

test-slow: $(VENV)/installed-dev  ## the tests that take long: whole grids of pipelines and kernels, hours
	$(BIN)/python -m pytest -n 2 -m slow $(PYTEST_ARGS)

test-hf: $(VENV)/installed-dev  ## published models against torch and transformers, where those are installed: two minutes
	$(BIN)/python -c "import torch, transformers"
	$(BIN)/python -m pytest -m hf -s $(PYTEST_ARGS) tests/interop

test-gpu: $(VENV)/installed-dev  ## kernels on the GPU that is there, with jax's CUDA libraries installed beside
	JAX_PLATFORMS=cuda XLA_PYTHON_CLIENT_PREALLOCATE=false $(BIN)/python -m pytest -n 4 -m gpu $(PYTEST_ARGS)

claims: $(VENV)/installed-dev  ## the figures of README and docs/ measured again, those of this kind of machine: a minute
	$(BIN)/python docs/made/claims.py $(CLAIMS_ARGS)

mutations: $(VENV)/installed-dev  ## breaks a copy of the code in one place at a time: the named test must fail, an hour
	$(BIN)/python -m tests.mutations $(MUTATIONS_ARGS)

certified: $(VENV)/installed-dev  ## breaks a copy of the code in one place at a time: no certificate may be given, hours
	$(BIN)/python -m tests.certified $(or $(CERTIFIED_ARGS),breakages)

fuzz: $(VENV)/installed-dev  ## random runs against one device: make fuzz FUZZ_ARGS="--seed 123 --draws 1"
	PYTHONPATH=.:tests $(BIN)/python -m fuzz $(FUZZ_ARGS)

fuzz-data: $(VENV)/installed-dev  ## damaged files of data: make fuzz-data FUZZ_ARGS="--seed 1 --cases 100"
	PYTHONPATH=.:tests $(BIN)/python -m fuzz_data $(FUZZ_ARGS)

faults: $(VENV)/installed-dev  ## breaks checkpoints, kills and stops processes, hundreds of times: docs/faults.md; hours
	mkdir -p build && PYTHONPATH=.:tests $(BIN)/python -m faults $(FAULTS_ARGS) > build/faults.jsonl
	PYTHONPATH=.:tests $(BIN)/python -m faults --write build/faults.jsonl

real-files: $(VENV)/installed-dev  ## what other tools write, read: docs/real_files.md; an hour, and 10 GB of virtual environments
	PYTHONPATH=.:tests JAX_PLATFORMS=cpu $(BIN)/python -m real_files $(REAL_FILES_ARGS)

check: $(VENV)/installed-dev  ## lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright --pythonpath $(BIN)/python

docs: $(VENV)/installed-docs  ## the documentation as a site in build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet --site-dir build/site
	@echo "the site: build/site/index.html, or $(BIN)/python -m http.server --directory build/site"

pages: $(VENV)/installed  ## what docs/ takes from elsewhere: examples, settings, pictures; a minute
	$(BIN)/python docs/made/pages.py

bench-overhead: $(VENV)/installed  ## step time of the loop against a bare step, on CPU: two minutes on a quiet machine
	MALLOC_ARENA_MAX=1 MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=8000000000 $(BIN)/python benchmarks/overhead.py

bench-guards: $(VENV)/installed  ## what the guards and saves cost beside a step, on CPU: two minutes
	MALLOC_ARENA_MAX=1 MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=8000000000 $(BIN)/python benchmarks/guards.py

bench-pipeline: $(VENV)/installed  ## memory and step time of pipelines against a differentiated loop, on CPU: ten minutes
	MALLOC_ARENA_MAX=1 MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=8000000000 $(BIN)/python benchmarks/pipeline.py

bench-pipeline-cuda: $(VENV)/cuda-compiler  ## the pipelined step compiled for 8 H200s, without one: jax 0.11 or later (Python 3.12)
	JAX_PLATFORMS=cpu $(BIN)/python benchmarks/pipeline_cuda.py

bench-torch: $(VENV)/installed  ## our training step beside a bare jit, PyTorch and MaxText, where those are installed, on a GPU
	mkdir -p benchmarks/results && $(BIN)/python benchmarks/beside --json benchmarks/results/beside.json

bench-cpu: $(VENV)/installed  ## our training step beside a bare jit and eager PyTorch, on a CPU: five minutes
	mkdir -p benchmarks/results && $(BIN)/python benchmarks/beside --shapes shakespeare gpt_6m --steps 5 --json benchmarks/results/beside_cpu.json

bench-gpu: $(VENV)/installed  ## every kernel timed, on a GPU
	mkdir -p benchmarks/results && $(BIN)/python -m pallas_kernels.bench --json benchmarks/results/kernels.json

gpu-hour: $(VENV)/installed-dev  ## the first hour on a machine with a GPU: GPU_HOUR=10 make gpu-hour does what fits in ten minutes
	$(BIN)/python benchmarks/gpu_hour

cuda-compiler: $(VENV)/cuda-compiler  ## XLA's CUDA side for the jax that is installed, without driver and libraries

aot: $(VENV)/cuda-compiler  ## every kernel through ptxas for GPUs that are not there: jax 0.11 or later (Python 3.12)
	$(NO_DEPENDENCIES) nvidia-cudnn-cu13 nvidia-cuda-nvdisasm
	JAX_PLATFORMS=cpu $(BIN)/python -m pallas_kernels.assembled --write docs/kernel_bounds.md
	JAX_PLATFORMS=cpu $(BIN)/python -m pallas_kernels.aot

fleet: $(VENV)/cuda-compiler  ## flagship layouts at real size through XLA, and docs/fleet.md: jax 0.11 or later, half an hour
	$(BIN)/python benchmarks/fleet.py $(FLEET_ARGS)

plan-table: $(VENV)/installed  ## the docs' table of the planner: the published 1T run among all layouts of 3072 A100s
	@$(BIN)/python benchmarks/planner/plan_table.py

schema: $(VENV)/installed  ## configs/schema.json, by which editors complete the TOML files
	$(BIN)/python -c "import json, spmdtrain.config as c; print(json.dumps(c.json_schema(), indent=2))" > configs/schema.json

constraints:  ## constraints.txt anew, with uv: the newest versions that Python 3.11 and later can install
	$(UV) pip compile pyproject.toml --extra dev --extra docs --extra hf --extra data --extra tensorboard --extra wandb --extra remote --universal --python-version 3.11 --upgrade --quiet \
	  --no-emit-index-url --no-emit-find-links --no-header --no-annotate -o constraints.txt

$(VENV)/installed: pyproject.toml constraints.txt | $(BIN)/pip
	@echo "installing into $(VENV): a minute or two, once"
	$(INSTALL) -e '.[hf]'
	@touch $@

$(VENV)/installed-dev: pyproject.toml constraints.txt | $(BIN)/pip
	@echo "installing into $(VENV): a minute or two, once"
	$(INSTALL) -e '.[dev,hf]'
	@touch $@ $(VENV)/installed

$(VENV)/installed-docs: pyproject.toml constraints.txt | $(BIN)/pip
	@echo "installing into $(VENV): a minute or two, once"
	$(INSTALL) -e '.[docs,hf]'
	@touch $@ $(VENV)/installed

$(VENV)/cuda-compiler: $(VENV)/installed
	@echo "installing XLA's CUDA compiler into $(VENV): once, 1 GB"
	$(NO_DEPENDENCIES) nvidia-cuda-nvcc nvidia-nvvm \
	  $$($(BIN)/python -c "from jax import __version__ as v; print(f'jax-cuda13-plugin=={v} jax-cuda13-pjrt=={v}')")
	@touch $@

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "spmdtrain needs Python 3.11 or later: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2> /dev/null || \
	  { echo "$(PYTHON) cannot make a virtual environment: apt install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
