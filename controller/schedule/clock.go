package schedule

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// Clock is a date and a time as a clock on a wall shows it, to the minute.
type Clock struct {
	Year   int
	Month  time.Month
	Day    int
	Minute int // of the day, 0 to 1439
}

const clockLayout = "2006-01-02 15:04"

// ParseClock reads "2026-12-01 02:00", also with a T in place of the blank; an
// empty text is the zero Clock.
func ParseClock(text string) (Clock, error) {
	if text == "" {
		return Clock{}, nil
	}
	t, err := time.Parse(clockLayout, strings.Replace(strings.TrimSpace(text), "T", " ", 1))
	if err != nil {
		return Clock{}, fmt.Errorf("%.64q: must be a date and a time such as 2026-12-01 02:00", text)
	}
	return clockOf(t), nil
}

func clockOf(t time.Time) Clock {
	return Clock{Year: t.Year(), Month: t.Month(), Day: t.Day(), Minute: t.Hour()*60 + t.Minute()}
}

// IsZero tells whether c is unset.
func (c Clock) IsZero() bool { return c == Clock{} }

// String returns what ParseClock reads.
func (c Clock) String() string {
	if c.IsZero() {
		return ""
	}
	return c.utc().Format(clockLayout)
}

func (c Clock) utc() time.Time {
	return time.Date(c.Year, c.Month, c.Day, 0, c.Minute, 0, 0, time.UTC)
}

func (c Clock) validate() error {
	if c.IsZero() {
		return nil
	}
	if c.utc() != time.Date(c.Year, c.Month, c.Day, 0, 0, 0, 0, time.UTC).Add(time.Duration(c.Minute)*time.Minute) || c.Minute < 0 || c.Minute >= day || clockOf(c.utc()) != c {
		return fmt.Errorf("%v: there is no such time", c)
	}
	if c.Year < 2000 || c.Year > 2199 {
		return fmt.Errorf("%v: must be in the years 2000 to 2199", c)
	}
	return nil
}

// instant returns when a clock shows c: of two times the first, or the second
// if last; if none, when the clock jumps over it.
func (c Clock) instant(loc *time.Location, last bool) time.Time {
	shown := c.utc()
	// No zone is more than 14 hours from UTC, and each of these spans ends when
	// a clock is changed.
	var found time.Time
	var jump time.Time
	for at := shown.Add(-26 * time.Hour); ; {
		from, until := at.In(loc).ZoneBounds()
		_, offset := at.In(loc).Zone()
		t := shown.Add(-time.Duration(offset) * time.Second)
		switch {
		case !from.IsZero() && t.Before(from):
			// Only reached after a jump over c: before it, c was still ahead.
			if jump.IsZero() {
				jump = from
			}
		case until.IsZero() || t.Before(until):
			if found.IsZero() || last {
				found = t
			}
		}
		if until.IsZero() || until.After(shown.Add(26*time.Hour)) {
			break
		}
		at = until
	}
	if found.IsZero() {
		found = jump
	}
	return found.UTC()
}

// day is minutes of a day.
const day = 24 * 60

// Window is a part of the day that comes again.
type Window struct {
	Days Days
	From int // minute of the day, 0 to 1439
	To   int // minute of the day, 1 to 1440; not after From: of the day after
}

// Days is a set of days; bit i is time.Weekday(i).
type Days uint8

// The sets that have names.
const (
	AllDays  Days = 1<<7 - 1
	Weekdays Days = 1<<time.Monday | 1<<time.Tuesday | 1<<time.Wednesday | 1<<time.Thursday | 1<<time.Friday
	Weekend  Days = AllDays &^ Weekdays
)

// dayWords are in the order in which people count the days.
var dayWords = []struct {
	word string
	day  time.Weekday
}{
	{"mon", time.Monday},
	{"tue", time.Tuesday},
	{"wed", time.Wednesday},
	{"thu", time.Thursday},
	{"fri", time.Friday},
	{"sat", time.Saturday},
	{"sun", time.Sunday},
}

// Has tells whether a day is in the set.
func (d Days) Has(w time.Weekday) bool { return d&(1<<w) != 0 }

