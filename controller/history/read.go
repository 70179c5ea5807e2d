package history

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/histogram"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/value"
	"github.com/prometheus/prometheus/tsdb/chunkenc"

	"github.com/cakefleet/cakefleet/engine"
)

// lookback is how far before a time the value that held then may have been
// written.
const lookback = 5 * time.Minute

// SojournBetween returns the sojourn times of the packets delivered in a
// direction between two times, for each group of a dimension; tin is empty for
// all tins together. Every packet is in the bucket of the engine that it fell
// into, so that percentiles of the result are at most 12.5 % off.
//
// Counters are looked up where the window begins and ends and where they began
// again at 0, whatever the time between; PromQL's increase() would look at every
// sample.
func (h *History) SojournBetween(ctx context.Context, by, direction, tin string, from, to time.Time) (map[string]*engine.Histogram, error) {
	metric := Sojourn
	match := []*labels.Matcher{
		labels.MustNewMatcher(labels.MatchEqual, LabelBy, by),
		labels.MustNewMatcher(labels.MatchEqual, LabelDirection, direction),
	}
	if tin != "" {
		metric = TinSojourn
		match = append(match, labels.MustNewMatcher(labels.MatchEqual, LabelTin, tin))
	}
	match = append(match, labels.MustNewMatcher(labels.MatchEqual, model.MetricNameLabel, metric))
	lives, err := h.lives(ctx, by, from.UnixMilli(), to.UnixMilli())
	if err != nil {
		return nil, err
	}
	all := map[string]*engine.Histogram{}
	looks := map[int64]map[counter]int64{}
	for c, l := range lives {
		all[c.group] = &engine.Histogram{}
		look(looks, c, l, from.UnixMilli())
	}
	for at, signs := range looks {
		if err := h.add(ctx, by, match, at, signs, all); err != nil {
			return nil, err
		}
	}
	return all, nil
}

// counter names the series of one kind that a controller writes of a group.
type counter struct{ controller, group string }

func counterOf(l labels.Labels, by string) counter {
	return counter{l.Get(LabelController), l.Get(GroupLabel(by))}
}

// life is the time from when a group's counters began at 0 to when they did so
// again.
type life struct {
	began       float64 // seconds since 1970
	first, last int64   // samples of it; milliseconds since 1970
}

// lives returns the lives of each group that lie between two times. The first one
// may have been there at from: then its first sample is what held at from.
func (h *History) lives(ctx context.Context, by string, from, to int64) (map[counter][]life, error) {
	q, err := h.Querier(from-lookback.Milliseconds(), to)
	if err != nil {
		return nil, err
	}
	set := q.Select(ctx, false, nil,
		labels.MustNewMatcher(labels.MatchEqual, LabelBy, by),
		labels.MustNewMatcher(labels.MatchEqual, model.MetricNameLabel, Start))
	all := map[counter][]life{}
	var it chunkenc.Iterator
	for set.Next() {
		var of []life
		it = set.At().Iterator(it)
		for it.Next() == chunkenc.ValFloat {
			at, began := it.At()
			switch last := len(of) - 1; {
			case value.IsStaleNaN(began):
			case at <= from:
				of = append(of[:0], life{began, at, at})
			case last >= 0 && of[last].began == began:
				of[last].last = at
			default:
				of = append(of, life{began, at, at})
			}
		}
		if err := it.Err(); err != nil {
			return nil, errors.Join(fmt.Errorf("history: %s: %w", set.At().Labels(), err), q.Close())
		}
		all[counterOf(set.At().Labels(), by)] = of
	}
	if err := errors.Join(set.Err(), q.Close()); err != nil {
		return nil, fmt.Errorf("history: %w", err)
	}
	return all, nil
}

// look notes when a counter is to be looked up, and whether its value then is
// added or taken away.
func look(looks map[int64]map[counter]int64, c counter, lives []life, from int64) {
	note := func(at, sign int64) {
		if looks[at] == nil {
			looks[at] = map[counter]int64{}
		}
		looks[at][c] += sign
	}
	for i, l := range lives {
		note(l.last, 1)
		// What began before the window and was not written about then counts
		// from where it was seen first.
		if i == 0 && int64(l.began*1000) <= from {
			note(l.first, -1)
		}
	}
}

// fewGroups is how many groups are looked for by name; above it, all of them.
const fewGroups = 20

// add looks up counters at one time.
func (h *History) add(ctx context.Context, by string, match []*labels.Matcher, at int64, signs map[counter]int64, all map[string]*engine.Histogram) error {
	if len(signs) <= fewGroups && len(signs) < len(all) {
		var names []string
		for c := range signs {
			names = append(names, regexp.QuoteMeta(c.group))
		}
		only, err := labels.NewMatcher(labels.MatchRegexp, GroupLabel(by), strings.Join(names, "|"))
		if err != nil {
			return fmt.Errorf("history: %w", err)
		}
		match = append(slices.Clip(match), only)
	}
	q, err := h.Querier(at, at)
	if err != nil {
		return err
	}
	set := q.Select(ctx, false, nil, match...)
	var it chunkenc.Iterator
	var n histogram.Histogram
	for set.Next() {
		c := counterOf(set.At().Labels(), by)
		if signs[c] == 0 {
			continue
		}
		it = set.At().Iterator(it)
		if it.Next() == chunkenc.ValHistogram {
			_, v := it.AtHistogram(&n)
			addNative(all[c.group], v, signs[c])
		}
		if err := it.Err(); err != nil {
			return errors.Join(fmt.Errorf("history: %s: %w", set.At().Labels(), err), q.Close())
		}
	}
	if err := errors.Join(set.Err(), q.Close()); err != nil {
		return fmt.Errorf("history: %w", err)
	}
	return nil
}
