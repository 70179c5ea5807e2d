package store

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"strings"
	"time"

	"github.com/cakefleet/cakefleet/controller/rollout"
	"github.com/cakefleet/cakefleet/controller/schedule"
	"github.com/cakefleet/cakefleet/internal/plan"
)

const (
	// startedKey is a marker that moves with every rollout that is made, so that
	// two for the same routers can't be made at once.
	startedKey = Prefix + refs + "rollouts"

	// chunk is how many places are in one record.
	chunk = 64 << 10
)

type (
	rolloutRecord struct {
		Schema     int               `json:"schema"`
		Plan       string            `json:"plan,omitempty"`
		Labels     map[string]string `json:"labels,omitempty"`
		Model      string            `json:"model,omitempty"`
		Listed     bool              `json:"listed,omitempty"`
		Set        map[string]string `json:"set,omitempty"`
		Versions   map[string]string `json:"versions,omitempty"`
		Note       string            `json:"note,omitempty"`
		Base       plan.Revision     `json:"base,omitempty"`
		LinkHash   string            `json:"link_hash,omitempty"`
		Whole      bool              `json:"whole,omitempty"`
		Waves      []string          `json:"waves"`
		Steps      []rollout.Step    `json:"steps"`
		SoakS      float64           `json:"soak_s"`
		AnswerS    float64           `json:"answer_s"`
		Gates      []string          `json:"gates,omitempty"`
		MinSamples uint64            `json:"min_samples,omitempty"`
		OnFailure  string            `json:"on_failure"`
		PerSite    int               `json:"per_site,omitempty"`
		SiteLabel  string            `json:"site_label,omitempty"`
		Windows    []string          `json:"windows,omitempty"`
		Zone       string            `json:"zone,omitempty"`
		Start      string            `json:"start,omitempty"`
		Approval   bool              `json:"approval,omitempty"`
		Queued     bool              `json:"queued,omitempty"`
		Seed       uint64            `json:"seed"`
		Places     string            `json:"places,omitempty"`
		By         string            `json:"by,omitempty"`
		Created    time.Time         `json:"created"`

		Phase       string          `json:"phase"`
		Since       time.Time       `json:"since"`
		Opened      int             `json:"opened"`
		Touched     int             `json:"touched"`
		OpenedAt    time.Time       `json:"opened_at,omitzero"`
		Passed      int             `json:"passed,omitempty"`
		Settled     bool            `json:"settled,omitempty"`
		Reason      string          `json:"reason,omitempty"`
		CommandBy   string          `json:"command_by,omitempty"`
		Approved    string          `json:"approved,omitempty"`
		Verdicts    []verdictRecord `json:"verdicts,omitempty"`
		Effect      plan.Revision   `json:"effect,omitempty"`
		EffectSince time.Time       `json:"effect_since,omitzero"`
		Finished    time.Time       `json:"finished,omitzero"`
		Updated     time.Time       `json:"updated"`
	}
	verdictRecord struct {
		Wave      int       `json:"wave"`
		Gate      string    `json:"gate"`
		Result    string    `json:"result"`
		Value     float64   `json:"value"`
		Limit     float64   `json:"limit"`
		Reference float64   `json:"reference,omitempty"`
		Samples   uint64    `json:"samples"`
		Time      time.Time `json:"time"`
		Why       string    `json:"why"`
	}
)

func encodeRollout(v rollout.Rollout, now time.Time) []byte {
	r := rolloutRecord{
		Schema: schema, Plan: v.Selector.Plan, Labels: v.Selector.Labels, Model: v.Selector.Model, Listed: v.Selector.Listed,
		Set: v.Set.Words(), Versions: v.Versions, Note: v.Note, Base: v.Base, LinkHash: v.LinkHash, Whole: v.Whole, Steps: v.Steps,
		SoakS: v.Soak.Seconds(), AnswerS: v.AnswerTime.Seconds(), MinSamples: v.MinSamples, OnFailure: v.OnFailure.String(),
		PerSite: v.PerSite, SiteLabel: v.SiteLabel, Zone: v.Zone, Start: v.Start.String(), Approval: v.Approval, Queued: v.Queued,
		Seed: v.Seed, Places: v.Places, By: v.Author, Created: v.Created,
		Phase: v.Phase.String(), Since: v.Since, Opened: v.Opened, Touched: v.Touched, OpenedAt: v.OpenedAt, Passed: v.Passed, Settled: v.Settled,
		Reason: v.Reason, CommandBy: v.By, Approved: v.Approved, Effect: v.Effect, EffectSince: v.EffectSince, Finished: v.Finished, Updated: now,
	}
	for _, w := range v.Waves {
		r.Waves = append(r.Waves, w.String())
	}
	for _, g := range v.Gates {
		r.Gates = append(r.Gates, g.String())
	}
	for _, w := range v.Windows {
		r.Windows = append(r.Windows, w.String())
	}
	for _, x := range v.Verdicts {
		r.Verdicts = append(r.Verdicts, verdictRecord{
			Wave: x.Wave, Gate: x.Gate, Result: x.Result.String(), Value: x.Value, Limit: x.Limit, Reference: x.Reference, Samples: x.Samples, Time: x.Time, Why: x.Why,
		})
	}
	return encode(r)
}