// String returns what ParseWindow reads, such as "mon-fri".
func (d Days) String() string {
	if d == AllDays {
		return "daily"
	}
	var parts []string
	for i := 0; i < len(dayWords); i++ {
		if !d.Has(dayWords[i].day) {
			continue
		}
		j := i
		for j+1 < len(dayWords) && d.Has(dayWords[j+1].day) {
			j++
		}
		switch {
		case j > i+1:
			parts = append(parts, dayWords[i].word+"-"+dayWords[j].word)
		case j == i+1:
			parts = append(parts, dayWords[i].word, dayWords[j].word)
		default:
			parts = append(parts, dayWords[i].word)
		}
		i = j
	}
	return strings.Join(parts, ",")
}

// ParseWindow reads "mon-fri 18:00-23:00", "sat,sun 22:00-06:00",
// "daily 00:00-24:00" or only "18:00-23:00", which is daily.
func ParseWindow(text string) (Window, error) {
	words := strings.Fields(strings.ToLower(text))
	w := Window{Days: AllDays}
	bad := func(what string) (Window, error) {
		return Window{}, fmt.Errorf("window %.64q: %s; must be days and a time such as mon-fri 18:00-23:00", text, what)
	}
	if len(words) == 2 {
		var err error
		if w.Days, err = parseDays(words[0]); err != nil {
			return bad(err.Error())
		}
		words = words[1:]
	}
	if len(words) != 1 {
		return bad(fmt.Sprintf("has %d words", len(words)))
	}
	from, to, ok := strings.Cut(words[0], "-")
	if !ok {
		return bad("has no end")
	}
	var err error
	if w.From, err = parseMinute(from); err != nil {
		return bad(err.Error())
	}
	if w.To, err = parseMinute(to); err != nil {
		return bad(err.Error())
	}
	if w.To == 0 {
		w.To = day
	}
	if err := w.Validate(); err != nil {
		return bad(err.Error())
	}
	return w, nil
}

func parseDays(text string) (d Days, err error) {
	for part := range strings.SplitSeq(text, ",") {
		switch part {
		case "daily":
			d |= AllDays
			continue
		case "weekdays":
			d |= Weekdays
			continue
		case "weekend", "weekends":
			d |= Weekend
			continue
		}
		first, last, isRange := strings.Cut(part, "-")
		i, err := parseDay(first)
		if err != nil {
			return 0, err
		}
		j := i
		if isRange {
			if j, err = parseDay(last); err != nil {
				return 0, err
			}
		}
		for ; ; i = (i + 1) % len(dayWords) {
			d |= 1 << dayWords[i].day
			if i == j {
				break
			}
		}
	}
	return d, nil
}

func parseDay(word string) (int, error) {
	for i, d := range dayWords {
		if word == d.word || word == strings.ToLower(d.day.String()) {
			return i, nil
		}
	}
	return 0, fmt.Errorf("day %q is unknown", word)
}

func parseMinute(text string) (int, error) {
	if text == "24:00" {
		return day, nil
	}
	t, err := time.Parse("15:04", text)
	if err != nil {
		return 0, fmt.Errorf("time %q: must be such as 18:00", text)
	}
	return t.Hour()*60 + t.Minute(), nil
}

// Validate returns an error that names what is wrong.
func (w Window) Validate() error {
	switch {
	case w.Days == 0 || w.Days > AllDays:
		return fmt.Errorf("window: has no day")
	case w.From < 0 || w.From >= day:
		return fmt.Errorf("window: begins at minute %d of the day, allowed are 0 to 1439", w.From)
	case w.To < 1 || w.To > day:
		return fmt.Errorf("window: ends at minute %d of the day, allowed are 1 to 1440", w.To)
	}
	return nil
}

// String returns what ParseWindow reads.
func (w Window) String() string {
	return fmt.Sprintf("%v %02d:%02d-%02d:%02d", w.Days, w.From/60, w.From%60, w.To/60, w.To%60)
}

// on returns the span of the window that begins on a date, which may be empty.
func (w Window) on(date time.Time, loc *time.Location) Span {
	from, to := clockOf(date), clockOf(date)
	from.Minute = w.From
	to.Minute = w.To
	if w.To <= w.From || w.To == day {
		to = clockOf(date.AddDate(0, 0, 1))
		to.Minute = w.To % day
	}
	return Span{From: from.instant(loc, false), Until: to.instant(loc, true)}
}

// sortSpans puts spans in order of their beginning.
func sortSpans(spans []Span) {
	slices.SortFunc(spans, func(a, b Span) int { return a.From.Compare(b.From) })
}
