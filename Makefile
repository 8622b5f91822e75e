# Lockstep: set-up and the commands of every day. Bare `make` lists them.
PYTHON ?= python3
VENV ?= .venv
RECIPE ?= smoke
RANKS ?= auto
RUN_DIR ?= runs/$(RECIPE)
SET ?=
SWEEP ?=
# Test processes at once: two more than cores of a small machine, as they also wait.
WORKERS ?= 4
JOB ?= job.yaml

# What the command line says wins over the job file.
given = $(if $(filter command environment,$(origin $(1))),$(2) $($(1)))
JOB_FLAGS = $(JOB) $(call given,RECIPE,--recipe) $(call given,NODES,--nodes) $(call given,GPUS,--gpus) \
  $(call given,IMAGE,--image) $(call given,NAME,--name) $(addprefix --set ,$(SET))
K8S_FLAGS = $(JOB_FLAGS) $(call given,NAMESPACE,--namespace)
SLURM_FLAGS = $(JOB_FLAGS) $(call given,PROFILE,--profile) $(addprefix --sweep ,$(SWEEP))

READY := $(VENV)/.ready
RUN := $(VENV)/bin/python

.DEFAULT_GOAL := help
.PHONY: help shell setup train test test-gpu coverage test-fast lint bench bench-gpu clean
.PHONY: test-exercises test-gpu-rehearsal test-floors test-own test-sync test-k8s test-prometheus test-faults test-nightly
.PHONY: test-packaging
.PHONY: submit-k8s render-k8s install-k8s example-k8s rules-k8s crds schema
.PHONY: submit-slurm render-slurm example-slurm test-slurm
.PHONY: docs docs-serve docs-pictures
.PHONY: image image-cpu push smoke lock submit-compose render-compose test-containers test-image-cuda

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-22s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(READY): pyproject.toml
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install -q --upgrade "pip>=25.1"
	PYTHONWARNINGS=ignore $(RUN) -m pip install -q --group dev --config-settings=editable_mode=compat -e ".[train,k8s,slurm]"
	@touch $(READY)

setup: $(READY) ## create .venv and install everything (make train and make test do it by themselves)

shell: setup ## a shell that has .venv/bin on its path
	@PATH="$(abspath $(VENV))/bin:$$PATH" exec $${SHELL:-/bin/sh}

train: $(READY) ## train RECIPE (smoke) on RANKS (a GPU each, else 2) processes, or resume it; FRESH=1 starts over; SET="epochs=2 …"
	@$(VENV)/bin/lockstep run $(RECIPE) --ranks $(RANKS) --run-dir $(RUN_DIR) $(if $(FRESH),--fresh) $(addprefix --set ,$(SET))

# Shared out by tests/sharing.py.
TEST = -m pytest -p tests.sharing -n $(WORKERS) --dist loadscope tests/training tests/jobs tests/unit -m "not containers"

test: $(READY) ## unit tests, and real runs on 2 and 3 ranks: needs no cluster and no root
	$(RUN) $(TEST)

coverage: $(READY) ## make test, and the lines that it covers; takes half as long again
	@rm -f .coverage .coverage.*
	$(RUN) -m coverage run $(TEST)
	@$(RUN) -m coverage combine -q && $(RUN) -m coverage report

test-fast: $(READY) ## for every change: unit tests, and one real run on two ranks (a minute)
	$(RUN) -m pytest -n $(WORKERS) --dist loadscope tests/unit tests/training/test_launching.py::test_two_ranks_under_lockstep_run

test-sync: $(READY) ## gradient sync in scripts of one's own; runs under mpiexec (Open MPI), torchrun and mp.spawn, killed and resumed
	$(RUN) -m pytest -n $(WORKERS) --dist loadscope tests/sync

test-own: $(READY) ## loops of one's own (lockstep.Session): the plain loop's weights, kills, signals (LOCKSTEP_SCENARIOS=50 for all)
	$(RUN) -m pytest -n $(WORKERS) tests/own

test-k8s: $(READY) ## Kubernetes: manifests, and an API server and operator emulated over real sockets
	$(RUN) -m pytest -n $(WORKERS) --dist loadscope tests/kubernetes

