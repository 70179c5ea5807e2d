# make demo    the whole fleet on this machine, on real packets (root)
# make test    every kind of test; ends with what ran and what was skipped
# make help    the rest

GO ?= go
BUF = $(GO) run github.com/bufbuild/buf/cmd/buf@v1.75.0
GOLANGCI = $(GO) run github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.15.0
GOFUMPT = $(GO) run mvdan.cc/gofumpt@v0.12.0
GOVULNCHECK = $(GO) run golang.org/x/vuln/cmd/govulncheck@v1.9.0

# What the agent leaves out: gRPC's trace pages, and C libraries for names and users.
AGENT_TAGS = grpcnotrace,osusergo,netgo
VERSION ?= $(shell git describe --always --dirty 2>/dev/null || echo dev)
BUILT ?= $(shell git log -1 --format=%ct 2>/dev/null || date +%s)
LDFLAGS = -s -w -X main.version=$(VERSION) -X main.built=$(BUILT)
BUILD = GOOS=linux CGO_ENABLED=0 $(GO) build -trimpath -ldflags='$(LDFLAGS)'

# Time for each fuzz target.
FUZZTIME ?= 30s

.DEFAULT_GOAL = help
.PHONY: help demo test test-machine lint vuln generate fuzz bench bench-engine lab build cross clean

help:
	@echo 'make demo       a controller and three routers on this machine, real packets, a plan'
	@echo '                changed while traffic runs (root, about 90 s; KEEP=1 leaves it running);'
	@echo '                ROLLOUT=1: twelve routers, and changes in stages, a good and two bad ones'
	@echo 'make test       unit, race, end to end, big-endian 32-bit; says what it skipped and why'
	@echo 'make test-machine  tests of the kernel data plane on another kernel, in a machine of its own:'
	@echo '                KERNEL=debian, sid (the newest; cake_mq) or mips (the lab'"'"'s)'
	@echo 'make lint       vet, golangci-lint, gofumpt, go mod tidy, buf, generated code up to date'
	@echo 'make vuln       known vulnerabilities in what is called of the libraries and of Go itself'
	@echo 'make build      the four programs for this machine, in bin/'
	@echo 'make cross      the agent for every kind of router and the rest for servers, in bin/'
	@echo 'make generate   the Go code of proto/'
	@echo 'make fuzz       every fuzz target for FUZZTIME ($(FUZZTIME)) each'
	@echo 'make bench      what the agent costs; bench-engine: the engine alone; bench-telemetry:'
	@echo '                what telemetry costs a controller. "name value unit" lines'
	@echo 'make bench-control  what a fleet of N (5000) costs its controllers, next to NATS and etcd'
	@echo 'make lab        what each shaper costs a MIPS router, in a machine whose clock counts'
	@echo '                instructions (needs qemu-system-mips; ALL=1 for every row)'
	@echo 'make clean      remove bin/ and out/'

build:
	$(BUILD) -o bin/ -tags $(AGENT_TAGS) ./cmd/cakefleet-agent
	$(BUILD) -o bin/ ./cmd/cakefleet-controller ./cmd/cakefleetctl ./cmd/cakefleet-sim

demo: build
	$(BUILD) -o bin/ ./deploy/demo
	@mkdir -p out
	@bin/demo --bin bin $(if $(ROLLOUT),--rollout --svg out/demo-rollout.svg,--svg out/demo.svg) $(if $(KEEP),--keep)

test:
	@$(GO) run ./test/suite

# TESTS='./test/netns:^TestVLAN$$ ./agent/probe': others.
KERNEL ?= debian
TESTS ?= ./agent/dataplane/kernel
test-machine:
	@$(GO) run ./test/machine --kernel $(KERNEL) --env CAKEFLEET_REQUIRE_CAKE=1 --env CAKEFLEET_REQUIRE_NETNS=1 $(foreach t,$(TESTS),'$(t)')

lint:
	$(GO) vet ./...
	$(GOLANGCI) run --allow-parallel-runners ./...
	@out=$$($(GOFUMPT) -l .) && if [ -n "$$out" ]; then echo "gofumpt would change:"; echo "$$out"; exit 1; fi
	$(GO) mod tidy -diff
	$(BUF) lint
	$(BUF) format --diff --exit-code
	$(BUF) generate
	git diff --exit-code -- proto controller/api/gateway

# The database is vuln.go.dev, or what GOVULNDB names: for a copy, file:///DIR.
vuln:
	$(GOVULNCHECK) ./...

generate:
	$(BUF) format -w
	$(BUF) generate

# go test takes one fuzz target at a time.
fuzz:
	@set -e; grep -rlE '^func Fuzz' --include='*_test.go' . | xargs -r -n1 dirname | sort -u | while read -r dir; do \
		grep -hoE '^func Fuzz[A-Za-z0-9_]+' "$$dir"/*_test.go | sed 's/^func //' | sort -u | while read -r target; do \
			echo "== $$dir $$target"; \
			$(GO) test "$$dir" -run='^$$' -fuzz="^$$target\$$" -fuzztime=$(FUZZTIME); \
		done; \
	done

# The benchmarks live beside what they measure: these files add to bench and bench-engine.
-include engine/bench.mk
-include agent/bench.mk
-include test/benchcontrol/bench.mk
-include controller/history/bench.mk

bench: bench-engine

# ALL=1: every row; ONLY=REGEXP: some of them. Needs qemu-system-mips; the
# kernel is built once (22 minutes of CPU), see deploy/lab/kernel.
lab:
	@$(GO) run ./deploy/lab $(if $(ALL),--all) $(if $(ONLY),--only '$(ONLY)')

cross:
	$(GO) run ./deploy/router/build --out bin/router --version $(VERSION)
	GOARCH=amd64 $(BUILD) -o bin/linux-amd64/ ./cmd/cakefleet-controller ./cmd/cakefleetctl ./cmd/cakefleet-sim
	GOARCH=arm64 $(BUILD) -o bin/linux-arm64/ ./cmd/cakefleet-controller ./cmd/cakefleetctl ./cmd/cakefleet-sim

clean:
	rm -rf bin out
