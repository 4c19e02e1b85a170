# Two commands matter: `make demo` and `make test`. Each makes the environment that it needs; `make help` lists all.

PYTHON ?= python3
VENV ?= .venv

# The tested set, used unless PYTHON has a torch already. Another set: make test VENV=.venv-other TRITON=3.6.0
TORCH ?= 2.13.0
TRITON ?= 3.7.1
FBGEMM ?= 1.8.0
NUMPY ?= numpy
# Meta's fork of Triton, in an environment of its own because it installs the package triton
TRITON_FORK ?= fbtriton==3.7.4
TLX_VENV ?= .venv-tlx
# Package index to take torch from, such as https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
# A TorchRec release to install for the tests of torchrec_integration: make test TORCHREC=1.9.2 adds them to the others
TORCHREC ?=
TORCHREC_DEFAULT := 1.9.2

DEMO_ARGS ?=
BENCH_ARGS ?=
RECORD_ARGS ?=
# Which of the three: plain interpreter compile
SUITES ?=
PYTEST_ARGS ?=

# A version asked for by name means an environment of its own, whatever PYTHON has.
ASKED := $(filter-out file,$(foreach name,TORCH TRITON NUMPY,$(origin $(name))))

RUN := $(VENV)/bin/python
ENVIRONMENT = $(PYTHON) tools/environment.py $(VENV) $(1) \
	--pin torch==$(TORCH) --pin triton==$(TRITON) --pin '$(NUMPY)' \
	$(if $(FBGEMM),--pin fbgemm-gpu-cpu==$(FBGEMM)) $(if $(TORCHREC),--pin torchrec==$(TORCHREC)) \
	$(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX)) $(if $(ASKED),--own)
TEST_ENVIRONMENT = $(call ENVIRONMENT,test bench $(if $(TORCHREC),torchrec) $(if $(FBGEMM),--if-reachable parity))

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo demo-torchrec test test-torchrec tlx-env test-tlx b200 test-triton36 test-newest lint typecheck format \
	bench bench-tiny bench-occupancy compile-all gpu-record sanitize \
	info clean

help:  ## list the commands
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1|/p' $(MAKEFILE_LIST) | while IFS='|' read -r name text; \
		do printf '  make %-16s %s\n' "$$name" "$$text"; done

demo:  ## train on MovieLens-100K, through fbtriton and through torch.nn.EmbeddingBag; DEMO_ARGS=--quick
	@$(call ENVIRONMENT,demo)
	$(RUN) examples/movielens.py $(DEMO_ARGS)

demo-torchrec:  ## the same with TorchRec's engine on two processes, with either kernel; DEMO_ARGS='--steps 100'
ifeq ($(TORCHREC),)
	@$(MAKE) --no-print-directory demo-torchrec TORCHREC=$(TORCHREC_DEFAULT)
else
	@$(call ENVIRONMENT,demo torchrec parity)
	$(RUN) examples/torchrec_dlrm.py --kernel both $(DEMO_ARGS)
endif

test:  ## run the tests: plain, interpreter and compile; SUITES=plain PYTEST_ARGS='-k sgd'
	@$(TEST_ENVIRONMENT)
	@$(RUN) tools/run_tests.py $(SUITES) $(PYTEST_ARGS)

test-torchrec:  ## only the tests of torchrec_integration, and its example; TORCHREC=1.8.0
ifeq ($(TORCHREC),)
	@$(MAKE) --no-print-directory test-torchrec TORCHREC=$(TORCHREC_DEFAULT)
else
	@$(call ENVIRONMENT,demo torchrec parity)
	@$(TEST_ENVIRONMENT)
	@$(RUN) tools/run_tests.py plain -k torchrec --dist loadfile $(PYTEST_ARGS)
endif

test-triton36:  ## the interpreter and compile tests on the oldest Triton
	@$(MAKE) --no-print-directory test VENV=.venv-triton36 TORCH=2.13.0 TRITON=3.6.0 NUMPY='numpy<2.4' FBGEMM= \
		SUITES="interpreter compile"

tlx-env:  ## an environment with Meta's fork of Triton, which has TLX, in Triton's place
	@$(PYTHON) tools/environment.py $(TLX_VENV) test bench --pin torch==$(TORCH) --pin '$(NUMPY)' \
		--triton-fork $(TRITON_FORK) $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX)) $(if $(ASKED),--own)

test-tlx: tlx-env  ## the tests of the kernels that use TLX, in that environment
	@$(TLX_VENV)/bin/python tools/run_tests.py $(or $(SUITES),plain interpreter compile) tests/test_tlx.py \
		tests/test_tlx_protocol.py tests/test_tlx_compile.py $(PYTEST_ARGS)

b200: test-tlx  ## on a Blackwell GPU: those tests, long runs in every variant, all workloads; see bench/b200.md
	$(TLX_VENV)/bin/python -m bench fused --json bench/results/fused.json
	$(TLX_VENV)/bin/python -m bench run $(or $(BENCH_ARGS),--provider fbtriton --provider fbgemm)

test-newest:  ## the plain and interpreter tests on the newest torch, Triton and FBGEMM (5.5 GB)
	@$(MAKE) --no-print-directory test VENV=.venv-newest TORCH=2.14.1 TRITON=3.8.0 FBGEMM=1.9.0 \
		SUITES="plain interpreter"

lint:  ## ruff and mypy
	@$(TEST_ENVIRONMENT)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

typecheck:  ## only mypy
	@$(TEST_ENVIRONMENT)
	$(RUN) -m mypy

format:  ## let ruff mend what it can
	@$(TEST_ENVIRONMENT)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

bench:  ## measure on the GPU, beside FBGEMM where it is installed; BENCH_ARGS='--workload mlperf-dlrmv2 --quick'
	@$(call ENVIRONMENT,bench)
	$(RUN) -m bench run $(BENCH_ARGS)

bench-tiny:  ## the benchmark at tiny sizes, without a GPU
	@$(call ENVIRONMENT,bench)
	$(RUN) -m bench run --workload 'tiny*' --quick

bench-occupancy:  ## registers, spills and resident warps of every kernel that the benchmark launches, without a GPU
	@$(call ENVIRONMENT,bench)
	$(RUN) -m bench occupancy $(BENCH_ARGS)

compile-all:  ## compile every kernel variant for every GPU (hours on two cores)
	@$(TEST_ENVIRONMENT)
	@$(RUN) tools/run_tests.py compile --compile-all $(PYTEST_ARGS)

gpu-record:  ## on a GPU: all tests, parity with FBGEMM and the demo, into bench/results/; RECORD_ARGS=...
	@$(TEST_ENVIRONMENT)
	@$(call ENVIRONMENT,demo)
	@$(RUN) tools/gpu_record.py $(RECORD_ARGS)

sanitize:  ## on a GPU: tests under compute-sanitizer; PYTEST_ARGS='tests/test_operator.py -k test_dims'
	@$(TEST_ENVIRONMENT)
	@$(RUN) tools/sanitize.py $(or $(PYTEST_ARGS),tests/test_tlx.py -k lengths)

info:  ## print the versions in use and the routes taken
	@$(TEST_ENVIRONMENT)
	@$(RUN) -m fbtriton info

clean:  ## remove caches and builds; environments stay
	rm -rf build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name '.venv*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
