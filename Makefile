PYTHON ?= python3
BIN := .venv/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test lint matrix bench failures chaos clean

.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt -e '.[demo,test]'
	touch $@

demo: .venv/.ready          ## train a small GPT under every plan and compare: a table and demo.png
	$(BIN)/python examples/demo.py

test: .venv/.ready lint     ## everything that must hold, under 15 minutes on 2 cores
	$(BIN)/python -m pytest

lint: .venv/.ready          ## style and strict types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

matrix: .venv/.ready        ## the whole equality matrix: plan x world x optimizer x model x accumulation x clip
	$(BIN)/python -m tests.conformance.matrix

bench: .venv/.ready         ## step time, memory and wire beside torch's own (root for the network namespace)
	$(BIN)/python benchmarks/step_time.py --rounds 40
	$(BIN)/python benchmarks/memory_wire.py

failures: .venv/.ready      ## every kind of failure 20 times: seconds, rank named, processes left
	$(BIN)/python benchmarks/failures.py --times 20

chaos: .venv/.ready         ## checkpoints killed, flipped, damaged, forged, on full disks; about 25 minutes (root for a mount)
	$(BIN)/python benchmarks/checkpoint_faults.py all

clean:
	rm -rf .venv .dtorch demo.png .mypy_cache .ruff_cache
