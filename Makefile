# The two commands of the README are `make train` and `make test`. Both install what they need.

# Ranks of `make train`, and more options for the program: make train ARGS='--epochs 1'
NPROC ?= 2
ARGS ?=

OUT ?= runs/fashion-mnist

.PHONY: help train test format lint unit model docs bench soak nightly schedules simulate torch torch-venv clean

# What is tested beside the defaults.
FEATURES := --features drumline/ndarray

# Rounds of `make bench`, and which of its sections: make bench ROUNDS=1 ONLY=imb,links
ROUNDS ?= 5
ONLY ?=

# Seeds of `make soak`.
SEEDS ?= 0..100000

help:
	@echo 'make train      train a classifier on NPROC=$(NPROC) processes; ARGS goes to the program'
	@echo 'make test       formatting, lints, documentation, and all tests'
	@echo 'make bench      measure beside MPI and gloo, ten minutes; writes the tables of docs/performance.md'
	@echo 'make soak       what takes long: 100,000 simulated jobs, hundreds of kills, every resume'
	@echo 'make nightly    every case of the conformance suite, with every size: hours'
	@echo 'make schedules  draw docs/schedules anew'
	@echo 'make simulate   measure this machine, and write what replays say beside it'
	@echo 'make torch-venv install torch, so that the tests of the stores talk with it'
	@echo 'make clean      remove everything that was built; runs are kept'

train:
	cargo build --release --locked -p drumline-launch -p fashion-mnist
	data=$$(sh examples/fashion-mnist/fetch-data.sh) && \
	target/release/drumline run --nproc-per-node $(NPROC) \
	    target/release/fashion-mnist --data "$$data" --out $(OUT) $(ARGS)

test: format lint docs torch unit model

format:
	cargo fmt --all --check

lint:
	cargo clippy --locked --workspace --all-targets $(FEATURES) -- -D warnings

docs:
	RUSTDOCFLAGS='-D warnings' cargo doc --locked --workspace $(FEATURES) --no-deps --document-private-items --quiet

unit:
	cargo test --locked --workspace $(FEATURES)

# The protocol of flags and doorbells, in every interleaving that the memory model allows.
model:
	RUSTFLAGS='--cfg loom' cargo test --locked --release -p drumline-shm --test loom \
	    --target-dir target/loom

# Peers that cannot be installed are left out, and it says so.
bench: torch
	cargo build --release --locked -p drumline-launch
	cargo build --release --locked -p drumline --examples
	$(PYTHON) -m unittest discover --quiet --start-directory bench
	$(PYTHON) bench/bench.py --rounds $(ROUNDS) --only '$(ONLY)' --page docs/performance.md

soak:
	cargo build --locked -p drumline-launch
	cargo test --locked -p drumline --features soak --test deaths -- --nocapture
	cargo test --locked -p drumline --lib -- --ignored
	cargo test --locked -p drumline-shm --test processes a_million -- --ignored
	cargo test --locked -p drumline-kernels -- --ignored
	cargo test --locked -p fashion-mnist --features soak --test resume
	cargo run --locked --release -p drumline-sim -- --seeds $(SEEDS)

nightly:
	cargo test --locked -p drumline-conformance --features nightly

schedules:
	cargo run --locked -p drumline-schedule --example draw

# The last section of the page is made anew.
simulate:
	cargo build --locked --release -p drumline-launch
	target/release/drumline simulate --check > target/simulate.txt
	{ sed '/^<!-- measured -->/q' docs/simulate.md; printf '%s, %s\n\n```text\n' \
	    "$$(date +%F)" "$$(git rev-parse --short HEAD)"; cat target/simulate.txt; echo '```'; } \
	    > target/simulate.md
	mv target/simulate.md docs/simulate.md

# A real torch for the tests that talk with one; without it they say that they were skipped. They
# need no GPU, but the default index has torch with CUDA, 5 GB. torch's own has one of 1 GB:
# make torch-venv PIP_ARGS='--index-url https://download.pytorch.org/whl/cpu'
TORCH ?= torch==2.15.0
PYTHON ?= python3
PIP_ARGS ?=

torch-venv: target/torch-venv/installed

# The other tests do not need it.
torch:
	-timeout 240 $(MAKE) torch-venv PIP_ARGS='--retries 1 --timeout 20 $(PIP_ARGS)'

target/torch-venv/installed:
	$(PYTHON) -m venv target/torch-venv
	target/torch-venv/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) '$(TORCH)' numpy
	target/torch-venv/bin/python -c 'import torch.distributed; assert torch.distributed.is_available()'
	touch $@

clean:
	cargo clean
