package schedule_test

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/cakefleet/cakefleet/controller/schedule"
	"github.com/cakefleet/cakefleet/internal/plan"
)

func settings(t testing.TB, words ...string) plan.Settings {
	t.Helper()
	var s plan.Settings
	for i := 0; i < len(words); i += 2 {
		if err := s.Parse(words[i], words[i+1]); err != nil {
			t.Fatal(err)
		}
	}
	return s
}

func window(t testing.TB, text string) schedule.Window {
	t.Helper()
	w, err := schedule.ParseWindow(text)
	if err != nil {
		t.Fatal(err)
	}
	return w
}

func clock(t testing.TB, text string) schedule.Clock {
	t.Helper()
	c, err := schedule.ParseClock(text)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// evening is a schedule for plan gold.
func evening(t testing.TB, zone string, windows ...string) schedule.Schedule {
	t.Helper()
	s := schedule.Schedule{ID: "evening", Target: schedule.Target{Plan: "gold"}, Set: settings(t, "down.rate", "200mbit"), Zone: zone}
	for _, w := range windows {
		s.Windows = append(s.Windows, window(t, w))
	}
	return s
}

// text returns spans as clocks in the schedule's zone show them.
func text(t testing.TB, zone string, spans []schedule.Span) (all []string) {
	t.Helper()
	loc, err := schedule.Location(zone)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range spans {
		show := func(at time.Time) string {
			if at.IsZero() {
				return "-"
			}
			return at.In(loc).Format("Mon 01-02 15:04 -07:00")
		}
		all = append(all, show(s.From)+" to "+show(s.Until))
	}
	return all
}

func utc(year int, month time.Month, d, hour, minute int) time.Time {
	return time.Date(year, month, d, hour, minute, 0, 0, time.UTC)
}

// What the package comment says of days on which clocks change, said once in
// words.
func TestFleet033_LocalTimesAcrossDST(t *testing.T) {
	for _, c := range []struct {
		name    string
		zone    string
		windows []string
		now     time.Time
		want    []string
	}{
		{"weekdays, across the weekend", "Europe/Berlin", []string{"mon-fri 18:00-23:00"}, utc(2026, 10, 23, 17, 0), []string{
			"Fri 10-23 18:00 +02:00 to Fri 10-23 23:00 +02:00", "Mon 10-26 18:00 +01:00 to Mon 10-26 23:00 +01:00",
		}},
		{"across midnight into the longer night", "Europe/Berlin", []string{"sat 22:00-06:00"}, utc(2026, 10, 24, 12, 0), []string{
			"Sat 10-24 22:00 +02:00 to Sun 10-25 06:00 +01:00", "Sat 10-31 22:00 +01:00 to Sun 11-01 06:00 +01:00",
		}},
		{"ends at a time that is skipped", "Europe/Berlin", []string{"sun 01:00-02:30"}, utc(2026, 3, 28, 12, 0), []string{
			"Sun 03-29 01:00 +01:00 to Sun 03-29 03:00 +02:00", "Sun 04-05 01:00 +02:00 to Sun 04-05 02:30 +02:00",
		}},
		{"begins at a time that is skipped", "Europe/Berlin", []string{"sun 02:30-04:00"}, utc(2026, 3, 28, 12, 0), []string{
			"Sun 03-29 03:00 +02:00 to Sun 03-29 04:00 +02:00", "Sun 04-05 02:30 +02:00 to Sun 04-05 04:00 +02:00",
		}},
		{"all of it is skipped", "Europe/Berlin", []string{"sun 02:10-02:50"}, utc(2026, 3, 28, 12, 0), []string{
			"Sun 04-05 02:10 +02:00 to Sun 04-05 02:50 +02:00", "Sun 04-12 02:10 +02:00 to Sun 04-12 02:50 +02:00",
		}},
		{"begins at a time that comes twice", "America/New_York", []string{"sun 01:30-03:00"}, utc(2026, 10, 31, 12, 0), []string{
			"Sun 11-01 01:30 -04:00 to Sun 11-01 03:00 -05:00", "Sun 11-08 01:30 -05:00 to Sun 11-08 03:00 -05:00",
		}},
		{"ends at a time that comes twice", "America/New_York", []string{"sun 00:30-01:30"}, utc(2026, 10, 31, 12, 0), []string{
			"Sun 11-01 00:30 -04:00 to Sun 11-01 01:30 -05:00", "Sun 11-08 00:30 -05:00 to Sun 11-08 01:30 -05:00",
		}},
		{"half an hour is skipped", "Australia/Lord_Howe", []string{"sun 02:15-03:00"}, utc(2026, 10, 3, 0, 0), []string{
			"Sun 10-04 02:30 +11:00 to Sun 10-04 03:00 +11:00", "Sun 10-11 02:15 +11:00 to Sun 10-11 03:00 +11:00",
		}},
		{"midnight is skipped", "Africa/Cairo", []string{"fri 00:00-02:00"}, utc(2026, 4, 23, 12, 0), []string{
			"Fri 04-24 01:00 +03:00 to Fri 04-24 02:00 +03:00", "Fri 05-01 00:00 +03:00 to Fri 05-01 02:00 +03:00",
		}},
		{"a whole day is skipped", "Pacific/Apia", []string{"fri 18:00-23:00"}, utc(2011, 12, 29, 12, 0), []string{
			"Fri 01-06 18:00 +14:00 to Fri 01-06 23:00 +14:00", "Fri 01-13 18:00 +14:00 to Fri 01-13 23:00 +14:00",
		}},
		{"an offset with minutes", "Asia/Kathmandu", []string{"daily 23:00-24:00"}, utc(2026, 5, 1, 0, 0), []string{
			"Fri 05-01 23:00 +05:45 to Sat 05-02 00:00 +05:45", "Sat 05-02 23:00 +05:45 to Sun 05-03 00:00 +05:45",
		}},
		{"windows that touch are one", "UTC", []string{"mon 20:00-24:00", "tue 00:00-02:00", "tue 01:00-03:00"}, utc(2026, 11, 30, 0, 0), []string{
			"Mon 11-30 20:00 +00:00 to Tue 12-01 03:00 +00:00", "Mon 12-07 20:00 +00:00 to Tue 12-08 03:00 +00:00",
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := evening(t, c.zone, c.windows...)
			if err := s.Validate(); err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(c.want, text(t, c.zone, s.Upcoming(c.now, 2))); d != "" {
				t.Error(d)
			}
		})
	}
}

// A change from one time on, and windows within limits.
func TestLimits(t *testing.T) {
	now := utc(2026, 3, 1, 0, 0)
	for _, c := range []struct {
		name       string
		start, end string
		windows    []string
		want       []string
	}{
		{"for good", "2026-03-29 02:30", "", nil, []string{"Sun 03-29 03:00 +02:00 to -"}},
		{"for a time", "2026-10-25 02:30", "2026-10-25T02:40", nil, []string{"Sun 10-25 02:30 +02:00 to Sun 10-25 02:40 +01:00"}},
		{"is over", "2026-01-01 00:00", "2026-02-01 00:00", nil, nil},
		{"windows from a day on", "2026-12-24 20:00", "2026-12-26 00:00", []string{"daily 18:00-23:00"}, []string{
			"Thu 12-24 20:00 +01:00 to Thu 12-24 23:00 +01:00", "Fri 12-25 18:00 +01:00 to Fri 12-25 23:00 +01:00",
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := evening(t, "Europe/Berlin", c.windows...)
			s.Start, s.End = clock(t, c.start), clock(t, c.end)
			if err := s.Validate(); err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(c.want, text(t, "Europe/Berlin", s.Upcoming(now, 9))); d != "" {
				t.Error(d)
			}
		})
	}
}

// shows returns the first instant at which a clock shows a minute of a date or
// later, and the first after which it never shows an earlier one. It looks at
// every minute.
func shows(loc *time.Location, date time.Time, minute int) (first, last time.Time) {
	want := date.Add(time.Duration(minute) * time.Minute)
	for at := date.Add(-30 * time.Hour); at.Before(date.Add(78 * time.Hour)); at = at.Add(time.Minute) {
		l := at.In(loc)
		wall := time.Date(l.Year(), l.Month(), l.Day(), l.Hour(), l.Minute(), 0, 0, time.UTC)
		if !wall.Before(want) && first.IsZero() {
			first = at
		}
		if wall.Before(want) {
			last = at.Add(time.Minute)
		}
	}
	return first, last
}

// Any windows in any zone, around any change of its clocks, are in force
// exactly when a person with a clock would say so, and At names the next change.
func TestAgainstAClock(t *testing.T) {
	zones := []string{"Europe/Berlin", "Europe/Dublin", "America/New_York", "America/St_Johns", "America/Santiago", "Australia/Lord_Howe", "Africa/Cairo", "Africa/Casablanca", "Asia/Beirut", "Asia/Kathmandu", "Pacific/Apia", "Pacific/Chatham", "UTC"}
	rounds := 3
	if testing.Short() {
		rounds = 1
	}
	const seed = 7
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, seed))
	for range rounds {
		for _, zone := range zones {
			loc, err := schedule.Location(zone)
			if err != nil {
				t.Fatal(err)
			}
			// A change of the clocks after some time, or just that time.
			_, at := time.Date(2005+r.IntN(30), time.Month(1+r.IntN(12)), 1, 0, 0, 0, 0, loc).ZoneBounds()
			if at.IsZero() {
				at = time.Date(2026, 7, 1, 0, 0, 0, 0, loc)
			}
			local := at.In(loc)
			s := evening(t, zone)
			for range 1 + r.IntN(3) {
				near := func() int { return (local.Hour()*60 + local.Minute() + r.IntN(240) - 120 + 1440) % 1440 }
				w := schedule.Window{Days: schedule.Days(1 + r.IntN(int(schedule.AllDays))), From: near(), To: 1 + r.IntN(1440)}
				if r.IntN(2) == 0 {
					w.To = 1 + near()
				}
				s.Windows = append(s.Windows, w)
			}
			if err := s.Validate(); err != nil {
				t.Fatal(err)
			}
			type span struct{ from, until time.Time }
			var spans []span
			for d := -4; d <= 4; d++ {
				date := time.Date(local.Year(), local.Month(), local.Day()+d, 0, 0, 0, 0, time.UTC)
				for _, w := range s.Windows {
					if !w.Days.Has(date.Weekday()) {
						continue
					}
					to := w.To
					if to <= w.From {
						to += 1440
					}
					from, _ := shows(loc, date, w.From)
					_, until := shows(loc, date, to)
					spans = append(spans, span{from, until})
				}
			}
			within := func(at time.Time) bool {
				for _, s := range spans {
					if !at.Before(s.from) && at.Before(s.until) {
						return true
					}
				}
				return false
			}
			var due time.Time
			was := false
			for m := at.Add(-36 * time.Hour).Truncate(time.Minute); m.Before(at.Add(36 * time.Hour)); m = m.Add(time.Minute) {
				is := within(m)
				if is != was || due.IsZero() || !m.Before(due) {
					got, next := s.At(m)
					if got != is {
						t.Fatalf("%s: in force at %v: %t, want %t; next change %v\nwindows %v", zone, m.In(loc), got, is, next.In(loc), s.Windows)
					}
					if is != was && !due.IsZero() && !due.Equal(m) {
						t.Fatalf("%s: changes at %v, foretold was %v\nwindows %v", zone, m.In(loc), due.In(loc), s.Windows)
					}
					was, due = is, next
				}
			}
		}
	}
}

