PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
DEMO   := .cache/demo
ONE_THREAD := OMP_NUM_THREADS=1 NUMBA_NUM_THREADS=1

.PHONY: setup peers demo test proof lint bench bench-cpu bench-gpu bench-quality gpu-check docs clean

setup: $(VENV)/.ready  ## a virtual environment with quantkit, its tests and the versions of constraints.txt

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

demo: setup  ## the main job on a real model: import, quantize, measure the damage, generate
	MODEL=$$($(BIN)/python tests/smollm2.py) && \
	$(BIN)/quantkit quantize $$MODEL -o $(DEMO)/smollm2-gptq --group-size 64 --overwrite && \
	$(BIN)/quantkit generate $(DEMO)/smollm2-gptq --chat "What is gravity? Answer in two sentences."

test: setup  ## the fast suite, two processes of one thread each
	$(ONE_THREAD) $(BIN)/python -m pytest -n 2 --dist worksteal

peers: .venv-peers/.ready  ## other tools that read and write the same formats, in an environment of their own

.venv-peers/.ready: tests/peers/setup.sh
	tests/peers/setup.sh .venv-peers

proof: setup peers  ## slow end-to-end proofs: the real model, the peers
	$(BIN)/python -m pytest -m proof

lint: setup  ## ruff on the tree, mypy on an installed copy (its finder does not follow package-dir)
	$(BIN)/ruff check .
	rm -rf build && $(BIN)/python -m pip install --quiet --no-deps --target build/types .
	cd build/types && ../../$(BIN)/mypy --config-file ../../pyproject.toml --python-executable ../../$(BIN)/python

bench: setup  ## speed of this machine's kernels as ratios in one run
	$(BIN)/python docs/bench/kernels.py

bench-cpu: setup peers  ## decode and prefill beside llama.cpp and transformers: make bench-cpu MODELS="q4=FOLDER q4_0=FILE.gguf" DENSE="bf16=FOLDER"
	$(BIN)/python docs/bench/cpu.py $(MODELS) --dense $(DENSE) --llama .venv-peers/bin/python

gpu-check:  ## the CUDA kernels on this machine's card: self-test, decode steps, compute-sanitizer, speed; needs torch and CuPy alone
	$(PYTHON) docs/bench/gpu.py

bench-gpu:  ## the speed of the CUDA kernels alone, on this machine's card
	$(PYTHON) docs/bench/gpu.py --benchmark-only

bench-quality: setup  ## each rung of the quality ladder on the real model: make bench-quality TEXT=c4.txt EVALUATION=wikitext-2-test.parquet
	MODEL=$$($(BIN)/python tests/smollm2.py) && $(ONE_THREAD) $(BIN)/python docs/bench/quality.py ladder $$MODEL $(TEXT) $(EVALUATION)

docs: setup  ## regenerate docs/reference from the command line, the errors and the modules
	$(BIN)/python docs/reference/generate.py

clean:
	rm -rf build .venv .venv-peers .pytest_cache .ruff_cache .mypy_cache *.egg-info
