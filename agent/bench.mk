# What the agent's data plane costs: the packet loop alone, and with the kernel
# on real packets (root), one line a figure.
.PHONY: bench-agent
bench-agent:
	@go test ./agent/dataplane/userspace -run='^$$' -bench=Loop -benchtime=2s | \
		awk '/^Benchmark/ { for (i = 3; i < NF; i += 2) print "userspace-loop/" $$(i+1), $$i, $$(i+1) }'
	@go run ./test/netns/benchagent

bench: bench-agent
