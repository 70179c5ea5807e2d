// Package schedule says what changes by the clock: values for some fields, or
// another plan, for a plan's subscribers, one subscriber or those with some
// labels, in recurring windows or from one time on.
//
// # Words
//
// A schedule is in force during its spans. A span is a time from one instant to
// another. A window is a recurring part of the day; the days are those on which
// it begins, so that one across midnight belongs to the evening. Times are read
// as clocks on a wall in the schedule's zone show them.
//
// # When clocks change
//
// A time that is skipped in spring means the instant at which the clock jumps:
// what begins or ends in the gap does so then, and a window that is all in the
// gap has no span on that day. Of a time that comes twice in autumn a beginning
// is the first and an end is the second, so that a window is whole and in one
// piece. A day that a zone skips has no windows.
//
// # Which one counts
//
// Of several that are in force for one router and set the same field, the one
// of the higher priority counts; of equal ones that for a subscriber before
// labels (the more of them the better) before a plan; of those the one that was
// made later; then the one whose id comes later.
//
// # Concurrency
//
// Everything is pure: nothing has to be carried out at a time, since every
// controller derives what is in force from the time. A Set remembers answers
// and may be used from any goroutine. The database of time zones is built in,
// so that all controllers agree on it.
package schedule
