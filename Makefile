# Two commands set everything up: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# what DeepSpeed compiles belongs to one environment, and to one ninja: shared, or with another, it is compiled anew
export TORCH_EXTENSIONS_DIR ?= $(CURDIR)/.venv/extensions
export PATH := $(CURDIR)/$(BIN):$(PATH)
# images of Docker set it. Without compiled modules each of a thousand processes takes 4 s longer to import torch
unexport PYTHONDONTWRITEBYTECODE

# the rows of one file stay in one process, which has forked its ranks
BOTH := -n 2 --dist loadfile

.PHONY: demo test test-all test-long test-nvme test-gpu gpu soak structure lint types check format bench bench-all bench-jax clean

demo: .venv/.demo  ## train the main job, with a progress bar, a sample of text and a report
	rm -rf runs/gpt  # the demo begins anew; a run of yours goes on: see --dir
	$(BIN)/fnaccel launch -n 1 --precision bf16 examples/train_gpt.py --steps 600 --report runs/gpt/report.html --sample 400 --dir runs/gpt

test: .venv/.dev  ## all but the long rows: about nine minutes on two cores
	$(BIN)/python -m pytest -m "not long" $(BOTH)

test-all: .venv/.dev  ## every row, then seconds by folder; writes the table of seconds in tests/long_tier
	$(BIN)/python -m tests.long_tier --all

MINUTES ?= 10
UNTIL ?= $(shell echo $$(($$(date +%s) + $(MINUTES) * 60)))

test-long: .venv/.dev  ## long rows for ten minutes, or MINUTES: what guards the files that changed comes first
	$(BIN)/python -m tests.long_tier --until $(UNTIL)

# trackers bring 120 packages and pins, so they have an environment of their own: beside torch and the rest of .venv,
# which it finds by a path file
TRACKERS := .venv-trackers/bin
.PHONY: test-trackers

test-trackers: .venv-trackers/.trackers  ## the seven trackers that `make test` leaves out: real runs, read back
	$(TRACKERS)/python -m pytest tests/trackers

