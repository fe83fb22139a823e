# What can be done here: make help
SHELL := /bin/bash
.DELETE_ON_ERROR:
export GOTOOLCHAIN := local
# One set of flags for every build: another would compile Kubernetes once more.
export GOFLAGS := -trimpath
export CGO_ENABLED := 0

LAB := go run ./e2e/lab
RUN := go test -count=1
# The packages of the product, without the stories that need the lab.
PACKAGES := ./...

.PHONY: help
help: ## show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: generate
generate: ## make deepcopy code, CRDs and the OpenAPI document from the types
	@gen=$$($(LAB) program controller-gen) && \
	"$$gen" object paths=./broker/api/... && \
	"$$gen" crd:maxDescLen=400 paths=./broker/api/... output:crd:dir=charts/broker/crds
	@for crd in charts/agent/crds/*.yaml; do cp "charts/broker/crds/$$(basename "$$crd")" "$$crd"; done
	@gofmt -w broker/api
	@go generate ./broker/protocol

.PHONY: verify
verify: ## check formatting, generated files, modules, vet and staticcheck
	@.ci/verify

.PHONY: test
test: ## run unit and integration tests, with the race detector (no docker, no lab)
	CGO_ENABLED=1 $(RUN) -race -timeout 30m $(PACKAGES)

.PHONY: demo
demo: ## watch pods overflow between four clusters that run as processes (no docker)
	@go run ./e2e/playground demo

.PHONY: bench
bench: ## measure (NAME=playground_scale, the one there is: a thousand nodes, ten thousand pods; takes long)
	@go run ./e2e/playground bench -name=$(or $(NAME),playground_scale)

.PHONY: images
images: ## build the container images as archives in the cache, and print where
	@$(LAB) images

.PHONY: lab
lab: ## bring up clusters hub, rome, paris, berlin with Liqo and Spillway, and leave them running (DRIVER=direct: linked without Liqo)
	@$(LAB) up $(DRIVER)

.PHONY: lab-down
lab-down: ## remove the lab: containers, network, routes, and the docker it started
	@$(LAB) down

.PHONY: e2e
e2e: ## run the stories on the lab (brought up if it does not stand, and then removed again), with each driver
	@.ci/e2e
