# The door to everything. `make` alone lists the targets.

CARGO ?= cargo
ROUNDS ?= 20
N ?= 40
FROM ?= 0
TIMES ?= 10

.PHONY: help build demo dev test verify fix bench torture sim mutants hostile s3 docs clean

help: ## Lists the targets.
	@grep -E '^[a-z0-9]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

build: ## Builds all programs (debug).
	$(CARGO) build --workspace --bins

demo: build ## Shows in under 30 s what Leasehold does, on a real three-node cluster.
	target/debug/demo

dev: build ## Starts a local three-node cluster; stop it with Ctrl-C.
	target/debug/leaseholdd dev

test: build ## Runs all tests.
	$(CARGO) test --workspace

verify: ## The gate: format, lints, tests, docs. Changes nothing.
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	$(CARGO) clippy --workspace --all-targets --features leasehold-bench/s3 -- -D warnings
	$(MAKE) test
	RUSTDOCFLAGS='-D warnings' $(CARGO) doc --workspace --no-deps

fix: ## Formats, and applies what clippy can mend by itself.
	$(CARGO) clippy --workspace --all-targets --fix --allow-dirty --allow-staged
	$(CARGO) fmt --all

bench: ## Measures load, latency and failover of a release build.
	$(CARGO) build --workspace --bins --release
	target/release/bench smoke --json target/bench.json

torture: build ## Kills leaders under contention, ROUNDS=20 times, and checks G1-G5 and G7.
	LEASEHOLD_ROUNDS=$(ROUNDS) $(CARGO) test --workspace --test contention -- --nocapture

sim: ## Runs N=40 simulated clusters from seed FROM=0 on, or the one of SEED.
	$(CARGO) test -p leasehold-sim --test sim -- \
		$(if $(SEED),--seed $(SEED),--from $(FROM) --seeds $(N))

mutants: build ## Plants faults, one at a time, or ONLY=a,b, and shows which test notices each.
	target/debug/mutants $(if $(ONLY),--only $(ONLY)) $(if $(EACH),--each)

hostile: ## Mutates frames, logs and snapshots TIMES=10 times as often as the tests do, from SEED=1.
	HOSTILE_TIMES=$(TIMES) HOSTILE_SEED=$(or $(SEED),1) WAL_IMAGES_TIMES=$(TIMES) \
		$(CARGO) test --workspace --test hostile --test hostile_peers --test wal_images -- --nocapture
	HOSTILE_TIMES=$(TIMES) HOSTILE_SEED=$(or $(SEED),1) \
		$(CARGO) test --workspace --lib hostile -- --nocapture

s3: ## Builds with object stores, and tests backups in one that runs here.
	$(CARGO) build --workspace --bins --features leasehold-bench/s3
	$(CARGO) test --workspace --features leasehold-bench/s3 --test identity -- s3::

docs: ## Builds the API documentation.
	$(CARGO) doc --workspace --no-deps

clean: ## Removes what was built.
	$(CARGO) clean
