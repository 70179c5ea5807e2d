package store

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/cakefleet/cakefleet/internal/plan"
)

// history/plans/<name>/ has what a plan was. Each record is written in the
// transaction that changes the plan, so that its key has the plan's revision;
// its name only makes it another one.
const history = Prefix + "history/plans/"

// maxHistory is how many revisions of a plan are kept.
const maxHistory = 100

// historyOps returns what keeps a plan's new revision, and forgets those that
// are too many.
func (s *Store) historyOps(ctx context.Context, p plan.Plan, value []byte) ([]Op, error) {
	prefix := history + p.Name + "/"
	ops := []Op{{prefix + p.Updated.Format("20060102T150405.000000Z") + "-" + random(), value}}
	items, _, err := s.kv.List(ctx, prefix)
	if err != nil {
		return nil, err
	}
	newestFirst(items)
	for i := maxHistory - 1; i < len(items) && len(ops) < maxOps/2; i++ {
		ops = append(ops, Op{items[i].Key, nil})
	}
	return ops, nil
}

func newestFirst(items []Item) {
	slices.SortFunc(items, func(a, b Item) int { return cmp.Compare(b.Revision, a.Revision) })
}

// PlanHistory returns what a plan was, newest first, also if it was removed.
// Errors: ErrNotFound if there never was one of that name.
func (s *Store) PlanHistory(ctx context.Context, name string) ([]plan.Plan, error) {
	if err := plan.ValidateName("plan", name); err != nil {
		return nil, invalid(KindPlan, name, err)
	}
	items, _, err := s.kv.List(ctx, history+name+"/")
	if err != nil {
		return nil, fmt.Errorf("history of plan %s: %w", name, err)
	}
	newestFirst(items)
	var all []plan.Plan
	for _, it := range items {
		p, err := decodePlan(name, it.Value, plan.Revision(it.Revision))
		if err != nil {
			return nil, fmt.Errorf("history of plan %s: %s: %w", name, it.Key, err)
		}
		all = append(all, p)
	}
	// A plan that was stored before there was a history is its own.
	var current plan.Plan
	var exists bool
	s.View(func(st *State) { current, exists = st.Plan(name) })
	if exists && !slices.ContainsFunc(all, func(p plan.Plan) bool { return p.Revision >= current.Revision }) {
		all = slices.Insert(all, 0, current)
	}
	if len(all) == 0 {
		return nil, notFound(KindPlan, name)
	}
	return all, nil
}
