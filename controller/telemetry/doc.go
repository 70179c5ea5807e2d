// Package telemetry keeps what routers report: the newest report of each, its
// last fifteen minutes report by report, and, through package rollup, the sums
// by group.
//
// # What is counted, and how often
//
// Reports are cumulative within one boot of the agent. What is counted between
// two of them is the difference of two counters, so that a report that is lost
// costs resolution and no totals, and one that comes twice or late changes
// nothing. Counters that begin again are told by the boot id, or, within one
// boot, by going back: a data plane that was made anew. Counters of 32 bits that
// ran over while those of 64 bits went on are told apart from that. All of this
// is counted in Faults.
//
// A router that comes from another controller begins here with the report that
// it sent there last (Report.Again), from which the next ones count: what both
// controllers have counted is each packet once. A router that says nothing of
// the kind begins with its first report, except that everything counts if that
// is the first of its boot.
//
// # Time
//
// When a report arrived is said by the controller; how long it covers by the
// router's monotonic clock. The router's wall clock is never looked at.
//
// # Memory
//
// A router has its newest report in the protocol's form, the ring, and some
// figures. The ring grows as it is needed, holds ringTime and never more than
// ringMost bytes; a home that does everything at once has less than ringTime in
// it when reports come faster than each 10 s.
//
// # Concurrency
//
// All methods may be called from any goroutine.
package telemetry
