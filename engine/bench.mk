# What the engine costs, one line a figure. Instructions per packet on MIPS need
# qemu-user and gcc, which root gets where they are missing; without them that
# half is skipped and says so. BENCHFLAGS='-top 15 -w W1' shows where they go.
BENCH_TOOLS := qemu-mips:qemu-user gcc:gcc

.PHONY: bench-engine
bench-engine:
	@for t in $(BENCH_TOOLS); do \
		command -v $${t%:*} >/dev/null && continue; \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			{ apt-get update -q && apt-get install -yq $${t#*:}; } >/dev/null || \
				echo "bench-engine: $${t%:*} is missing and apt-get could not install $${t#*:}"; \
		else \
			echo "bench-engine: $${t%:*} is missing; install $${t#*:} to count instructions"; \
		fi; \
	done
	@go run ./engine/enginetest/benchengine $(BENCHFLAGS)
