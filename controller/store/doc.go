// Package store keeps what the operator asks for: plans, subscribers, routers
// and join tokens, in etcd.
//
// # Words
//
// A record is one object under a key. Its revision is etcd's modification
// revision of that key. The state is the copy of all records that each
// controller holds in memory. A reference is a subscriber's plan or a router's
// subscriber.
//
// # How it works
//
// One prefix watch feeds the state and its indexes, so that reading costs
// nothing and one change costs what it reaches, whatever the size of the
// fleet. After a compaction, and every so often in any case, the state is
// compared with a full list, because a watch can lose an event
// (etcd-io/etcd#18089) and nothing else would ever notice.
//
// Every write is one transaction that compares revisions, and returns when the
// local state has seen it. References hold at all times: a write that makes
// one compares that its target exists and puts a marker under refs/; removing
// a target compares that the marker did not move since the state was read.
//
// What doesn't fit one transaction is an import (import.go): it is staged, one
// key makes all of it count, and it is rolled forward afterwards by whoever
// lives. Until then, writes of subscribers and references to them wait; reads,
// changes of plans and routers without a subscriber go on.
//
// A write of work that one controller leads carries a fence in its context
// (WithFence), and is refused when the leader is not the leader any more; see
// controller/lead.
//
// # Concurrency
//
// All methods may be called from any goroutine. OnChange functions are called
// one at a time in order of revision, and may call View but no write.
//
// # What the caller owes
//
// Run must be running for a write to return. Close comes after Run has
// returned.
//
// # Testing
//
// storetest has one suite for every KV, and NewFake: this store on a map.
package store
