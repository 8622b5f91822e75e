# Lockstep: set-up and the commands of every day. Bare `make` lists them.
PYTHON ?= python3
VENV ?= .venv
RECIPE ?= smoke
RANKS ?= auto
RUN_DIR ?= runs/$(RECIPE)
SET ?=
SWEEP ?=
SUITE ?= default training
JOB ?= job.yaml

# What the command line says wins over the job file.
given = $(if $(filter command environment,$(origin $(1))),$(2) $($(1)))
JOB_FLAGS = $(JOB) $(call given,RECIPE,--recipe) $(call given,NODES,--nodes) $(call given,GPUS,--gpus) \
  $(call given,IMAGE,--image) $(call given,NAME,--name) $(addprefix --set ,$(SET))

# What trains, and what tests and builds besides.
TRAIN := $(VENV)/.train
READY := $(VENV)/.ready
RUN := $(VENV)/bin/python

.DEFAULT_GOAL := help
.PHONY: help setup shell train test test-nightly test-gpu lint docs bench generate clean
.PHONY: submit-k8s submit-slurm install-k8s image image-cpu push smoke lock release

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(RUN):
	$(PYTHON) -m venv $(VENV)
	@$(RUN) -m pip install -q --upgrade "pip>=25.1"

, := ,
# INSTALL WHAT WORDS…: pip, and every ten seconds how far it is: unpacking torch takes minutes in which pip says nothing.
define install
	@echo "Installs $(1) into $(VENV)"
	@( while sleep 10; do echo "  $$(du -sh $(VENV) 2> /dev/null | cut -f1) installed"; done ) & life=$$!; \
	  trap 'kill $$life 2> /dev/null' EXIT; \
	  PYTHONWARNINGS=ignore $(RUN) -m pip install -q $(2) --config-settings=editable_mode=compat -e ".[train,k8s,slurm]"
endef

$(TRAIN): pyproject.toml | $(RUN)
	$(call install,Lockstep with PyTorch: about 5 GB with its CUDA libraries$(,) 2 minutes)
	@touch $(TRAIN)

$(READY): pyproject.toml $(TRAIN)
	$(call install,what tests$(,) lints and builds,--group dev)
	@touch $(READY)

setup: $(READY) ## create .venv and install everything (make train and make test do it by themselves)

shell: $(TRAIN) ## a shell that has .venv/bin on its path
	@PATH="$(abspath $(VENV))/bin:$$PATH" exec $${SHELL:-/bin/sh}

train: $(TRAIN) ## train RECIPE (smoke) on RANKS (a GPU each, else 2) processes, or resume it; FRESH=1 starts over; SET="epochs=2 …"
	@$(VENV)/bin/lockstep run $(RECIPE) --ranks $(RANKS) --run-dir $(RUN_DIR) $(if $(FRESH),--fresh) $(addprefix --set ,$(SET))

test: $(READY) ## unit tests, and real runs on 2 and 3 ranks; SUITE=slurm (k8s, faults, …; SUITE=list) for the others
	@$(RUN) -m tests $(SUITE)

test-nightly: $(READY) ## the long forms: GPU rehearsal, 50 random scenarios, benchmarks' programs (hours)
	@$(RUN) -m tests nightly

test-gpu: $(READY) ## what this machine's GPUs can do: a table, and whole runs on them; DATA= with CIFAR-10
	$(VENV)/bin/lockstep doctor gpu
	@$(RUN) -m tests gpu

lint: $(READY) ## ruff, mypy, hadolint, zizmor, and whether each promise has a test
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	@$(RUN) -m tests.promises > /dev/null
	$(VENV)/bin/hadolint docker/Dockerfile
	$(VENV)/bin/zizmor --offline --quiet .github

# The site's programs are installed the first time that a site is built.
DOCS := $(VENV)/.docs

$(DOCS): $(READY)
	$(RUN) -m pip install -q --group docs
	@touch $(DOCS)

docs: $(DOCS) ## build the documentation's site in build/site, and check its links and completeness; SERVE=1: on http://127.0.0.1:8000
	@$(RUN) -m docsite.stage
ifdef SERVE
	@$(VENV)/bin/zensical serve --dev-addr 127.0.0.1:8000
else
	@$(VENV)/bin/zensical build --strict
	@$(RUN) -m tests docs
endif

bench: $(TRAIN) ## time a step against torch's DDP and sgemm, a checkpoint, the metrics; GPU=1 DATA=…: steps and trainings on a GPU
ifdef GPU
	$(RUN) benchmarks/gpu.py --rounds 5 --seconds 150
	$(RUN) benchmarks/speedrun.py --seconds 300 --limit 150 --bounded --data-root $(or $(DATA),data) $(if $(BAG),--bag $(BAG)) $(if $(AIRBENCH),--airbench $(AIRBENCH))
else
	$(RUN) benchmarks/cpu_step.py
	$(RUN) benchmarks/checkpoint.py
	$(RUN) benchmarks/metrics.py
endif

generate: $(READY) ## write the files that come from the code: examples in deploy/, Kubernetes' alert rules, the settings of a Session
	$(RUN) -m docsite.reference > docs/reference/session-settings.md
	$(VENV)/bin/lockstep render k8s job.yaml > deploy/k8s/example-pytorchjob.yaml
	$(VENV)/bin/lockstep render k8s examples/rdma.yaml > deploy/k8s/example-rdma.yaml
	LOCKSTEP_HOME=/shared/lockstep $(VENV)/bin/lockstep render slurm job.yaml --profile gpu-cluster --gpus 4 \
	  --set slurm.python=/shared/venv/bin/python --set run_dir=/shared/runs/smoke \
	  --set cpus=32 --set memory=256Gi > deploy/slurm/example.sbatch
	@cd deploy/observability && { sed '/^spec:/q' kubernetes/rules.yaml; sed -n '/^groups:/,$$p' prometheus/rules.yaml | sed '/./s/^/  /'; } > build.tmp \
	  && mv build.tmp kubernetes/rules.yaml

