# The one front door. Every target sets up what it needs by itself.
.DEFAULT_GOAL := help
PY := .venv/bin/python

.PHONY: help setup setup-bench tools demo check test e2e-laptop bench docs clean

help: ## show this list
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

setup: ## make .venv and install what the lock file pins
	@.ci/setup

setup-bench:
	@.ci/setup bench

tools: ## build the servers and the file-system testers that the tests use
	@tests/tools/build_tools.sh

demo: setup ## train on digits kept in an embedded S3, through a mount
	@$(PY) examples/digits/demo.py

check: setup ## lint, types, layers, spelling, packaging
	@$(PY) tests/run_tiers.py check

test: setup-bench tools ## every tier, as root and as a plain user; prints which ran
	@$(PY) tests/run_tiers.py

e2e-laptop: setup-bench tools ## only the laptop tier
	@$(PY) tests/run_tiers.py e2e-laptop e2e-laptop-plain

bench: setup-bench tools ## time W1 to W12 beside other tools and local disk; BENCH='--only W1 --short' for less
	@.ci/apt s3fs rclone
	@$(PY) -m bench $(BENCH)

docs: setup ## write docs/reference and the CRD anew from the code
	@$(PY) -m datastore.api.crd
	@$(PY) -m datastore.api.reference

clean: ## remove what was built
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
