// Package lead makes work be done by one controller at a time, and knows which
// controllers there are.
//
// # Words
//
// Work is what one controller must do for all, under a name. Its leader is the
// controller that holds the key leader/<work>, which is bound to a lease of the
// store. A term is the time from taking that key to its end. A fence is the
// comparison that holds during one term and never again: that the key has the
// revision at which it was taken. A member is a controller with a record under
// controllers/, bound to a lease too.
//
// # How it works
//
// A leader that is stopped for longer than its lease doesn't know that another
// one leads when it goes on, and no clock of its own can tell in time. So it is
// not trusted to know: each write of led work carries the fence, and the store
// refuses the write when the term is over. The context that a leader works with
// carries the fence into every method of store.Store (store.WithFence); what
// writes to a KV by itself adds the fence to its compares.
//
// The context also ends when the lease could not be renewed in its time, so
// that a leader which is cut off stops working, although nobody depends on it.
//
// # What the caller owes
//
// Work must stop when its context ends, and must do nothing outside the store
// that two controllers may not do at once: only writes to the store are fenced.
//
// # Testing
//
// storetest.KV has leases; EndLeases makes a leader that doesn't know yet.
package lead
