# The two commands of the README are `make train` and `make test`. Both install what they need.

# Ranks of `make train`, and more options for the program: make train ARGS='--epochs 1'
NPROC ?= 2
ARGS ?=

OUT ?= runs/fashion-mnist

.PHONY: help train test format lint unit docs schedules clean

help:
	@echo 'make train      train a classifier on NPROC=$(NPROC) processes; ARGS goes to the program'
	@echo 'make test       formatting, lints, documentation, and all tests'
	@echo 'make schedules  draw docs/schedules anew'
	@echo 'make clean      remove everything that was built; runs are kept'

train:
	cargo build --release --locked -p drumline-launch -p fashion-mnist
	data=$$(sh examples/fashion-mnist/fetch-data.sh) && \
	target/release/drumline run --nproc-per-node $(NPROC) \
	    target/release/fashion-mnist --data "$$data" --out $(OUT) $(ARGS)

test: format lint docs unit

format:
	cargo fmt --all --check

lint:
	cargo clippy --locked --workspace --all-targets -- -D warnings

docs:
	RUSTDOCFLAGS='-D warnings' cargo doc --locked --workspace --no-deps --document-private-items --quiet

unit:
	cargo test --locked --workspace

schedules:
	cargo run --locked -p drumline-schedule --example draw

clean:
	cargo clean
