package schedule

import (
	"iter"
	"time"
)

// Span is a time from one instant until another, which is not part of it.
type Span struct {
	From  time.Time // zero: always before
	Until time.Time // zero: never ends
}

// maxSpan is how much of a span without a gap is looked at in one piece.
const maxSpan = 400 * 24 * time.Hour

// spans yields when a schedule is in force, in order and without overlap, from
// the span that has an instant on. It looks neither at Paused nor at Settled.
func (s *Schedule) spans(loc *time.Location, now time.Time) iter.Seq[Span] {
	limit := s.limits(loc)
	return func(yield func(Span) bool) {
		if !limit.Until.IsZero() && !now.Before(limit.Until) {
			return
		}
		if len(s.Windows) == 0 {
			yield(limit)
			return
		}
		begin := now
		if begin.Before(limit.From) {
			begin = limit.From
		}
		// What covers an instant may have begun the day before, and clocks
		// differ from UTC by less than a day.
		local := begin.In(loc)
		date := time.Date(local.Year(), local.Month(), local.Day(), 0, 0, 0, 0, time.UTC).AddDate(0, 0, -2)
		var open Span
		idle := 0 // days without any window, as no weekday is without one for longer than a week
		for {
			var today []Span
			for _, w := range s.Windows {
				if w.Days.Has(date.Weekday()) {
					if span := limit.clip(w.on(date, loc)); span.From.Before(span.Until) {
						today = append(today, span)
					}
				}
			}
			sortSpans(today)
			idle++
			for _, next := range today {
				idle = 0
				switch {
				case open.Until.IsZero():
					open = next
				case next.From.After(open.Until) || next.Until.Sub(open.From) > maxSpan:
					if open.Until.After(now) && !yield(open) {
						return
					}
					if next.From.Before(open.Until) {
						next.From = open.Until
					}
					open = next
				case next.Until.After(open.Until):
					open.Until = next.Until
				}
			}
			date = date.AddDate(0, 0, 1)
			over := !limit.Until.IsZero() && date.AddDate(0, 0, -2).After(limit.Until)
			if over || idle > 16 {
				break
			}
		}
		if open.Until.After(now) {
			yield(open)
		}
	}
}

// limits returns from when until when it may be in force.
func (s *Schedule) limits(loc *time.Location) (limit Span) {
	if !s.Start.IsZero() {
		limit.From = s.Start.instant(loc, false)
	}
	if !s.End.IsZero() {
		limit.Until = s.End.instant(loc, true)
	}
	return limit
}

// clip returns the part of a span that is within the limits.
func (l Span) clip(s Span) Span {
	if s.From.Before(l.From) {
		s.From = l.From
	}
	if !l.Until.IsZero() && s.Until.After(l.Until) {
		s.Until = l.Until
	}
	return s
}

// Upcoming returns the spans that have not ended, at most n.
func (s *Schedule) Upcoming(now time.Time, n int) (all []Span) {
	loc, err := Location(s.Zone)
	if err != nil || s.Removed || s.Settled {
		return nil
	}
	for span := range s.spans(loc, now) {
		if len(all) == n {
			break
		}
		all = append(all, span)
	}
	return all
}

// At tells whether the schedule is in force, and the next instant at which
// that changes; zero if it does not.
func (s *Schedule) At(now time.Time) (is bool, next time.Time) {
	if s.Paused || s.Settled || s.Removed {
		return false, time.Time{}
	}
	first := s.Upcoming(now, 1)
	switch {
	case len(first) == 0:
		return false, time.Time{}
	case now.Before(first[0].From):
		return false, first[0].From
	default:
		return true, first[0].Until
	}
}

// Overlap returns the first time, from now on, at which two schedules are both
// in force; ok is false if there is none within a year and a bit.
func Overlap(a, b *Schedule, now time.Time) (at time.Time, ok bool) {
	la, errA := Location(a.Zone)
	lb, errB := Location(b.Zone)
	if errA != nil || errB != nil {
		return time.Time{}, false
	}
	nextA, stopA := iter.Pull(a.spans(la, now))
	defer stopA()
	nextB, stopB := iter.Pull(b.spans(lb, now))
	defer stopB()
	x, okA := nextA()
	y, okB := nextB()
	end := now.Add(maxSpan)
	for okA && okB {
		from := x.From
		if y.From.After(from) {
			from = y.From
		}
		if from.Before(now) {
			from = now
		}
		if from.After(end) {
			return time.Time{}, false
		}
		if (x.Until.IsZero() || from.Before(x.Until)) && (y.Until.IsZero() || from.Before(y.Until)) {
			return from, true
		}
		// The one that ends first has no part in what follows.
		if y.Until.IsZero() || !x.Until.IsZero() && x.Until.Before(y.Until) {
			x, okA = nextA()
		} else {
			y, okB = nextB()
		}
	}
	return time.Time{}, false
}