func TestWindowText(t *testing.T) {
	for text, want := range map[string]string{
		"mon-fri 18:00-23:00":       "mon-fri 18:00-23:00",
		"Weekdays 18:00-23:00":      "mon-fri 18:00-23:00",
		"sat,sun 22:00-06:00":       "sat,sun 22:00-06:00",
		"weekend 0:00-24:00":        "sat,sun 00:00-24:00",
		"18:00-00:00":               "daily 18:00-24:00",
		"fri-mon 01:00-02:00":       "mon,fri-sun 01:00-02:00",
		"monday,wed,fri 9:30-10:00": "mon,wed,fri 09:30-10:00",
	} {
		if got := window(t, text).String(); got != want {
			t.Errorf("%q is %q, want %q", text, got, want)
		}
		if again := window(t, want).String(); again != want {
			t.Errorf("%q is %q", want, again)
		}
	}
	for _, text := range []string{"", "mon", "mon-fri", "mon-fri 18:00", "mon-fri 18:00-25:00", "moon 18:00-19:00", "mon- 18:00-19:00", "mon 18-19", "mon tue 18:00-19:00"} {
		if w, err := schedule.ParseWindow(text); err == nil {
			t.Errorf("%q is taken for %v", text, w)
		} else if !strings.Contains(err.Error(), "mon-fri 18:00-23:00") {
			t.Errorf("%q: %v does not say how it should be", text, err)
		}
	}
}

