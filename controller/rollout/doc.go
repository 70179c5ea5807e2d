// Package rollout changes many routers in stages, and stops when they feel it.
//
// # Words
//
// A rollout sets fields for its targets: the routers of a plan, or those that a
// selector names. The targets are frozen when it is made; each has a place that
// a hash with the rollout's seed gives, and is in one step. A step is opened at
// once; one or more of them make a wave. Routers of steps that are not open yet
// are the control group. A gate is a condition on what the routers say or count,
// such as "p99_sojourn < 1.2x control"; a verdict is what a gate said at the end
// of a wave's soak time, with its figures.
//
// # How it works
//
// The pure part is Next: a rollout, what is known of its routers and the time
// come in, the rollout as it is to be stored goes out. How many steps are open is
// a number in the record, and whether a router is in an open step is part of what
// resolve derives, so that a step is one write whatever the number of routers.
// Nothing else is remembered: who leads reads the record, looks at the routers
// and goes on, so that a restart or another leader at any moment repeats
// nothing and loses nothing.
//
//   - Nothing proceeds on missing data. Without any, and when a gate can't be
//     judged, the rollout waits and then pauses.
//   - A router that is away does not hold up the others. It gets what it should
//     run when it returns.
//   - A rollback closes all steps, so that every router gets what it would have
//     without the rollout. What was rolled back can't be rolled out again until
//     it is edited.
//   - A plan that is changed while a rollout changes it overtakes the rollout,
//     which has no effect from that revision on.
//   - Routers that come later, and are what the selector means, are in the last
//     step.
//   - What has ended and is of no effect any more is forgotten after a year, or
//     behind a hundred newer ones of its plan.
//
// # Concurrency
//
// All but Meter is values. A Set is not changed; a Meter may be used from any
// goroutine.
//
// # Testing
//
// TestModel runs random histories, with routers that answer, refuse, vanish and
// return, operators that interfere and leaders that die at any write, and judges
// each by the promises above.
package rollout