test-slurm: $(READY) ## a real SLURM of two nodes on this machine, with and without accounting (root; Debian: slurm-wlm slurmdbd mariadb-server munge)
	$(RUN) -m pytest tests/slurm

test-prometheus: $(READY) ## metrics under a real Prometheus, and report.html in a real Chromium
	$(RUN) -m pytest tests/prometheus tests/report

test-faults: $(READY) ## kill, corrupt and starve real runs (5 random scenarios)
	$(RUN) -m pytest -n $(WORKERS) --dist loadscope tests/faults

test-floors: $(READY) ## what dispatching needs, in the lowest versions that pyproject.toml allows (skips without a package index)
	$(RUN) -m pytest tests/floors -rs

test-packaging: $(READY) ## the wheel and the sdist, without torch and beside one; the example of CONTRIBUTING.md (needs a package index)
	$(RUN) -m pytest -n $(WORKERS) --dist loadscope tests/packaging -rs

test-exercises: $(READY) ## the systems of docs/exercises.md: recipes, collectives, toy, benchmarks as programs
	$(RUN) -m pytest -n $(WORKERS) --dist worksteal tests/exercises

test-gpu-rehearsal: $(READY) ## the GPU path over a stand-in for CUDA and NCCL, its six main cases (g++, torch's CUDA build)
	$(RUN) -m pytest -n $(WORKERS) tests/gpu_rehearsal -m smoke

test-nightly: $(READY) ## the whole GPU rehearsal, 50 random scenarios, 300 pairs of starts with --fresh, the mutants
	@code=0; set -x; \
	$(RUN) -m pytest -n $(WORKERS) --dist loadscope tests/gpu_rehearsal || code=1; \
	LOCKSTEP_SCENARIOS=50 LOCKSTEP_FRESH=300 $(RUN) -m pytest -n $(WORKERS) --dist loadscope \
	  tests/faults/test_scenarios.py tests/faults/test_open_doors.py tests/own/test_session_resume.py || code=1; \
	$(RUN) -m tests.mutants --check-clean || code=1; \
	exit $$code

test-gpu: $(READY) ## what this machine's GPUs can do, in five minutes: one table, and a file in benchmarks/results; DATA= with CIFAR-10
	$(VENV)/bin/lockstep doctor gpu --out benchmarks/results --data-root $(or $(DATA),data)

submit-k8s: $(READY) ## submit a PyTorchJob: NODES=2 GPUS=4 [RECIPE= IMAGE= NAMESPACE= NAME= JOB=job.yaml]
	@$(VENV)/bin/lockstep submit k8s $(K8S_FLAGS)

render-k8s: $(READY) ## print what submit-k8s would apply, same variables
	@$(VENV)/bin/lockstep render k8s $(K8S_FLAGS)

submit-slurm: $(READY) ## submit to SLURM: NODES=2 GPUS=4 [RECIPE= NAME= PROFILE=gpu-cluster SWEEP="lr=0.1,0.2" JOB=job.yaml]
	@$(VENV)/bin/lockstep submit slurm $(SLURM_FLAGS)

render-slurm: $(READY) ## print the batch script that submit-slurm would send, same variables
	@$(VENV)/bin/lockstep render slurm $(SLURM_FLAGS)

example-slurm: $(READY) ## write deploy/slurm/example.sbatch and job.schema.json anew
	LOCKSTEP_HOME=/shared/lockstep $(VENV)/bin/lockstep render slurm job.yaml --profile gpu-cluster --gpus 4 \
	  --set slurm.python=/shared/venv/bin/python --set run_dir=/shared/runs/smoke \
	  --set cpus=32 --set memory=256Gi -o deploy/slurm/example.sbatch
	$(VENV)/bin/lockstep schema > job.schema.json

install-k8s: ## namespace, rights, volumes, NetworkPolicy; OVERLAY=overlays/single-node or overlays/full for more
	kubectl apply -k deploy/k8s/$(or $(OVERLAY),base)

example-k8s: $(READY) ## write deploy/k8s/example-pytorchjob.yaml and job.schema.json anew
	$(VENV)/bin/lockstep render k8s job.yaml -o deploy/k8s/example-pytorchjob.yaml
	$(VENV)/bin/lockstep schema > job.schema.json