func TestValidate(t *testing.T) {
	for _, c := range []struct {
		name string
		spec func(*schedule.Schedule)
		want string // part of the error; empty: none
	}{
		{"good", func(*schedule.Schedule) {}, ""},
		{"no target", func(s *schedule.Schedule) { s.Target = schedule.Target{} }, "say one of a plan, a subscriber and labels"},
		{"two targets", func(s *schedule.Schedule) { s.Target.Subscriber = "1" }, "say one of"},
		{"nothing to do", func(s *schedule.Schedule) { s.Set = plan.Settings{} }, "either values to set or a plan"},
		{"to itself", func(s *schedule.Schedule) { s.Set, s.ToPlan = plan.Settings{}, "gold" }, "have already"},
		{"no zone", func(s *schedule.Schedule) { s.Zone = "" }, "zone is missing"},
		{"no such zone", func(s *schedule.Schedule) { s.Zone = "Europe/Bonn" }, "not in the time zone database"},
		{"the machine's zone", func(s *schedule.Schedule) { s.Zone = "Local" }, "differs from machine to machine"},
		{"no time", func(s *schedule.Schedule) { s.Windows = nil }, "say when it starts"},
		{"no such day", func(s *schedule.Schedule) { s.Start = schedule.Clock{Year: 2026, Month: 2, Day: 30} }, "no such time"},
		{"ends before it starts", func(s *schedule.Schedule) {
			s.Start, s.End = clock(t, "2026-12-01 00:00"), clock(t, "2026-11-01 00:00")
		}, "not after the start"},
	} {
		s := evening(t, "Europe/Berlin", "mon-fri 18:00-23:00")
		c.spec(&s)
		err := s.Validate()
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: error is %v, want %q", c.name, err, c.want)
		}
	}
}

