package engine

import "time"

// Time is a point on the caller's monotonic clock in nanoseconds. A new
// Scheduler may start at any Time; it never reads a clock itself.
type Time int64

// Never is later than every Time that a clock shows.
const Never = Time(1<<63 - 1)

// Add returns t + d.
func (t Time) Add(d time.Duration) Time { return t + Time(d) }

// Sub returns t - u.
func (t Time) Sub(u Time) time.Duration { return time.Duration(t - u) }
