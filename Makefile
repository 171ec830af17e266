# The commands of a clone. Each makes the environment ready by itself, the first time as much as the hundredth.
# What is not here: how that is done (scripts/).

VENV ?= .venv
NP ?= 2
ARGS ?=
export VENV

bin := $(VENV)/bin
# One thread a worker (and no chatter of TensorFlow): workers that share a machine's cores otherwise fight for them.
one_thread := TF_CPP_MIN_LOG_LEVEL=2 OMP_NUM_THREADS=1 OMPI_MCA_mpi_yield_when_idle=1 TF_NUM_INTRAOP_THREADS=1 TF_NUM_INTEROP_THREADS=1

# What says most, in few seconds, about the step-by-step code that native kernels stand in for.
PLAIN := $(foreach name,one_format same_bits index_codes topk int8 payloads ops,tests/unit/test_$(name).py)

.DEFAULT_GOAL := help
.PHONY: help env train test lint format unit plain parallel image-test clean
.NOTPARALLEL:

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

env: ## the virtual environment .venv, with Horovod built against its torch and TensorFlow
	@scripts/environment.sh

train: env ## train the example on NP=2 workers; ARGS="--compression none --epochs 5" goes to it
	PATH="$(CURDIR)/$(bin):$$PATH" $(one_thread) horovodrun -np $(NP) python examples/train.py $(ARGS)

test: lint unit plain parallel ## everything that must pass: lint, unit, plain, parallel

lint: env ## ruff, mypy and the import rules of setup.cfg
	$(bin)/ruff check
	$(bin)/ruff format --check
	$(bin)/mypy
	PYTHONPATH=. $(bin)/lint-imports

format: env ## let ruff put the code in order
	$(bin)/ruff check --fix
	$(bin)/ruff format

unit: env ## the tests of one process and of the examples; ARGS="-k wire" goes to pytest
	PATH="$(CURDIR)/$(bin):$$PATH" $(bin)/pytest --ignore=tests/parallel $(ARGS)

plain: env ## the tests of the format once more, without the native kernels
	HVD_GRADCOMP_NATIVE=0 PATH="$(CURDIR)/$(bin):$$PATH" $(bin)/pytest -q $(PLAIN)

parallel: env ## tests/parallel with 2 and 4 workers, over MPI and over Gloo; ARGS="--np 2 --over gloo -- -k join"
	$(bin)/python scripts/parallel_tests.py $(ARGS)

image-test: ## build the Dockerfile and train in the image (root on Debian; not part of the tests)
	scripts/image_test.sh

clean: ## remove the environment and everything made here; Horovod's wheel stays in its cache
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	rm -f hvd_gradcomp/ops/native/_kernels*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