.venv-trackers/.trackers: .venv/.dev pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-trackers
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > \
		$$($(TRACKERS)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/of_venv.pth
	$(TRACKERS)/python -m pip install --quiet --no-compile -c constraints.txt "setuptools>=77,<82" -e ".[trackers]"
	touch $@

# the packages of SageMaker, Kubeflow and Ray: 1.8 GB, so only by hand, when a carrier or a file of examples/jobs has
# changed. SageMaker's has pins of its own, and leaves temporary folders to the end of the process
SERVICES := .venv-services/bin
SAGEMAKER := .venv-sagemaker/bin
.PHONY: test-services

test-services: .venv-services/.services .venv-sagemaker/.sagemaker  ## carriers against the packages of their services
	$(SERVICES)/python -m pytest tests/services --ignore tests/services/test_sagemaker.py
	$(SAGEMAKER)/python -m pytest -W ignore::pytest.PytestUnraisableExceptionWarning tests/services/test_sagemaker.py

.venv-services/.services: .venv/.dev
	$(PYTHON) -m venv .venv-services
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > \
		$$($(SERVICES)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/of_venv.pth
	$(SERVICES)/python -m pip install --quiet --no-compile "ray[train]==2.52.0" \
		"kubeflow-training==1.9.3" "kubernetes<31" "kubeflow-trainer-api==2.0.0"
	touch $@

.venv-sagemaker/.sagemaker: .venv/.dev
	$(PYTHON) -m venv .venv-sagemaker
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > \
		$$($(SAGEMAKER)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/of_venv.pth
	$(SAGEMAKER)/python -m pip install --quiet --no-compile "sagemaker-train==1.27.0" "moto==5.2.5"
	touch $@

# what other versions of torch run beside a part of the parity matrix
SAMPLE := tests/optim tests/checkpoint tests/tree tests/world tests/models/test_blocks.py tests/program/test_program.py \
	tests/step/test_concat.py $(addprefix tests/loop/test_,batch_size.py preemption.py running.py) \
	$(addprefix tests/promises/test_,notebooks.py paths.py random.py)
ENGINES := $(addprefix tests/strategies/test_,engines.py shard_dims.py torch_buckets.py) \
	tests/engine/test_order_of_passes.py tests/engine/test_shaped_aux.py tests/program/test_offloaded_parts.py

# torch_xla links against one release of torch, so XLA has an environment of its own (7 GB)
XLA := .venv-xla/bin
.PHONY: test-xla

test-xla: .venv-xla/.xla  ## the XLA strategy on virtual devices, and a sample of the suite on torch 2.9
	$(XLA)/python -m pytest tests/strategies/xla
	$(XLA)/python -m pytest $(SAMPLE) -k "not compiled_step"  # needs torch 2.11
	$(XLA)/python -m pytest tests/parity/test_matrix.py -k "fp32 and (local or ddp or -2- or -4-)"

.venv-xla/.xla: pyproject.toml
	$(PYTHON) -m venv .venv-xla
	$(XLA)/python -m pip install --quiet --no-compile torch==2.9.0 torch_xla==2.9.0
	$(XLA)/python -m pip install --quiet --no-compile torch==2.9.0 -e ".[data]" "numpy>=2,<3" "scikit-learn>=1.5" \
		"hypothesis>=6.100" "pytest>=9" "pytest-timeout>=2.3" "expecttest>=0.2"
	touch $@

# MkDocs and its theme: the site of docs/, which no test of `make test` needs
DOCS := .venv-docs/bin
.PHONY: docs

docs: .venv-docs/.docs  ## the site of the pages, in site/: open site/index.html
	$(DOCS)/python docs/build_site.py

.venv-docs/.docs: docs/constraints.txt
	$(PYTHON) -m venv .venv-docs
	$(DOCS)/python -m pip install --quiet --no-compile -c docs/constraints.txt mkdocs-material
	touch $@

# build and twine, which nothing else needs
.PHONY: release

release: .venv-release/.release  ## wheel and sdist in dist/, checked in a fresh environment, and how to upload them
	$(PYTHON) .ci/release.py --tools .venv-release/bin

.venv-release/.release:
	$(PYTHON) -m venv .venv-release
	.venv-release/bin/python -m pip install --quiet --no-compile "build>=1.2" "twine>=6"
	touch $@

# any other torch and Python, in an environment of its own (a build for CUDA has 7 GB):
# make test-version TORCH=2.9.1 PYTHON=python3.12
TORCH ?= 2.13.0
VERSION := .venv-torch-$(TORCH)-$(notdir $(PYTHON))
.PHONY: test-version

test-version: $(VERSION)/.version  ## a sample of the suite on torch TORCH and Python PYTHON
	$(VERSION)/bin/python -m pytest $(SAMPLE) $(ENGINES)
	$(VERSION)/bin/python -m pytest tests/parity/test_matrix.py -k "fp32 and (local or ddp or -2- or -4-)"

$(VERSION)/.version: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VERSION)
	grep -v "^torch=" constraints.txt > $(VERSION)/constraints.txt
	$(VERSION)/bin/python -m pip install --quiet --no-compile torch==$(TORCH)
	$(VERSION)/bin/python -m pip install --quiet --no-compile -c $(VERSION)/constraints.txt torch==$(TORCH) \
		-e ".[data,examples,quantize]" "hypothesis>=6.100" "pytest>=9" "pytest-timeout>=2.3" "expecttest>=0.2"
	touch $@

soak: .venv/.dev  ## kill -9 a training run dozens of times, compare the bits at its end; many faults on 3 ranks
	$(BIN)/python -m pytest tests/soak

test-nvme: .venv/.dev  ## ZeRO-Infinity on a disk; compiles DeepSpeed's async_io, which takes minutes and libaio-dev
	MAX_JOBS=2 $(BIN)/python -m pytest tests/nvme

gpu: test-gpu  ## what one CUDA device must show, in ten minutes: tests, and the tables of a small GPT and of GPT-2
	OMP_NUM_THREADS=1 python3 benchmarks/gpu.py
	OMP_NUM_THREADS=1 python3 benchmarks/gpt2.py

test-gpu:  ## training, big models and commands on a CUDA device, by the Python that has its torch
	python3 -m pytest tests/gpu -p no:xdist

structure: .venv/.dev  ## figures of the floor plan: rooms, rows, imports, circles
	$(BIN)/python -m tests.surface.structure

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.dev
	$(BIN)/pyright

check: lint types test  ## what has to pass before a change lands

format: .venv/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

QUICK := step_overhead compiled jax_step starting head collectives checkpoint load offload

bench: .venv/.bench .venv-jax/.jax  ## side by side with the peers, few rounds: prints one table
	for name in $(QUICK); do $(BIN)/python benchmarks/$$name.py --quick --into benchmarks/results/quick/$$name.json; done
	$(BIN)/python benchmarks/pages.py benchmarks/results/quick

bench-all: .venv/.bench .venv-jax/.jax  ## all rounds of all benchmarks, then every table and picture: an hour
	$(BIN)/python benchmarks/step_overhead.py
	$(BIN)/python benchmarks/compiled.py
	$(BIN)/python benchmarks/jax_step.py
	$(BIN)/python benchmarks/collectives.py
	$(BIN)/python benchmarks/checkpoint.py
	$(BIN)/python benchmarks/axes.py
	$(BIN)/python benchmarks/pipeline.py
	$(BIN)/python benchmarks/replicas.py
	$(BIN)/python benchmarks/seeing.py
	$(BIN)/python benchmarks/starting.py
	$(BIN)/python benchmarks/optimizer_parts.py
	$(BIN)/python benchmarks/head.py
	$(BIN)/python benchmarks/pure.py
	$(BIN)/python benchmarks/offload.py
	$(BIN)/python benchmarks/load.py
	$(BIN)/python benchmarks/pages.py

bench-jax: .venv/.bench .venv-jax/.jax  ## the captured step beside jax.jit alone
	$(BIN)/python benchmarks/jax_step.py
	$(BIN)/python benchmarks/pages.py

# a process has either torch or jax, so that neither changes the threads of the other
.venv-jax/.jax:
	$(PYTHON) -m venv .venv-jax
	.venv-jax/bin/python -m pip install --quiet --no-compile "jax[cpu]==0.10.2" optax==0.2.8
	touch $@

# torch by itself first: the constraints pin the build that the rest must accept. Without --no-compile pip compiles
# each module of each package, for a minute. A process compiles those that it imports
.venv/.torch: constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --upgrade pip
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt torch
	touch $@

.venv/.demo: .venv/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e ".[demo]"
	mkdir -p runs
	touch $@

.venv/.dev: .venv/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e ".[dev]"
	@# its setup asks torch what it could compile, so it needs the one that is here; nothing is compiled now.
	@# hatchling and editables build fnaccel itself
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt setuptools wheel ninja hatchling editables
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --no-compile --no-build-isolation -c constraints.txt -e ".[deepspeed]"
	@# its ranks talk by an extension, which takes a minute to compile: here, and not in the first test that needs it
	-$(BIN)/python -c "from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder as B; B().load(verbose=False)" > $@.log 2>&1
	mkdir -p runs
	touch $@

.venv/.bench: .venv/.dev
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e ".[bench]"
	touch $@

clean:
	rm -rf .venv .venv-* runs build *.egg-info
