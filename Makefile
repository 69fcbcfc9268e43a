# Mayfly: every door is a target here, one line each over the `mayfly` command. `make help` lists them.
SHELL := /bin/bash
# What setup leaves without bytecode gets it when it is first imported, and not never.
unexport PYTHONDONTWRITEBYTECODE
.DEFAULT_GOAL := help
.PHONY: help setup setup-dev lint test test-unit test-molecule test-ec2 test-network test-e2e test-all bench bench-staging bench-input bench-scaling \
        bench-deploy bench-memory bench-ddp bench-engines bench-launchers bench-preprocess bench-killpoints bench-recipes bench-faults soak docs docs-check \
        goldens build check plan deploy status destroy verify-clean gc local-up local-down local-status clean

BIN := .venv/bin
# Make variables become flags, so they win over the job file and the environment.
flag = $(if $(strip $($(1))),--$(2) '$(strip $($(1)))')
FLAGS = $(if $(JOB),'$(JOB)') $(call flag,CLOUD,cloud) $(call flag,WORKERS,workers) $(call flag,PS,ps) \
        $(call flag,MODE,mode) $(call flag,STEPS,steps) $(call flag,ENGINE,engine) $(call flag,BUCKET,bucket) \
        $(call flag,REGION,region) $(call flag,IMAGE,image) $(call flag,BUDGET,budget) $(call flag,NAME,name) \
        $(call flag,PRICES,prices) $(call flag,INVENTORY,inventory) $(foreach pair,$(SET),--set '$(pair)')
SWITCHES = $(if $(filter-out 0,$(YES)),--yes) $(if $(filter-out 0,$(JSON)),--json) \
           $(if $(filter-out 0,$(KEEP)),--keep) $(if $(filter-out 0,$(DRY_RUN)),--dry-run) $(if $(filter-out 0,$(DEBUG)),--debug)
TESTENV := $(BIN)/python tests/testenv.py

help: ## List the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):[^#]*## (.*)/  \1\t\2/' | expand -t 18
	@echo; echo "Variables of deploy and plan: CLOUD WORKERS PS MODE STEPS ENGINE BUCKET REGION IMAGE BUDGET PRICES INVENTORY NAME JOB SET JSON YES KEEP DRY_RUN DEBUG"

setup: ## Make the Python environment (.venv); deploy does it by itself
	@scripts/setup.sh

setup-dev: ## The same with the tools for tests and linting
	@scripts/setup.sh dev

deploy: setup ## Run a job to its end: make deploy CLOUD=local WORKERS=2
	@$(BIN)/mayfly deploy $(FLAGS) $(SWITCHES)

check: setup ## Say what CLOUD=… needs and what of it is missing, and who you are there
	@$(BIN)/mayfly check $(call flag,CLOUD,cloud) $(filter --json --debug,$(SWITCHES))

plan: setup ## Show what deploy would make, and write the rendered RADL
	@$(BIN)/mayfly plan $(FLAGS) $(filter --json --debug --dry-run,$(SWITCHES))

status: setup ## Show the latest run, or RUN=<id>
	@$(BIN)/mayfly status $(RUN) $(filter --json,$(SWITCHES))

destroy: setup ## Destroy the latest run's nodes, or RUN=<id>
	@$(BIN)/mayfly destroy $(RUN) $(filter --json,$(SWITCHES))

verify-clean: setup ## Prove that nothing of the latest run is left, or of RUN=<id>
	@$(BIN)/mayfly verify-clean $(RUN) $(filter --json,$(SWITCHES))

gc: setup ## Find leftovers of runs on CLOUD=…, and remove them (asks, or YES=1)
	@$(BIN)/mayfly gc $(call flag,CLOUD,cloud) $(call flag,REGION,region) $(filter --json --yes,$(SWITCHES))

local-up: setup ## Start what CLOUD=local needs: Docker Engine, node image, S3 server, IM service
	@$(BIN)/mayfly local up $(filter --json,$(SWITCHES))

local-down: setup ## Remove every trace of CLOUD=local
	@$(BIN)/mayfly local down $(filter --json,$(SWITCHES))

local-status: setup ## Show what of CLOUD=local is running
	@$(BIN)/mayfly local status $(filter --json,$(SWITCHES))

lint: setup-dev ## ruff, mypy, yamllint, ansible-lint
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/yamllint -s .
	PATH="$(CURDIR)/$(BIN):$$PATH" ANSIBLE_HOME="$(CURDIR)/.ansible" $(BIN)/ansible-lint --offline

# Three at a time also on two cores: much of a test is waiting for the processes that it started.
test-unit: setup-dev ## Unit, golden and contract tests: minutes, no service
	$(BIN)/pytest -q -n 3 --dist loadfile tests/unit tests/golden tests/contract

test-molecule: setup-dev ## Each role's default scenario on the node image
	$(TESTENV) $(BIN)/python tests/molecule/run.py

test-ec2: setup-dev ## AWS against a fake EC2, with kill points, in a network without a way out
	$(TESTENV) $(BIN)/python tests/fake_ec2/prepare.py
	$(TESTENV) $(BIN)/python tests/fake_ec2/alone.py $(BIN)/pytest -q tests/fake_ec2

test-network: setup-dev ## Preflight and recipes on machines in network namespaces, which fail
	$(TESTENV) $(BIN)/pytest -q tests/network

test-e2e: setup-dev ## The main job from S3 to S3, and its essential failures
	$(TESTENV) $(BIN)/pytest -q -x -m "not slow" --durations=20 --durations-min=20 tests/e2e

