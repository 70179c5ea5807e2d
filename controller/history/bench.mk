# What telemetry costs a controller, one line a figure; some minutes, most of
# them to make a day of history of 10 000 and of 100 000 routers.
.PHONY: bench-telemetry
bench-telemetry:
	@go run ./controller/history/benchtelemetry

bench: bench-telemetry
