# Lists the targets: make help
SHELL := /bin/bash
.DELETE_ON_ERROR:
export GOTOOLCHAIN := local
# One set of flags for every build: a different set would compile Kubernetes again.
export GOFLAGS := -trimpath
export CGO_ENABLED := 0

LAB := go run ./e2e/lab
RUN := go test -count=1

# What is missing is one line before anything runs.
ifneq ($(filter-out help,$(MAKECMDGOALS)),)
MISSING := $(shell .ci/needs $(MAKECMDGOALS))
$(if $(MISSING),$(error $(MISSING)))
endif

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@printf '%s\n' '' 'The first run on a machine compiles Kubernetes from source. On two cores, make demo' \
	  'takes about 9 minutes, and make lab after it another 8; both together use 8 GB in the' \
	  'caches of Go and Spillway. Later, make demo starts in seconds.' \
	  '' \
	  'KUBERNETES=1.36 make demo runs that version in all clusters, KUBERNETES=1.35,1.37 the' \
	  'first in rome and the second in the others; make test and go test run API servers of the' \
	  'first. Each older version is compiled when it is first asked for, which takes minutes.'

.PHONY: generate
generate: ## Generate deepcopy code, CRDs and the OpenAPI document from the API types, and the table of the chart's policies
	@gen=$$($(LAB) program controller-gen) && \
	"$$gen" object paths=./broker/api/... && \
	.ci/crds "$$gen" charts/broker/crds
	@for crd in charts/agent/crds/*.yaml; do cp "charts/broker/crds/$$(basename "$$crd")" "$$crd"; done
	@gofmt -w broker/api
	@go generate ./broker/protocol ./charts

.PHONY: verify
verify: ## Check formatting, generated files, go.mod files, go vet and staticcheck
	@.ci/verify

.PHONY: test
test: ## Run unit and integration tests, RACE=1 with the race detector (without docker)
	@RACE=$(RACE) .ci/test

.PHONY: test-postgres
test-postgres: ## Test the broker's history with a PostgreSQL of its own, version 15 or newer
	@POSTGRES=$$(.ci/postgres) $(RUN) -tags postgres -run '^TestPostgreSQL$$' -timeout 10m ./broker/internal/history/database

.PHONY: demo
demo: ## Show pods overflow between four clusters that run as local processes (without docker)
	@$(LAB) program etcd kube-apiserver kube-controller-manager render >/dev/null
	@$(LAB) run ./e2e/playground demo

.PHONY: skew
skew: ## Run the demo with older versions of Kubernetes in rome, in the other clusters, and in all; the first run compiles them, which takes minutes (without docker)
	@$(LAB) run ./e2e/playground skew

.PHONY: bench
bench: ## Run all benchmarks, or NAME=<name> only (go run ./e2e/bench -list lists the names)
	@go run ./e2e/bench -name=$(NAME)

SCHEDULES ?= 10000
.PHONY: sim
sim: ## Simulate faults in broker and agents: SCHEDULES runs, and planted faults that must be found, or one with SEED (without docker)
	@go run ./e2e/simulation $(if $(filter command,$(origin SEED)),-seed=$(SEED),-schedules=$(SCHEDULES)) $(if $(filter command,$(origin PLANT)),-plant=$(PLANT))

.PHONY: soak
soak: ## Let guests take held places and run while other pods compete for them, with and without placeholders (without docker)
	@go run ./agent/internal/bench -name=soak

OPERATIONS ?= 2000
KILLS ?= 20
.PHONY: histories
histories: ## Kill and stop real brokers KILLS times during OPERATIONS operations, and check what the clusters saw (without docker)
	@$(RUN) -v -timeout 60m ./e2e/histories -operations=$(OPERATIONS) -kills=$(KILLS)

.PHONY: test-page
test-page: ## Test the broker's page in a headless Chromium; PICTURES=1 writes the pictures of the documents (without docker)
	@PICTURES=$(PICTURES) $(RUN) -v -tags e2e -timeout 25m ./e2e/page

.PHONY: images
images: ## Build the container images as archives and print their paths
	@$(LAB) images

.PHONY: lab
lab: ## Create the kind clusters hub, rome, paris and berlin with Liqo and Spillway (DRIVER=direct: Spillway peers without it)
	@$(LAB) up $(DRIVER)

.PHONY: lab-down
lab-down: ## Remove the lab: containers, network, routes, and dockerd if the lab started it
	@$(LAB) down

.PHONY: e2e
e2e: ## Run the scenarios on the lab: with driver direct what needs kubelets, then all with Liqo; DRIVER=liqo or direct: all with that (as root; creates the lab if needed, and then removes it)
	@.ci/e2e

# What the targets below act on: a chart, in the cluster of kubectl's current context.
CHART ?= agent
NAMESPACE ?= spillway-system
ARGS ?=

PROGRAMS := spillway-broker:broker spillway-agent:agent spillway-scheduler:scheduler-plugin spillway-virtual-node:virtual-node kubectl-spillway:agent/kubectl-spillway
BIN := bin
# Flags of build-prod.
PROD :=

.PHONY: build
build: ## Build Spillway's programs: bin/spillway-broker, -agent, -scheduler and -virtual-node, and the plugin bin/kubectl-spillway
	@for program in $(PROGRAMS); do \
	  go build $(PROD) -o "$(BIN)/$${program%%:*}" "./$${program##*:}" && echo "$(BIN)/$${program%%:*}" || exit 1; \
	done
	@cp agent/kubectl-spillway/kubectl_complete-spillway "$(BIN)/"

.PHONY: build-prod
build-prod: PROD := -ldflags='-s -w' -buildvcs=true
build-prod: build ## Build the same without symbols, static as all, with the commit in them: go version -m bin/spillway-broker

.PHONY: install
install: ## Create or update the CRDs of CHART (agent or broker) in kubectl's current cluster
	@[ -d charts/$(CHART)/crds ] || { echo "make install: CHART=$(CHART) is not one of the charts: set agent or broker" >&2; exit 1; }
	@kubectl=$$($(LAB) program kubectl) && "$$kubectl" apply --server-side --force-conflicts -f charts/$(CHART)/crds

.PHONY: uninstall
uninstall: ## Delete the CRDs of CHART there, unless there are objects of these kinds (both charts share some)
	@kubectl=$$($(LAB) program kubectl) && \
	for kind in $$("$$kubectl" get --ignore-not-found -f charts/$(CHART)/crds -o jsonpath='{.items[*].metadata.name} {.metadata.name}'); do \
	  objects=$$("$$kubectl" get "$$kind" -A -o name) || exit 1; \
	  if [ -n "$$objects" ]; then echo "make uninstall: delete these first, while the programs run that complete their deletion:" "$$objects" >&2; exit 1; fi; \
	done; "$$kubectl" delete --ignore-not-found -f charts/$(CHART)/crds

.PHONY: deploy
deploy: install ## Install or upgrade CHART there with helm, with values such as ARGS="--set clusterID=rome …"
	@helm=$$($(LAB) program helm) && "$$helm" upgrade --install spillway-$(CHART) charts/$(CHART) \
	  --namespace $(NAMESPACE) --create-namespace --reset-then-reuse-values $(ARGS)

.PHONY: undeploy
undeploy: ## Uninstall CHART there; its CRDs and their objects remain
	@helm=$$($(LAB) program helm) && "$$helm" uninstall spillway-$(CHART) --namespace $(NAMESPACE)

.PHONY: run
run: ## Run CHART's program on this machine against that cluster, with flags ARGS (ARGS=-h lists them)
	@go run ./$(CHART) $(ARGS)

.PHONY: samples
samples: ## Create CHART's examples there
	@kubectl=$$($(LAB) program kubectl) && "$$kubectl" apply -f charts/$(CHART)/examples
