// Package history keeps what telemetry counts in a Prometheus TSDB below the
// controller's data directory, and passes it on by remote-write.
//
// # What is written
//
// Every step (30 s), for each group of package rollup: counters and sojourn
// histograms by direction and by tin, and gauges. If wanted, and as far as the
// bound allows, four series of each router once a minute. Metrics lists them all.
// A group has 23 series and each of its tins 5 in each direction: with four tins
// both ways 63, of which 10 are histograms.
//
// What that costs is measured by make bench-telemetry, with values as random as
// they never are: 5 kB of memory a series with its two to three hours of samples,
// and on disk 16 bytes a sample where one of 13 is a histogram. A hundred groups
// come to 30 MB of memory and, of disk, about 5 GB in 15 days; a thousand
// routers of their own to 20 MB and 1.4 GB. Size bounds the disk.
//
// Sojourn times are native histograms with custom buckets, whose bounds are
// those of engine.Histogram, so that nothing is rounded. Counters begin at 0 when
// a controller starts, as those of any program do.
//
// # What may go wrong
//
// A disk that is full or broken ends the history and nothing else: it is told
// once, and every step tries again, so that it goes on when there is room. After
// kill -9 everything up to the last step is there.
//
// # Several controllers
//
// Each writes what came to it (package telemetry sees to that nothing comes to
// two), in series with its name in the label "controller". The sum over them is
// the fleet.
//
// # Concurrency
//
// All methods may be called from any goroutine; Run once.
package history