// For has exactly the schedules that match, in the order of Compare.
func TestSet(t *testing.T) {
	made := utc(2026, 1, 1, 0, 0)
	spec := func(id string, target schedule.Target, priority, minute int) schedule.Schedule {
		return schedule.Schedule{ID: id, Target: target, Priority: priority, Created: made.Add(time.Duration(minute) * time.Minute)}
	}
	set := schedule.NewSet([]schedule.Schedule{
		spec("own", schedule.Target{Subscriber: "1"}, 0, 1),
		spec("north", schedule.Target{Labels: map[string]string{"site": "north"}}, 0, 2),
		spec("north-ftth", schedule.Target{Labels: map[string]string{"site": "north", "access": "ftth"}}, 0, 3),
		spec("south", schedule.Target{Labels: map[string]string{"site": "south"}}, 9, 4),
		spec("gold-new", schedule.Target{Plan: "gold"}, 0, 6),
		spec("gold-old", schedule.Target{Plan: "gold"}, 0, 5),
		spec("gold-first", schedule.Target{Plan: "gold"}, 1, 0),
	})
	for _, c := range []struct {
		sub  plan.Subscriber
		want string
	}{
		{plan.Subscriber{ID: "1", Plan: "gold", Labels: map[string]string{"site": "north", "access": "ftth", "x": "y"}}, "[gold-old gold-new north north-ftth own gold-first]"},
		{plan.Subscriber{ID: "2", Plan: "silver", Labels: map[string]string{"site": "north", "access": "dsl"}}, "[north]"},
		{plan.Subscriber{ID: "3", Plan: "gold"}, "[gold-old gold-new gold-first]"},
		{plan.Subscriber{ID: "1", Plan: "silver"}, "[own]"},
		{plan.Subscriber{ID: "4", Plan: "silver"}, "[]"},
	} {
		ids := []string{}
		for _, e := range set.For(&c.sub) {
			ids = append(ids, e.ID)
		}
		if got := fmt.Sprint(ids); got != c.want {
			t.Errorf("for %s %v: %s, want %s", c.sub.ID, c.sub.Labels, got, c.want)
		}
	}
}

func TestOverlap(t *testing.T) {
	now := utc(2026, 11, 30, 0, 0)
	berlin, tokyo := evening(t, "Europe/Berlin", "mon-fri 18:00-23:00"), evening(t, "Asia/Tokyo", "sat 02:00-03:00")
	if at, ok := schedule.Overlap(&berlin, &tokyo, now); !ok || !at.Equal(utc(2026, 12, 4, 17, 0)) {
		t.Errorf("overlap at %v, %t", at, ok)
	}
	morning := evening(t, "Europe/Berlin", "mon-fri 06:00-07:00")
	if at, ok := schedule.Overlap(&berlin, &morning, now); ok {
		t.Errorf("evening and morning overlap at %v", at)
	}
	forever := evening(t, "UTC")
	forever.Start = clock(t, "2027-03-02 12:00")
	if at, ok := schedule.Overlap(&forever, &morning, now); !ok || !at.Equal(utc(2027, 3, 3, 5, 0)) {
		t.Errorf("overlap at %v, %t", at, ok)
	}
}

func FuzzParseWindow(f *testing.F) {
	f.Add("mon-fri 18:00-23:00")
	f.Add("daily 00:00-24:00")
	f.Fuzz(func(t *testing.T, text string) {
		w, err := schedule.ParseWindow(text)
		if err != nil {
			return
		}
		again, err := schedule.ParseWindow(w.String())
		if err != nil || again != w {
			t.Fatalf("%q is %v, which reads as %v, %v", text, w, again, err)
		}
	})
}
