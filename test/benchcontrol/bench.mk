# What a fleet costs its controllers, next to NATS (Debian: nats-server) and
# etcd, one line a figure. N=30000 takes two controllers where the limit on open
# files is 20000; see test/benchcontrol.
N ?= 5000

.PHONY: bench-control
bench-control:
	@command -v nats-server >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
		{ apt-get update -q && apt-get install -yq nats-server; } >/dev/null; } || \
		echo "bench-control: nats-server is missing; install Debian's, or run with BENCHFLAGS=-peers=false"
	@go run ./test/benchcontrol -n $(N) $(BENCHFLAGS)
	@go test ./controller/api -run='^$$' -bench='OneChange|Resolve100k' -benchtime=15x -timeout=30m | awk '/^Benchmark/ \
		{ sub(/^Benchmark/, "", $$1); sub(/-[0-9]+$$/, "", $$1); gsub("/", "-", $$1); \
		for (i = 3; i < NF; i += 2) if (split($$(i+1), m, ":") == 2) print "control-" tolower($$1) "-" m[2], $$i, m[1] }'