schema: $(READY) ## write job.schema.json and recipe.schema.json anew, which editors read
	$(VENV)/bin/lockstep schema > job.schema.json
	$(RUN) -m lockstep.training settings --schema > recipe.schema.json

rules-k8s: $(READY) ## write deploy/observability/kubernetes/rules.yaml anew from prometheus/rules.yaml
	@cd deploy/observability && { sed '/^spec:/q' kubernetes/rules.yaml; sed -n '/^groups:/,$$p' prometheus/rules.yaml | sed '/./s/^/  /'; } > build.tmp \
	  && mv build.tmp kubernetes/rules.yaml

# Images: docs/containers.md. IMAGE is a name without a tag; the tag is the revision.
NAME_ := $(or $(IMAGE),lockstep)
TAG = $(shell git describe --always --dirty --abbrev=12 --exclude '*' 2>/dev/null || echo unknown)
# The locks are resolved for x86-64, so the images are: elsewhere the engine emulates it.
PLATFORM ?= linux/amd64
ARGUMENTS = --platform $(PLATFORM) $(if $(BASE_IMAGE),--build-arg BASE_IMAGE=$(BASE_IMAGE)) \
  --build-arg REVISION=$(shell git rev-parse HEAD 2>/dev/null || echo unknown) --build-arg VERSION=$(TAG) \
  --build-arg SOURCE=$(or $(SOURCE),unknown)
MOUNTED = $(if $(WHEELS),--build-context wheels=$(WHEELS) --build-arg PIP_NO_INDEX=1) \
  $(if $(CA),--secret id=ca$(,)src=$(CA)) $(if $(PIP_CONF),--secret id=pip$(,)src=$(PIP_CONF))
# Without BuildKit: no mounts, no stage that only they read, and no stage behind the one that is wanted.
PLAIN = sed -e '/^FROM scratch AS wheels$$/d' -e 's/--mount=[^ ]* *//g' -e '/^ *\\$$/d'
ifeq ($(BUILDKIT),0)
build = $(if $(strip $(MOUNTED)),@echo "error: WHEELS$(,) CA and PIP_CONF need BuildKit: leave out BUILDKIT=0$(,) or name a mirror (docs/containers.md)" >&2; exit 2,$(PLAIN) \
  $(1) | DOCKER_BUILDKIT=0 docker build -f - --target runtime $(ARGUMENTS))
else
build = DOCKER_BUILDKIT=1 docker build -f $(1) $(ARGUMENTS) $(MOUNTED)
endif
, := ,

image: ## build the CUDA image NAME:REVISION; IMAGE=registry/name BASE_IMAGE= WHEELS= CA= PIP_CONF= BUILD_FLAGS= BUILDKIT=0
	$(call build,docker/Dockerfile) $(BUILD_FLAGS) -t $(NAME_):$(TAG) -t $(NAME_):latest .

image-cpu: ## build the CPU image NAME:cpu, NAME:REVISION-cpu; same variables
	$(call build,docker/Dockerfile.cpu) $(BUILD_FLAGS) -t $(NAME_):$(TAG)-cpu -t $(NAME_):cpu .

push: ## push what image and image-cpu built of this revision: IMAGE=registry/name; prints the digests
	@test -n "$(IMAGE)" || { echo "error: say where to: make push IMAGE=registry/name" >&2; exit 2; }
	@found=; for tag in $(TAG) $(TAG)-cpu; do docker image inspect $(IMAGE):$$tag > /dev/null 2>&1 || continue; \
	  found=1; docker push $(IMAGE):$$tag && docker image inspect --format '{{index .RepoDigests 0}}' $(IMAGE):$$tag || exit 1; done; \
	  test -n "$$found" || { echo "error: there is no $(IMAGE):$(TAG) yet: make image IMAGE=$(IMAGE)" >&2; exit 2; }

smoke: image-cpu ## train in containers, check accuracy and metrics, leave nothing: NODES=2 RANKS=2
	@$(PYTHON) docker/smoke.py --image $(NAME_):cpu --nodes $(or $(NODES),2) --ranks $(if $(filter auto,$(RANKS)),2,$(RANKS)) \
	  --set "$(SET)" $(if $(OUT),--out $(OUT)) $(if $(ACCURACY),--accuracy $(ACCURACY)) $(if $(PROMETHEUS_IMAGE),--prometheus-image $(PROMETHEUS_IMAGE))

