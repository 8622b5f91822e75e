# Lockstep: set-up and the commands of every day. Bare `make` lists them.
PYTHON ?= python3
VENV ?= .venv
RECIPE ?= smoke
RANKS ?= auto
RUN_DIR ?= runs/$(RECIPE)
SET ?=
JOB ?= job.yaml
CRDS := https://raw.githubusercontent.com/kubeflow

# What the command line says wins over the job file.
given = $(if $(filter command environment,$(origin $(1))),$(2) $($(1)))
K8S_FLAGS = $(JOB) $(call given,RECIPE,--recipe) $(call given,NODES,--nodes) $(call given,GPUS,--gpus) \
  $(call given,IMAGE,--image) $(call given,NAMESPACE,--namespace) $(call given,NAME,--name) $(addprefix --set ,$(SET))

READY := $(VENV)/.ready
RUN := $(VENV)/bin/python

.DEFAULT_GOAL := help
.PHONY: help setup train test test-k8s test-prometheus test-faults test-faults-long lint bench clean
.PHONY: submit-k8s render-k8s install-k8s example-k8s rules-k8s crds

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(READY): pyproject.toml
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install -q --upgrade "pip>=25.1"
	$(RUN) -m pip install -q --group dev -e .
	@touch $(READY)

setup: $(READY) ## create .venv and install everything (make train and make test do it by themselves)

train: $(READY) ## train RECIPE (smoke) on RANKS (a GPU each, else 2) processes, or resume it; FRESH=1 starts over; SET="epochs=2 …"
	@$(VENV)/bin/lockstep run $(RECIPE) --ranks $(RANKS) --run-dir $(RUN_DIR) $(if $(FRESH),--fresh) $(addprefix --set ,$(SET))

test: $(READY) ## unit tests, and real runs on 2 and 3 ranks: needs no cluster and no root
	$(RUN) -m pytest tests/unit tests/dist tests/jobs

test-k8s: $(READY) ## Kubernetes: manifests, and an API server and operator emulated over real sockets
	$(RUN) -m pytest tests/kubernetes

test-prometheus: $(READY) ## metrics under a real Prometheus, and report.html in a real Chromium
	$(RUN) -m pytest tests/prometheus tests/report

test-faults: $(READY) ## kill, corrupt and starve real runs (5 random scenarios)
	$(RUN) -m pytest tests/faults

test-faults-long: $(READY) ## the same with 50 random scenarios
	LOCKSTEP_SCENARIOS=50 $(RUN) -m pytest tests/faults

submit-k8s: $(READY) ## submit a PyTorchJob: NODES=2 GPUS=4 [RECIPE= IMAGE= NAMESPACE= NAME= JOB=job.yaml]
	@$(VENV)/bin/lockstep submit k8s $(K8S_FLAGS)

render-k8s: $(READY) ## print what submit-k8s would apply, same variables
	@$(VENV)/bin/lockstep render k8s $(K8S_FLAGS)

install-k8s: ## namespace, rights, volumes, NetworkPolicy; OVERLAY=overlays/single-node or overlays/full for more
	kubectl apply -k deploy/k8s/$(or $(OVERLAY),base)

example-k8s: $(READY) ## write deploy/k8s/example-pytorchjob.yaml and job.schema.json anew
	$(VENV)/bin/lockstep render k8s job.yaml -o deploy/k8s/example-pytorchjob.yaml
	$(VENV)/bin/lockstep schema > job.schema.json

rules-k8s: $(READY) ## write deploy/observability/kubernetes/rules.yaml anew from prometheus/rules.yaml
	@cd deploy/observability && { sed '/^spec:/q' kubernetes/rules.yaml; sed -n '/^groups:/,$$p' prometheus/rules.yaml | sed '/./s/^/  /'; } > build.tmp \
	  && mv build.tmp kubernetes/rules.yaml

crds: ## fetch the CRDs that the manifest tests validate against
	mkdir -p build/crds
	curl -fsSL -o build/crds/pytorchjob_crd.yaml $(CRDS)/trainer/release-1.9/manifests/base/crds/kubeflow.org_pytorchjobs.yaml
	curl -fsSL -o build/crds/trainjob_crd.yaml $(CRDS)/trainer/master/manifests/base/crds/trainer.kubeflow.org_trainjobs.yaml

lint: $(READY) ## ruff and mypy
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

bench: $(READY) ## time a training step on this machine's CPU against torch's DDP and sgemm, a checkpoint, and the metrics
	$(RUN) benchmarks/cpu_step.py
	$(RUN) benchmarks/checkpoint.py
	$(RUN) benchmarks/metrics.py

clean: ## remove caches; runs/, data/ and .venv stay
	rm -rf .pytest_cache .ruff_cache .mypy_cache .hypothesis *.egg-info
	find . -name __pycache__ -not -path "./.venv/*" -prune -exec rm -rf {} +