func decodeRollout(id string, value []byte, rev plan.Revision) (v rollout.Rollout, err error) {
	var r rolloutRecord
	if err := decode(value, &r, &r.Schema); err != nil {
		return v, err
	}
	seconds := func(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
	v = rollout.Rollout{
		Revision: rev,
		Spec: rollout.Spec{
			ID: id, Selector: rollout.Selector{Plan: r.Plan, Labels: r.Labels, Model: r.Model, Listed: r.Listed},
			Versions: r.Versions, Note: r.Note, Base: r.Base, LinkHash: r.LinkHash, Whole: r.Whole, Steps: r.Steps,
			Soak: seconds(r.SoakS), AnswerTime: seconds(r.AnswerS), MinSamples: r.MinSamples, PerSite: r.PerSite, SiteLabel: r.SiteLabel,
			Zone: r.Zone, Approval: r.Approval, Queued: r.Queued, Seed: r.Seed, Places: r.Places, Author: r.By, Created: r.Created,
		},
		State: rollout.State{
			Since: r.Since, Opened: r.Opened, Touched: r.Touched, OpenedAt: r.OpenedAt, Passed: r.Passed, Settled: r.Settled, Reason: r.Reason,
			By: r.CommandBy, Approved: r.Approved, Effect: r.Effect, EffectSince: r.EffectSince, Finished: r.Finished,
		},
	}
	if r.Opened < 0 || r.Opened > len(r.Steps) || r.Touched < r.Opened || r.Touched > len(r.Steps) {
		return v, fmt.Errorf("opened: %d of %d steps, %d ever were", r.Opened, len(r.Steps), r.Touched)
	}
	if v.Set, err = plan.ParseSettings(r.Set); err != nil {
		return v, fmt.Errorf("set: %w", err)
	}
	if v.OnFailure, err = rollout.ParseOnFailure(r.OnFailure); err != nil {
		return v, err
	}
	if v.Start, err = schedule.ParseClock(r.Start); err != nil {
		return v, fmt.Errorf("start: %w", err)
	}
	if v.Phase, err = rollout.ParsePhase(r.Phase); err != nil {
		return v, err
	}
	if v.Waves, err = parseAll(r.Waves, rollout.ParseSize); err != nil {
		return v, err
	}
	if v.Gates, err = parseAll(r.Gates, rollout.ParseGate); err != nil {
		return v, err
	}
	if v.Windows, err = parseAll(r.Windows, schedule.ParseWindow); err != nil {
		return v, err
	}
	v.Verdicts, err = parseAll(r.Verdicts, func(x verdictRecord) (rollout.Verdict, error) {
		result, err := rollout.ParseResult(x.Result)
		return rollout.Verdict{Wave: x.Wave, Gate: x.Gate, Result: result, Value: x.Value, Limit: x.Limit, Reference: x.Reference, Samples: x.Samples, Time: x.Time, Why: x.Why}, err
	})
	return v, err
}

func parseAll[F, T any](from []F, parse func(F) (T, error)) (to []T, err error) {
	for _, f := range from {
		v, err := parse(f)
		if err != nil {
			return nil, err
		}
		to = append(to, v)
	}
	return to, nil
}

// places is a part of a rollout's frozen targets.
type places struct {
	id       string
	all      []uint64
	revision plan.Revision
}

// Rollout returns a rollout; ok is false if there is none of that id.
func (s *State) Rollout(id string) (l *rollout.Live, ok bool) {
	l, ok = s.rollouts.byID[id]
	return l, ok
}

// Rollouts yields the rollouts whose id comes after an id, in order.
func (s *State) Rollouts(after string) iter.Seq[*rollout.Live] { return s.rollouts.after(after) }

// RolloutSet returns the rollouts that have, or had, an effect.
func (s *State) RolloutSet() *rollout.Set { return s.rolloutSet }

// RoutersOf yields the routers that a rollout means, each with its step.
func (s *State) RoutersOf(l *rollout.Live) iter.Seq2[string, int] {
	return func(yield func(string, int) bool) {
		all := maps.Values(s.routers.byID)
		if l.Selector.Plan != "" {
			all = s.routersOfPlan[l.Selector.Plan].values()
		}
		for r := range all {
			if r.subscriber == nil {
				continue
			}
			if step, ok := l.Step(r.ID, r.subscriber); ok && !yield(r.ID, step) {
				return
			}
		}
	}
}

// affectedByRollout yields the routers of the steps that a change is about.
func (s *State) affectedByRollout(c Change) iter.Seq[string] {
	return func(yield func(string) bool) {
		l, ok := s.rollouts.byID[c.ID]
		if !ok || c.Steps[0] == c.Steps[1] {
			return
		}
		for id, step := range s.RoutersOf(l) {
			if step >= c.Steps[0] && step < c.Steps[1] && !yield(id) {
				return
			}
		}
	}
}

// stepsChanged returns between which steps something changes for routers.
func stepsChanged(was, is *rollout.Live) [2]int {
	var a, b rollout.State
	if is == nil && was != nil && !was.InEffect() {
		return [2]int{} // an old record is removed
	}
	if was != nil {
		a = was.State
	}
	if is != nil {
		b = is.State
	}
	switch {
	case a.Opened != b.Opened && (a.Opened == 0 || b.Opened == 0 || a.Effect == b.Effect):
		return [2]int{min(a.Opened, b.Opened), max(a.Opened, b.Opened)}
	case a.Opened < b.Opened:
		return [2]int{a.Opened, b.Opened}
	case a.Effect != b.Effect:
		return [2]int{0, max(a.Touched, b.Touched)}
	default:
		return [2]int{}
	}
}

func (s *State) setRollout(id string, r rollout.Rollout, exists bool) error {
	s.rolloutsOld = true
	if !exists {
		s.rollouts.set(id, nil, false)
		return nil
	}
	if old, had := s.rollouts.byID[id]; had && old.Places == r.Places && old.Seed == r.Seed {
		s.rollouts.set(id, old.With(r), true)
		return nil
	}
	var all []uint64
	for p := range s.places.after(r.Places + "/") {
		if !strings.HasPrefix(p.id, r.Places+"/") || r.Places == "" {
			break
		}
		all = append(all, p.all...)
	}
	l, err := rollout.NewLive(r, all)
	if err != nil {
		return err
	}
	s.rollouts.set(id, l, true)
	return nil
}

// StartRollout stores a new rollout with the places of its targets, if none was
// made since the state had revision seen. Errors: ErrInvalid, ErrExists,
// ErrConflict if another one was made meanwhile.
func (s *Store) StartRollout(ctx context.Context, r rollout.Rollout, all []uint64, seen plan.Revision) (rollout.Rollout, error) {
	fail := func(err error) (rollout.Rollout, error) {
		return rollout.Rollout{}, fmt.Errorf("start rollout %s: %w", r.ID, err)
	}
	if err := r.Validate(); err != nil {
		return rollout.Rollout{}, invalid(KindRollout, r.ID, err)
	}
	r.Created = stamp()
	r.Since = r.Created
	r.Places = r.ID + "-" + random()
	for i := 0; i*chunk < len(all); i++ {
		part := all[i*chunk : min((i+1)*chunk, len(all))]
		op := Op{key(KindPlace, fmt.Sprintf("%s/%06d", r.Places, i)), rollout.EncodePlaces(part)}
		if _, err := s.kv.Txn(ctx, nil, []Op{op}); err != nil {
			return fail(err)
		}
	}
	res, err := s.kv.Txn(ctx,
		[]Compare{{key(KindRollout, r.ID), Equal, 0}, {startedKey, Less, int64(seen) + 1}},
		[]Op{{key(KindRollout, r.ID), encodeRollout(r, r.Created)}, {startedKey, []byte(r.ID)}})
	if err != nil {
		return fail(err)
	}
	r.Revision = plan.Revision(res.Revision)
	if err := s.await(ctx, r.Revision); err != nil {
		return fail(err)
	}
	if res.OK {
		return r, nil
	}
	s.forget(ctx, r.Places, len(all))
	if it := find(res.Items, key(KindRollout, r.ID)); it != nil {
		return rollout.Rollout{}, &Error{Kind: KindRollout, ID: r.ID, Err: ErrExists, Have: plan.Revision(it.Revision), Updated: updated(it.Value)}
	}
	return rollout.Rollout{}, &Error{Kind: KindRollout, ID: r.ID, Err: ErrConflict, Want: seen, Have: r.Revision, Updated: stamp()}
}

// forget removes places that no rollout names. What remains after an error is
// removed by SweepPlaces.
func (s *Store) forget(ctx context.Context, name string, n int) {
	res, err := s.kv.Txn(ctx, nil, forgetOps(name, n))
	if err == nil {
		err = s.await(ctx, plan.Revision(res.Revision))
	}
	if err != nil {
		s.logger.Debug("forget targets", "error", err)
	}
}

func forgetOps(name string, n int) (ops []Op) {
	for i := 0; i*chunk < n; i++ {
		ops = append(ops, Op{key(KindPlace, fmt.Sprintf("%s/%06d", name, i)), nil})
	}
	return ops
}

// PutRollout stores a rollout's state; effect tells that routers' desired
// states change with it. expect is the revision that the stored one must have.
// Errors: ErrNotFound, ErrConflict.
func (s *Store) PutRollout(ctx context.Context, r rollout.Rollout, expect plan.Revision, effect bool) (rollout.Rollout, error) {
	w := s.rolloutWrite(&r, expect, effect)
	var err error
	r.Revision, err = s.put(ctx, w)
	return r, err
}

func (s *Store) rolloutWrite(r *rollout.Rollout, expect plan.Revision, effect bool) write {
	now := stamp()
	if effect {
		r.Effect, r.EffectSince = max(s.Revision(), expect), now
	}
	var more []Op
	old := r.Forgettable() && now.Sub(r.Finished) > rollout.KeepTargets
	if gone := r.Phase == rollout.Overtaken || r.Settled || old; gone && r.Places != "" {
		more = forgetOps(r.Places, r.Size(r.NumWaves()))
		r.Places = ""
	}
	return write{kind: KindRollout, id: r.ID, value: encodeRollout(*r, now), expect: expect, more: more}
}

// RemoveRollout removes a rollout that has no effect on any router. expect is
// the revision that it must have. Errors: ErrNotFound, ErrConflict.
func (s *Store) RemoveRollout(ctx context.Context, r *rollout.Rollout, expect plan.Revision) error {
	if !r.Forgettable() {
		return invalid(KindRollout, r.ID, errors.New("rollout has not ended, or routers have what it set"))
	}
	return s.remove(ctx, KindRollout, r.ID, expect) // its targets are swept
}

// SettleRollout stores that a rollout of a whole plan is completed and makes
// the plan what it set, in one transaction: no router notices. Errors: those of
// PutRollout, and ErrConflict if the plan is not as it was.
func (s *Store) SettleRollout(ctx context.Context, r rollout.Rollout, expect plan.Revision) (rollout.Rollout, error) {
	if !r.Whole || r.Base == 0 {
		return r, invalid(KindRollout, r.ID, errors.New("rollout is not of a whole plan"))
	}
	var p plan.Plan
	var ok bool
	s.View(func(st *State) { p, ok = st.Plan(r.Selector.Plan) })
	if !ok {
		return r, notFound(KindPlan, r.Selector.Plan)
	}
	r.Set.Over(&p.Link)
	if err := p.Validate(); err != nil {
		return r, invalid(KindPlan, p.Name, err)
	}
	p.Updated, p.Author = stamp(), r.Author
	value := encodePlan(p)
	keep, err := s.historyOps(ctx, p, value)
	if err != nil {
		return r, fmt.Errorf("settle rollout %s: %w", r.ID, err)
	}
	r.Settled = true
	t := txn{}
	t.add(write{kind: KindPlan, id: p.Name, value: value, expect: r.Base, more: keep})
	t.add(s.rolloutWrite(&r, expect, true))
	r.Revision, err = s.commit(ctx, &t)
	return r, err
}

// SweepPlaces removes the targets of rollouts that were never made, or are not
// kept any more, if they were so at the call before too. It returns the names of
// those that there are now, for the next call.
func (s *Store) SweepPlaces(ctx context.Context, before map[string]bool) (orphans map[string]bool, err error) {
	orphans = map[string]bool{}
	var ops []Op
	s.View(func(st *State) {
		used := map[string]bool{}
		for l := range st.rollouts.after("") {
			used[l.Places] = true
		}
		for p := range st.places.after("") {
			name, _, _ := strings.Cut(p.id, "/")
			if used[name] {
				continue
			}
			if before[name] && len(ops) < maxOps {
				ops = append(ops, Op{key(KindPlace, p.id), nil})
			} else {
				orphans[name] = true
			}
		}
	})
	if len(ops) == 0 {
		return orphans, nil
	}
	_, err = s.kv.Txn(ctx, nil, ops)
	return orphans, err
}
