# make demo | test | test-fast | test-PACKAGE | check | docs | bench | gpu | faults | fmt: each makes .venv first, when it is missing or stale.
#
#   ARGS='...'          goes to the demo, to pytest, to the benchmarks or to the faults
#   JOBS=1              runs so many tests at once; as many as there are cores by default, and for `make test` two more,
#                       since many wait for processes of theirs. Each worker imports what its tests do
#   PYTHON=python3.12   the Python to take, instead of the first one that fits
#   TORCH_INDEX=URL     where torch comes from, instead of the choice below
#
# Kept to what GNU make 3.81 understands, the one that macOS has.

ARGS ?=
JOBS ?=
PYTHON ?=
TORCH_INDEX ?=
TORCH_CPU_INDEX = https://download.pytorch.org/whl/cpu

PYTHONS = $(if $(PYTHON),$(PYTHON),python3 python3.14 python3.13 python3.12 python3.11 python)
FITS = import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))

# Scripts in a .venv contain its path, so one that was copied or moved from elsewhere does not work here.
HERE = $(shell .venv/bin/python -c "" 2>/dev/null && cat .venv/.place 2>/dev/null)
AGAIN = $(if $(filter-out x$(CURDIR),x$(HERE)),again)

PARTS = test-ingest test-replay test-learner test-serving test-anabranch
FAST = not process and not services and not slow and not browser and not gpu
# A thread for each worker: torch's pools of all workers would wait for each other's cores.
# Bytecode is written, whatever the environment says: each worker, and each process that a test starts, reads it.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} .venv/bin/python -m pytest --dist worksteal
# Tests write thousands of small files and wait for each to be on the disk: in memory, where there is a GB for each worker.
IN_MEMORY = TMPDIR=$${TMPDIR:-$$(df -Pk /dev/shm 2>/dev/null | \
	awk -v workers="$(1)" 'NR == 2 && $$4 > 1000000 * workers {print "/dev/shm"}')} \
	$(PYTEST) -o tmp_path_retention_policy=failed -n "$(1)"
CORES = $$(getconf _NPROCESSORS_ONLN)
# A test that takes more than a second is printed: it may lack the marker `slow`.
PYTEST_FAST = $(call IN_MEMORY,$(or $(JOBS),$(CORES))) -m '$(FAST)' --durations=10 --durations-min=1

.NOTPARALLEL:
.PHONY: help demo test test-fast $(PARTS) check docs bench gpu faults fmt screenshot clean again

help:
	@echo "make demo    the whole pipeline on this machine, with embedded parts and real data"
	@echo "make test    every test"
	@echo "make test-fast    those that start no process, need no service and are not slow, in a minute"
	@echo "make test-ingest  those of one package: also test-replay, test-learner, test-serving, test-anabranch"
	@echo "make check   lint, format, types, import layers and words"
	@echo "make docs    the docs site, into site/"
	@echo "make bench   every benchmark and the faults, in their quick forms; it prints how long each takes"
	@echo "make gpu     on a CUDA device: its tests and each of its figures in ten minutes, and which targets are met"
	@echo "make faults  what kills, malformed messages and overload cost, in its long form"
	@echo "make fmt     format the code"
	@echo "make screenshot   the README's pictures of the dashboard, from a demo of two minutes; needs Chromium"
	@echo "make clean   remove .venv and what the tools leave behind"

demo: .venv/.demo
	@.venv/bin/anabranch demo $(ARGS)

test: .venv/.dev
	@$(call IN_MEMORY,$(or $(JOBS),$$(($(CORES) + 2)))) $(ARGS)

test-fast: .venv/.dev
	@$(PYTEST_FAST) $(ARGS)

$(PARTS): test-%: .venv/.dev
	@$(PYTEST_FAST) tests/$* $(ARGS)

check: .venv/.dev
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy
	.venv/bin/lint-imports
	.venv/bin/python tools/check_words.py

# A link or an anchor that leads nowhere makes it fail. The variable silences a notice about the theme's successor.
docs: .venv/.dev
	@NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --strict
	@echo "the docs are in $(CURDIR)/site/index.html; search needs a server: .venv/bin/python -m mkdocs serve"

bench: .venv/.dev
	@.venv/bin/python -m benchmarks --quick $(ARGS)

gpu: .venv/.dev
	@.venv/bin/python -m benchmarks.gpu --tests --minutes 10 --save $(ARGS)

faults: .venv/.dev
	@.venv/bin/python -m tests.faults $(ARGS)

fmt: .venv/.dev
	.venv/bin/ruff check --fix
	.venv/bin/ruff format

screenshot: .venv/.dev
	@.venv/bin/python -m tools.dashboard_screenshots docs/images

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist site *.egg-info

# .demo holds what the demo needs, .dev everything.
.venv/.demo: WHAT = -e '.[embedded]'
.venv/.dev: WHAT = -e '.[all]' --group dev
.venv/.demo .venv/.dev: pyproject.toml constraints.txt $(AGAIN)
	@set -eu; say() { printf '%s\n' "anabranch: $$*" >&2; }; \
	if [ "$$(cat .venv/.place 2>/dev/null)" != "$(CURDIR)" ] || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then \
	  chosen=; bare=; \
	  for python in $(PYTHONS); do \
	    "$$python" -c '$(FITS)' >/dev/null 2>&1 || continue; \
	    if "$$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then chosen=$$python; break; fi; \
	    [ -n "$$bare" ] || bare=$$python; \
	  done; \
	  if [ -z "$$chosen" ] && [ -n "$$bare" ]; then \
	    say "$$bare has no venv module; install it (Debian and Ubuntu: apt install python3-venv), then run make again"; exit 1; \
	  elif [ -z "$$chosen" ]; then \
	    say "needs Python 3.11 to 3.14, and none of these is one: $(PYTHONS); install one, or name it with PYTHON=..."; exit 1; \
	  fi; \
	  say "making .venv with $$("$$chosen" -c 'import sys; print(sys.executable, sys.version.split()[0])')"; \
	  "$$chosen" -m venv --clear .venv; \
	  printf '%s\n' "$(CURDIR)" > .venv/.place; \
	fi; \
	pip() { .venv/bin/python -m pip --disable-pip-version-check "$$@"; }; \
	torch=$$(grep '^torch==' constraints.txt); \
	if [ -n "$(TORCH_INDEX)" ]; then \
	  say "installing $$torch from $(TORCH_INDEX)"; \
	  pip install --no-deps --force-reinstall --index-url "$(TORCH_INDEX)" "$$torch"; \
	elif pip install -q --dry-run --no-index --no-deps "$$torch" >/dev/null 2>&1; then \
	  pip install -q --no-index --no-deps "$$torch"; \
	elif [ "$$(uname -s)" = Linux ] && [ ! -e /dev/nvidia0 ] && ! command -v nvidia-smi >/dev/null; then \
	  say "installing $$torch for the CPU, since there is no NVIDIA device (TORCH_INDEX=URL takes another build)"; \
	  pip install --no-deps --extra-index-url "$(TORCH_CPU_INDEX)" "$$torch"; \
	  .venv/bin/python -c 'import importlib.metadata as m, sys; sys.exit("+cpu" not in m.version("torch"))' || \
	    say "$(TORCH_CPU_INDEX) has not answered: this torch brings CUDA libraries of several gigabytes"; \
	fi; \
	pip install -h | grep -q -- --group || pip install -q 'pip>=25.1'; \
	say "installing $(WHAT) and what it needs (about a minute)"; \
	pip install -q -c constraints.txt $(WHAT)
	@touch .venv/.demo $@
