# The one front door. Every target sets up what it needs by itself.
.DEFAULT_GOAL := help
PY := .venv/bin/python

.PHONY: help setup setup-all setup-bench setup-frameworks e2e-training e2e-nfs setup-ssh setup-glusterfs setup-examples tools cluster-tools demo check test long e2e-laptop e2e-cluster e2e-models cluster-up cluster-down image bench soak mutants docs proto clean

help: ## show this list
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 25

setup: ## make .venv and install what the lock file pins
	@.ci/setup

setup-bench:
	@.ci/setup bench

tools: ## build the servers and the file-system testers that the tests use
	@tests/tools/build_tools.sh

cluster-tools: ## build Kubernetes for the test cluster (about ten minutes the first time)
	@tests/cluster/build.sh

demo: setup ## train on digits kept in an embedded S3, through a mount
	@$(PY) examples/digits/demo.py

check: setup ## lint, types, layers, spelling, packaging
	@$(PY) tests/run_tiers.py check

# Downloads take most of the time on a fresh machine, so three of these run at once.
test: ## every tier, as root and as a plain user; prints which ran
	@$(MAKE) --no-print-directory -j3 setup-all
	@$(PY) tests/run_tiers.py

setup-all: cluster-tools tools setup-frameworks setup-ssh setup-glusterfs setup-examples

long: setup-bench setup-ssh tools cluster-tools ## hours: fsx of 100,000 operations (20,000 over NFS and SFTP), the soak of 20 minutes, 100 kills, Kubernetes' own tests; LONG=TIER for one
	@$(PY) tests/run_tiers.py --long $(LONG)

e2e-laptop: setup-bench setup-examples tools ## only the laptop tier
	@$(PY) tests/run_tiers.py e2e-laptop e2e-laptop-plain

setup-frameworks:
	@.ci/setup bench frameworks
	@.ci/apt openmpi-bin python3-mpi4py python3-torch podman runc busybox-static
	@.ci/mxnet

e2e-training: setup-frameworks tools cluster-tools ## only the tiers of TrainingJobs, with the real frameworks
	@$(PY) tests/run_tiers.py training training-plain training-cluster

setup-examples:
	@command -v go >/dev/null || .ci/apt golang
	@command -v mvn >/dev/null && command -v javac >/dev/null || .ci/apt maven default-jdk-headless

setup-ssh:
	@.ci/apt openssh-client openssh-server

setup-glusterfs:
	@.ci/apt glusterfs-server glusterfs-client

e2e-nfs: setup setup-ssh setup-glusterfs tools ## only the tiers of NFS exports (a real NFS host in a guest), GlusterFS (a real glusterd) and SFTP (a real sshd)
	@$(PY) tests/run_tiers.py nfs nfs-exports nfs-libnfs glusterfs sftp sftp-plain

e2e-cluster: setup tools cluster-tools ## only the cluster's tiers: on a node of its own, or on KUBECONFIG's cluster
	@$(PY) tests/run_tiers.py e2e-cluster-crowd e2e-cluster-moves e2e-cluster-api e2e-cluster-apart e2e-cluster

e2e-models: setup tools cluster-tools ## only the tier of models on a node of its own
	@$(PY) tests/run_tiers.py e2e-models

cluster-up: setup cluster-tools ## start a real Kubernetes of one node; NAME=... for another one, UP=--api-only for no node, UP="--nodes 2"
	@$(PY) -m tests.cluster --name $(or $(NAME),e2e) up $(UP)

cluster-down: ## end it and remove what it wrote
	@$(PY) -m tests.cluster --name $(or $(NAME),e2e) down

image: setup cluster-tools ## build the image from the Dockerfile, without a registry of images
	@$(PY) -m tests.cluster.image

bench: setup-bench tools ## time the workloads of docs/BENCH.md beside other tools and local disk; BENCH='--only W1 --short' for less
	@.ci/apt s3fs rclone
	@$(PY) -m bench $(BENCH)

soak: setup-bench tools ## hours of mixed work in 20 minutes while things die; SOAK='--seconds 300' for less
	@$(PY) -m tests.soak --out bench/results/soak $(SOAK)

mutants: setup ## make small changes of the engine, one at a time, for half an hour, and show those that no unit test notices; MUTANTS='--seconds 600' for less
	@$(PY) -m tests.mutants $(MUTANTS)

docs: setup ## write docs/reference, the CRD and the chart anew from the code
	@$(PY) -m datastore.api.crd
	@$(PY) -m datastore.api.reference docs/reference
	@$(PY) -m datastore.manifests.chartwriter

proto: setup ## generate csi/spec/*_pb2* anew from the .proto files
	@$(PY) -m grpc_tools.protoc -I . --python_out=. --pyi_out=. --grpc_python_out=. $(addprefix datastore/csi/spec/,csi.proto pluginregistration.proto)

clean: ## remove what was built
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