submit-compose: $(READY) ## submit to this machine's container engine: JOB=job.yaml [RECIPE= NODES= GPUS= IMAGE= NAME= SET=]
	@$(VENV)/bin/lockstep submit compose $(JOB_FLAGS)

render-compose: $(READY) ## print the Compose file that submit-compose would start, same variables
	@$(VENV)/bin/lockstep render compose $(JOB_FLAGS)

test-containers: $(READY) ## real containers: images, make smoke, kills, hardening (docker; 10 minutes on 2 cores)
	$(RUN) -m pytest tests/containers tests/jobs -m "containers and not cuda_image"

test-image-cuda: $(READY) ## build the CUDA image and look into it (gigabytes)
	$(RUN) -m pytest tests/containers -m cuda_image -s

# uv resolves for the images' Python, not for this one. LOCK_FLAGS="--upgrade" takes newer versions.
LOCK = $(VENV)/bin/uv pip compile --quiet pyproject.toml --extra train --extra slurm --excludes docker/excluded.txt --generate-hashes --no-emit-index-url \
  --python-version 3.11 --python-platform x86_64-manylinux_2_28 --custom-compile-command "make lock" $(LOCK_FLAGS)
CPU_WHEELS ?= https://download.pytorch.org/whl/cpu/torch/

lock: $(READY) ## resolve docker/requirements-*.txt anew, with hashes; CPU_WHEELS= a page or folder with torch's +cpu builds
	$(LOCK) -o docker/requirements-cuda.txt
	$(LOCK) --excludes docker/excluded-cpu.txt -c docker/cpu.txt --find-links $(CPU_WHEELS) -o docker/requirements-cpu.txt

crds: $(READY) ## write tests/kubernetes/crds/*.json anew: what the manifest tests validate against, from pinned upstream revisions
	$(RUN) tests/kubernetes/crds/strip.py

lint: $(READY) ## ruff, mypy, hadolint and the word list
	$(RUN) -m ruff check . # of itself it takes a folder dist for something that was built
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(RUN) -m tests.words
	$(VENV)/bin/hadolint docker/Dockerfile docker/Dockerfile.cpu

# The site's programs are installed the first time that a site is built.
DOCS := $(VENV)/.docs
MKDOCS = DISABLE_MKDOCS_2_WARNING=true PYTHONPATH=$(CURDIR) $(RUN) -m mkdocs

$(DOCS): $(READY)
	$(RUN) -m pip install -q --group docs
	@touch $(DOCS)

docs: $(DOCS) ## build the documentation's site in build/site, strictly, and check its links, sizes and completeness
	@$(RUN) -m docsite.stage
	@$(MKDOCS) build --quiet --strict -f build/docs/mkdocs.yml
	@$(RUN) -m docsite.check
	@$(RUN) -m pytest -q tests/docs

docs-serve: $(DOCS) ## the site on http://127.0.0.1:8000, built anew whenever a page changes
	@$(RUN) -m docsite.stage
	@$(MKDOCS) serve -f build/docs/mkdocs.yml -w docs -w README.md

docs-pictures: $(READY) ## make the pictures of README and docs anew: drawings, report, terminal (chromium)
	$(RUN) -m docsite.pictures

bench: $(READY) ## time a training step on this machine's CPU against torch's DDP and sgemm, a checkpoint, and the metrics
	$(RUN) benchmarks/cpu_step.py
	$(RUN) benchmarks/checkpoint.py
	$(RUN) benchmarks/metrics.py

bench-gpu: $(READY) ## ten minutes on one GPU: steps, profile, projection, trainings: DATA=… [BAG=… AIRBENCH=… HIVERGE=…: checkouts]
	$(RUN) benchmarks/gpu.py --data-root $(or $(DATA),data) $(if $(BAG),--bag $(BAG)) $(if $(AIRBENCH),--airbench $(AIRBENCH)) $(if $(HIVERGE),--hiverge $(HIVERGE))

clean: ## remove caches; runs/, data/ and .venv stay
	rm -rf .pytest_cache .ruff_cache .mypy_cache .hypothesis *.egg-info
	find . -name __pycache__ -not -path "./.venv/*" -prune -exec rm -rf {} +