# The node image is made while whatever needs no nodes runs: the one waits for downloads, the others for IM and for faults.
test: setup-dev ## Everything that guards main (about an hour on 2 cores)
	@mkdir -p build; $(TESTENV) $(BIN)/mayfly local up >build/test-local-up.log 2>&1 & \
	up=$$!; $(MAKE) --no-print-directory -j2 lint test-unit && $(MAKE) --no-print-directory -j2 -Otarget test-ec2 test-network; rc=$$?; \
	wait $$up || { cat build/test-local-up.log; rc=1; }; \
	if [ $$rc = 0 ]; then $(MAKE) --no-print-directory test-molecule test-e2e; rc=$$?; fi; \
	$(TESTENV) $(BIN)/mayfly local down || rc=1; exit $$rc

test-all: ## test, and every variant and slow case; all parts run, whichever fail
	@rc=0; $(MAKE) --no-print-directory -k lint test-unit || rc=1; $(TESTENV) $(BIN)/python tests/molecule/run.py --all || rc=1; \
	$(MAKE) --no-print-directory -k test-ec2 test-network || rc=1; \
	$(TESTENV) $(BIN)/pytest -q --durations=20 --durations-min=20 tests/e2e || rc=1; \
	$(TESTENV) $(BIN)/mayfly local down || rc=1; exit $$rc

bench: setup-dev ## Medians of the main job's phases over RUNS=3 runs, as JSON
	@$(TESTENV) $(BIN)/python tests/bench/main_job.py $(RUNS)

bench-staging: setup-dev ## S3 → HDFS beside the old way and the limits, RUNS=5, FILES=5, MIB=64 each
	@$(TESTENV) $(BIN)/python tests/bench/staging.py $(call flag,FILES,files) $(call flag,MIB,mib) $(RUNS)

bench-input: setup-dev ## Training fed from HDFS beside training fed from memory, RUNS=5
	@$(TESTENV) $(BIN)/python tests/bench/input.py $(RUNS)

bench-scaling: setup-dev ## 1 PS + 2 trainers, async and sync, beside one trainer, RUNS=5
	@$(TESTENV) $(BIN)/python tests/bench/scaling.py $(RUNS)

bench-deploy: setup-dev ## create → first step beside the old way, RUNS=3, and a bar chart in build/
	@$(TESTENV) $(BIN)/python tests/bench/deploy.py $(RUNS)

bench-memory: setup-dev ## Peak memory of HDFS daemons, IM service and mayfly during a main job
	@$(TESTENV) $(BIN)/python tests/bench/memory.py

bench-ddp: setup-dev ## PyTorch DDP on one and two nodes of one core, RUNS=3
	@$(TESTENV) $(BIN)/python tests/bench/ddp.py $(RUNS)

bench-engines: setup-dev ## Each engine with one worker and with two, one core each, RUNS=3, NETWORK=cnn or deep, BATCH=128; BESIDE=NAME=VALUE: two workers with a variable, too; TABLE=1: Horovod on 1, 2 and 4, 24 epochs
	@$(TESTENV) $(BIN)/python tests/bench/engines.py $(call flag,NETWORK,network) $(call flag,BATCH,batch) $(call flag,BESIDE,beside) $(if $(filter-out 0,$(TABLE)),--table,$(RUNS))

bench-recipes: setup-dev ## Recipes on this machine's processes beside raw Dask; AWS_* and MAYFLY_BENCH_BUCKET for S3
	@$(BIN)/python tests/bench/recipes.py

bench-faults: setup-dev ## N=40 random faults over a recipe of 500 tasks, in network namespaces; needs root
	@$(BIN)/python tests/bench/faults_recipes.py

bench-preprocess: setup-dev ## Preprocessing by one node beside all nodes together, RUNS=5
	@$(TESTENV) $(BIN)/python tests/bench/preprocess.py $(RUNS)

bench-launchers: setup-dev ## Horovod and torchrun as Mayfly starts them beside their own launchers, RUNS=5
	@$(TESTENV) $(BIN)/python tests/bench/launchers.py $(RUNS)

bench-killpoints: setup-dev ## Somebody is killed at N=10 random points of runs in a fake EC2, SEED=1: what is left?
	@$(TESTENV) $(BIN)/python tests/fake_ec2/prepare.py
	@$(TESTENV) $(BIN)/python tests/fake_ec2/alone.py $(BIN)/python tests/bench/killpoints.py N=$(or $(N),10) SEED=$(or $(SEED),1)

soak: setup-dev ## RUNS=20 short runs in a row: what grows without end?
	@$(TESTENV) $(BIN)/python tests/bench/soak.py $(RUNS)

goldens: setup-dev ## Record the rendered texts again (read the diff before you commit it)
	MAYFLY_UPDATE_GOLDENS=1 $(BIN)/pytest -q tests/golden

docs: setup-dev ## Generate the roles' README from their argument specs
	@for role in roles/*/; do $(BIN)/aar-doc $$role markdown >/dev/null || exit 1; done

docs-check: docs ## Fail when a generated page is out of date
	git diff --exit-code -- 'roles/*/README.md'

build: setup ## Build the collection tarball
	@$(BIN)/python -m mayfly.collection

clean: ## Remove what can be made again (not the state of local: see local-down)
	rm -rf build dist .venv .ansible .mypy_cache .ruff_cache .pytest_cache