submit-k8s: $(TRAIN) ## submit to Kubernetes: NODES=2 GPUS=4 [RECIPE= IMAGE= NAMESPACE= NAME= JOB=job.yaml]; takes the image of `make push`
	@image=; test -n "$(IMAGE)" || image=$$($(RUN) docker/pushed.py find $(TAG) $(JOB) $(addprefix gpus=,$(GPUS)) $(SET)) || exit; \
	  $(VENV)/bin/lockstep submit k8s $(JOB_FLAGS) $(call given,NAMESPACE,--namespace) $$image

submit-slurm: $(TRAIN) ## submit to SLURM: NODES=2 GPUS=4 [RECIPE= NAME= PROFILE=gpu-cluster SWEEP="lr=0.1,0.2" JOB=job.yaml]
	@$(VENV)/bin/lockstep submit slurm $(JOB_FLAGS) $(call given,PROFILE,--profile) $(addprefix --sweep ,$(SWEEP))

CLAIMS = Claims of the base keep their access mode: kubectl delete pvc -n lockstep lockstep-runs lockstep-data deletes them with what they hold; then try again

install-k8s: ## namespace, rights, volumes, NetworkPolicy; OVERLAY=overlays/single-node or overlays/full for more
	kubectl apply -k deploy/k8s/$(or $(OVERLAY),base) $(if $(filter %single-node,$(OVERLAY)),|| { echo "$(CLAIMS)" >&2; exit 1; })

# Images: docs/containers.md; docker/bake.hcl reads these variables. IMAGE is a name without a tag; the tag is the revision.
NAME_ := $(or $(IMAGE),lockstep)
TAG = $(shell git describe --always --dirty --abbrev=12 --exclude '*' 2>/dev/null || echo unknown)
# The folder of WHEELS and the files of secrets may lie anywhere: whoever calls make has named them.
# Names that many environments have count where this command line gives them.
typed = $(if $(filter command,$(origin $(1))),$($(1)),$(2))
BAKE = IMAGE=$(NAME_) TAG=$(TAG) REVISION=$(shell git rev-parse HEAD 2>/dev/null || echo unknown) TARGET=$(call typed,TARGET) \
  SOURCE=$(call typed,SOURCE,unknown) BUILDX_BAKE_ENTITLEMENTS_FS=0 docker buildx bake -f docker/bake.hcl --load $(BUILD_FLAGS)

image: ## build the CUDA image NAME:REVISION; IMAGE=registry/name BASE_IMAGE= WHEELS= CA= PIP_CONF= BUILD_FLAGS=
	$(BAKE) cuda

image-cpu: ## build the CPU image NAME:cpu, NAME:REVISION-cpu; same variables
	$(BAKE) cpu

push: ## push what image and image-cpu built of this revision: IMAGE=registry/name; prints the digests, and notes them for submit-k8s
	@test -n "$(IMAGE)" || { echo "error: say where to: make push IMAGE=registry/name" >&2; exit 2; }
	@$(PYTHON) docker/pushed.py push $(IMAGE) $(TAG)

smoke: image-cpu ## train in containers, check accuracy and metrics, leave nothing: NODES=2 RANKS=2 TIMEOUT=seconds
	@$(PYTHON) docker/smoke.py --image $(NAME_):cpu --nodes $(or $(NODES),2) --ranks $(if $(filter auto,$(RANKS)),2,$(RANKS)) \
	  --set "$(SET)" $(if $(OUT),--out $(OUT)) $(if $(ACCURACY),--accuracy $(ACCURACY)) $(if $(TIMEOUT),--timeout $(TIMEOUT)) $(if $(PROMETHEUS_IMAGE),--prometheus-image $(PROMETHEUS_IMAGE))

# uv resolves for the images' Python, not for this one. LOCK_FLAGS="--upgrade" takes newer versions.
LOCK = $(VENV)/bin/uv pip compile --quiet pyproject.toml --extra train --extra slurm --extra cloud --generate-hashes --no-emit-index-url \
  --python-version 3.11 --python-platform x86_64-manylinux_2_28 --custom-compile-command "make lock" $(LOCK_FLAGS)
CPU_WHEELS ?= https://download.pytorch.org/whl/cpu/torch/

lock: $(READY) ## resolve docker/requirements-*.txt anew, with hashes; CPU_WHEELS= a page or folder with torch's +cpu builds
	$(LOCK) -o docker/requirements-cuda.txt
	$(LOCK) --excludes docker/excluded-cpu.txt -c docker/cpu.txt --find-links $(CPU_WHEELS) -o docker/requirements-cpu.txt

release: $(READY) ## build dist/: wheel, sdist, schema, notes of the version
	@test -z "$$(git status --porcelain)" || { echo "error: the working tree has changes, and a release has none: commit them" >&2; exit 2; }
	@rm -rf dist && $(VENV)/bin/uv build --quiet
	@$(VENV)/bin/lockstep schema > dist/job.schema.json
	@awk '/^## \[/ {inside = ++sections == 1; next} inside' CHANGELOG.md > dist/NOTES.md
	@ls dist

clean: ## remove caches; runs/, data/ and .venv stay
	rm -rf .pytest_cache .ruff_cache .mypy_cache .hypothesis *.egg-info
	find . -name __pycache__ -not -path "./.venv/*" -prune -exec rm -rf {} +
