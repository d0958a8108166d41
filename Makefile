PYTHON ?= python3
BIN := .venv/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-long lint matrix bench failures chaos clean
.PHONY: bench-loose bench-exchange bench-link bench-gpu soak

.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt -e '.[demo,test]'
	touch $@

demo: .venv/.ready          ## train a small GPT under every plan and compare: a table and demo.png
	$(BIN)/python examples/demo.py

test: .venv/.ready lint     ## everything that must hold, under 12 minutes on 2 quiet cores
	$(BIN)/python -m pytest

test-long: .venv/.ready     ## more kills, ranks, hosts and sabotages than `make test` has time for; about fifteen minutes
	$(BIN)/python -m pytest -m long

lint: .venv/.ready          ## style and strict types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

matrix: .venv/.ready        ## the whole equality matrix: plan x world x optimizer x model x accumulation x clip
	$(BIN)/python -m tests.conformance.matrix

bench: .venv/.ready         ## step time beside every peer, how cost grows, memory and wire; README's figures (root for a network namespace)
	$(BIN)/python -m benchmarks.bench --rounds 40
	$(BIN)/python -m benchmarks.figures
	$(BIN)/python benchmarks/memory_wire.py

failures: .venv/.ready      ## every kind of failure 20 times: seconds, rank named, processes left
	$(BIN)/python benchmarks/failures.py --times 20

bench-exchange: .venv/.ready ## the exchange alone beside gloo, Open MPI, DeepSpeed and memcpy (needs mpirun and mpicc)
	$(BIN)/python -m benchmarks.exchange --rounds 40

bench-loose: .venv/.ready    ## servers, wires and replicas that step alone: staleness, bytes by the interface, convergence (root for a namespace)
	$(BIN)/python -m benchmarks.staleness
	$(BIN)/python -m benchmarks.server_faults
	$(BIN)/python -m benchmarks.wire_bytes
	$(BIN)/python -m benchmarks.convergence
	$(BIN)/python -m benchmarks.convergence --plans ddp 'diloco(every=100)' --seeds 5 --steps 2000

OUT ?= .
bench-gpu:                  ## on a machine with a GPU and torch: every GPU script, results in OUT; about half an hour
	for script in gpu gpu_memory gpu_precision gpu_checkpoint gpu_train gpu_nccl gpu_pull gpu_tax; do \
		PYTHONPATH=src:. $(PYTHON) benchmarks/$$script.py $(OUT) || exit 1; done

bench-link: .venv/.ready      ## training over a slow link beside torch's own and torchft: seconds and bytes; half an hour (root for network namespaces; steps: benchmarks/link_steps.py, on a GPU)
	$(BIN)/python -m benchmarks.slow_link

soak: .venv/.ready          ## shared memory: 1,000 kills, 20 stops, 10 million exchanges, limits; about an hour
	$(BIN)/python -m benchmarks.shared_faults --limits --stops 20 --kills 1000 --soak 10000000

chaos: .venv/.ready         ## checkpoints killed, flipped, damaged, forged, on full disks; about 25 minutes (root for a mount)
	$(BIN)/python benchmarks/checkpoint_faults.py all

clean:
	rm -rf .venv .peers .dtorch demo.png .mypy_cache .ruff_cache
