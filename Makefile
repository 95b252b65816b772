# Two commands set everything up: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test soak lint types check format bench clean

demo: .venv/.demo  ## train the main job, with a progress bar, a plot of the loss and a sample of text
	rm -rf runs/gpt  # the demo begins anew; a run of yours goes on: see --dir
	$(BIN)/python examples/train_gpt.py --steps 600 --precision bf16 --plot runs/loss.png --sample 400 --dir runs/gpt

test: .venv/.dev  ## the whole suite
	$(BIN)/python -m pytest

soak: .venv/.dev  ## kill -9 a training run dozens of times, and compare the bits at its end
	$(BIN)/python -m pytest tests/soak

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.dev
	$(BIN)/pyright

check: lint types test  ## what has to pass before a change lands

format: .venv/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/.bench  ## side-by-side benchmarks; results go to benchmarks/results, plots to docs/images
	$(BIN)/python benchmarks/step_overhead.py
	$(BIN)/python benchmarks/compiled.py
	$(BIN)/python benchmarks/collectives.py
	$(BIN)/python benchmarks/checkpoint.py
	$(BIN)/python benchmarks/plots.py

# torch by itself first: the constraints pin the build that the rest must accept
.venv/.torch: constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	touch $@

.venv/.demo: .venv/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[demo]"
	mkdir -p runs
	touch $@

.venv/.dev: .venv/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	mkdir -p runs
	touch $@

.venv/.bench: .venv/.dev
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[bench]"
	touch $@

clean:
	rm -rf .venv runs build *.egg-info
