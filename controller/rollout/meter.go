package rollout

import (
	"sync"
	"sync/atomic"
	"time"
)

// Meter sums up what the routers of rollouts count, wave by wave: since the
// newest step was opened and answered, and before a wave was changed. It has
// what reports to this controller.
type Meter struct {
	tapes atomic.Pointer[[]*tape] // of rollouts that go on

	mu   sync.Mutex // for Watch
	byID map[string]*tape
}

// tape is one rollout's sums.
type tape struct {
	mu    sync.Mutex
	live  *Live     // guarded by mu; the newest that was seen
	since time.Time // guarded by mu
	waves []sums    // guarded by mu
}

// sums is of one wave.
type sums struct {
	now, past       Figures
	nowIDs, pastIDs map[uint64]struct{} // places that have reported
}

// NewMeter returns a meter that nothing was counted with.
func NewMeter() *Meter {
	m := &Meter{byID: map[string]*tape{}}
	m.tapes.Store(&[]*tape{})
	return m
}

// Watch tells the meter how a rollout is now; nil: it is gone.
func (m *Meter) Watch(id string, l *Live, now time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	t := m.byID[id]
	switch {
	case l == nil || l.Phase.Final():
		if t == nil {
			return
		}
		delete(m.byID, id)
	case t == nil:
		m.byID[id] = &tape{live: l, since: now, waves: make([]sums, l.NumWaves())}
	default:
		t.turn(l, now)
		return
	}
	all := make([]*tape, 0, len(m.byID))
	for _, t := range m.byID {
		all = append(all, t)
	}
	m.tapes.Store(&all)
}

// turn begins to count anew where another part of the rollout begins.
func (t *tape) turn(l *Live, now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	was := t.live
	if l.Revision < was.Revision {
		return // it comes late
	}
	t.live = l
	if l.Opened == was.Opened && (l.Phase != Soaking || was.Phase == Soaking) {
		return
	}
	if l.Opened > was.Opened {
		for wave := was.Wave() + 1; wave <= l.Wave(); wave++ {
			w := &t.waves[wave]
			w.past, w.pastIDs = w.now, w.nowIDs
		}
	}
	for i := range t.waves {
		t.waves[i].now, t.waves[i].nowIDs = Figures{}, nil
	}
	t.since = now
}

// Count takes in what a router counted in a span that ends now. count fills in
// the figures of one router, and is not called if no rollout is interested. What
// began before the time that is counted is left out.
func (m *Meter) Count(router string, now time.Time, span time.Duration, count func(*Figures)) {
	all := *m.tapes.Load()
	if len(all) == 0 {
		return
	}
	var f Figures
	counted := false
	for _, t := range all {
		t.mu.Lock()
		place := Place(t.live.Seed, router)
		slack := time.Second + span/10 // clocks differ, and reports are on their way
		if step, ok := t.live.steps[place]; ok && !now.Add(slack-span).Before(t.since) {
			if !counted {
				count(&f)
				counted = true
			}
			t.waves[t.live.Steps[step].Wave].add(place, &f)
		}
		t.mu.Unlock()
	}
}

func (s *sums) add(place uint64, f *Figures) {
	if s.nowIDs == nil {
		s.nowIDs = map[uint64]struct{}{}
	}
	s.nowIDs[place] = struct{}{}
	s.now.Add(f)
	s.now.Routers = len(s.nowIDs)
}

// Fill fills in the figures of a report on a rollout as it is in l; false if
// the meter doesn't know that state.
func (m *Meter) Fill(l *Live, r *Report) bool {
	m.mu.Lock()
	t := m.byID[l.ID]
	m.mu.Unlock()
	if t == nil {
		return false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.live.Revision != l.Revision {
		return false
	}
	r.Since = t.since
	for i := range t.waves {
		w := &t.waves[i]
		if i <= l.Wave() {
			r.ChangedFigures.Add(&w.now)
			r.PastFigures.Add(&w.past)
		} else {
			r.ControlFigures.Add(&w.now)
		}
	}
	return true
}
