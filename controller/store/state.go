package store

import (
	"iter"
	"strings"

	"github.com/google/btree"

	"github.com/cakefleet/cakefleet/internal/plan"
)

// State is the copy of all records in memory. It is only valid inside View;
// values may be kept, but their maps must not be changed.
type State struct {
	revision    plan.Revision
	plans       table[plan.Plan]
	subscribers table[plan.Subscriber]
	routers     table[plan.Router]
	tokens      table[Token]
	modified    map[string]plan.Revision // of subscribers whose key has another revision than the record
	changed     int64                    // revision of changedKey
	commit      commit                   // the import that counts and is not rolled forward; its id is empty if there is none

	// Indexes. They follow references even if the target doesn't exist, so
	// that a record that somebody removed by hand can be named.
	subscribersOfPlan   index
	routersOfSubscriber index
	routersOfPlan       index // through the subscriber
}

// Change is one record that is not as it was.
type Change struct {
	Kind     Kind
	ID       string
	Revision plan.Revision // of the change; for a deletion it may be newer
	Deleted  bool
}

func newState() *State {
	return &State{
		plans:               newTable[plan.Plan](),
		subscribers:         newTable[plan.Subscriber](),
		routers:             newTable[plan.Router](),
		tokens:              newTable[Token](),
		modified:            map[string]plan.Revision{},
		subscribersOfPlan:   newIndex(),
		routersOfSubscriber: newIndex(),
		routersOfPlan:       newIndex(),
	}
}

// Revision returns the revision up to which the state is complete.
func (s *State) Revision() plan.Revision { return s.revision }

// Plan returns a plan; ok is false if there is none of that name.
func (s *State) Plan(name string) (p plan.Plan, ok bool) {
	p, ok = s.plans.byID[name]
	return p, ok
}

// Subscriber returns a subscriber; ok is false if there is none of that id.
func (s *State) Subscriber(id string) (sub plan.Subscriber, ok bool) {
	sub, ok = s.subscribers.byID[id]
	return sub, ok
}

// Router returns a router; ok is false if there is none of that id.
func (s *State) Router(id string) (r plan.Router, ok bool) {
	r, ok = s.routers.byID[id]
	return r, ok
}

// Token returns a join token; ok is false if there is none of that id.
func (s *State) Token(id string) (t Token, ok bool) {
	t, ok = s.tokens.byID[id]
	return t, ok
}

// Plans yields the plans whose name comes after a name, in order; "" is before
// all.
func (s *State) Plans(after string) iter.Seq[plan.Plan] { return s.plans.after(after) }

// Subscribers yields the subscribers whose id comes after an id, in order.
func (s *State) Subscribers(after string) iter.Seq[plan.Subscriber] {
	return s.subscribers.after(after)
}

// Routers yields the routers whose id comes after an id, in order.
func (s *State) Routers(after string) iter.Seq[plan.Router] { return s.routers.after(after) }

// Tokens yields the join tokens whose id comes after an id, in order.
func (s *State) Tokens(after string) iter.Seq[Token] { return s.tokens.after(after) }

// SubscribersOfPlan yields the subscribers that refer to a plan and whose id
// comes after an id, in order.
func (s *State) SubscribersOfPlan(name, after string) iter.Seq[plan.Subscriber] {
	return pick(s.subscribersOfPlan.after(name, after), s.subscribers.byID)
}

// RoutersOfSubscriber yields the routers that serve a subscriber, in order.
func (s *State) RoutersOfSubscriber(id string) iter.Seq[plan.Router] {
	return pick(s.routersOfSubscriber.after(id, ""), s.routers.byID)
}

// RoutersOfPlan yields the routers that a plan reaches and whose id comes
// after an id, in order.
func (s *State) RoutersOfPlan(name, after string) iter.Seq[plan.Router] {
	return pick(s.routersOfPlan.after(name, after), s.routers.byID)
}

// CountSubscribers returns how many subscribers refer to a plan.
func (s *State) CountSubscribers(planName string) int { return s.subscribersOfPlan.count[planName] }

// CountRouters returns how many routers a plan reaches.
func (s *State) CountRouters(planName string) int { return s.routersOfPlan.count[planName] }

// Len returns how many plans, subscribers and routers there are.
func (s *State) Len() (plans, subscribers, routers int) {
	return len(s.plans.byID), len(s.subscribers.byID), len(s.routers.byID)
}

// Affected yields the ids of the routers whose desired state depends on what
// changed. It costs what it yields.
func (s *State) Affected(c Change) iter.Seq[string] {
	switch c.Kind {
	case KindPlan:
		return s.routersOfPlan.after(c.ID, "")
	case KindSubscriber:
		return s.routersOfSubscriber.after(c.ID, "")
	case KindRouter:
		return func(yield func(string) bool) { yield(c.ID) }
	default:
		return func(func(string) bool) {}
	}
}

func (s *State) setSubscriber(id string, sub plan.Subscriber, exists bool) {
	delete(s.modified, id)
	old, had := s.subscribers.byID[id]
	if had && exists && old.Layers == nil && sub.Layers == nil && old.Plan == sub.Plan {
		s.subscribers.byID[id] = sub
		return
	}
	if had {
		for _, name := range old.Plans() {
			s.subscribersOfPlan.remove(name, id)
			for r := range s.routersOfSubscriber.after(id, "") {
				s.routersOfPlan.remove(name, r)
			}
		}
	}
	s.subscribers.set(id, sub, exists)
	if !exists {
		return
	}
	for _, name := range sub.Plans() {
		s.subscribersOfPlan.add(name, id)
		for r := range s.routersOfSubscriber.after(id, "") {
			s.routersOfPlan.add(name, r)
		}
	}
}

func (s *State) setRouter(id string, r plan.Router, exists bool) {
	if old, had := s.routers.byID[id]; had && old.Subscriber != "" {
		s.routersOfSubscriber.remove(old.Subscriber, id)
		if sub, ok := s.subscribers.byID[old.Subscriber]; ok {
			for _, name := range sub.Plans() {
				s.routersOfPlan.remove(name, id)
			}
		}
	}
	s.routers.set(id, r, exists)
	if exists && r.Subscriber != "" {
		s.routersOfSubscriber.add(r.Subscriber, id)
		if sub, ok := s.subscribers.byID[r.Subscriber]; ok {
			for _, name := range sub.Plans() {
				s.routersOfPlan.add(name, id)
			}
		}
	}
}

// users returns how many records refer to a record, and the first of them.
func (s *State) users(k Kind, id string) (count int, first string) {
	var x *index
	switch k {
	case KindPlan:
		x = &s.subscribersOfPlan
	case KindSubscriber:
		x = &s.routersOfSubscriber
	case KindRouter, KindToken:
		return 0, "" // nothing refers to them
	}
	for first = range x.after(id, "") {
		break
	}
	return x.count[id], first
}

// revisionOf returns the revision of a record; 0 if there is none.
func (s *State) revisionOf(k Kind, id string) plan.Revision {
	switch k {
	case KindPlan:
		return s.plans.byID[id].Revision
	case KindSubscriber:
		return s.subscribers.byID[id].Revision
	case KindRouter:
		return s.routers.byID[id].Revision
	case KindToken:
		return s.tokens.byID[id].Revision
	default:
		return 0
	}
}

// stored returns the revision of the key of a subscriber whose record has a
// revision.
func (s *State) stored(id string, rev plan.Revision) plan.Revision {
	if m, ok := s.modified[id]; ok && s.subscribers.byID[id].Revision == rev {
		return m
	}
	return rev
}

// remove takes a record out; false if there was none.
func (s *State) remove(k Kind, id string) bool {
	if s.revisionOf(k, id) == 0 {
		return false
	}
	switch k {
	case KindPlan:
		s.plans.set(id, plan.Plan{}, false)
	case KindSubscriber:
		s.setSubscriber(id, plan.Subscriber{}, false)
	case KindRouter:
		s.setRouter(id, plan.Router{}, false)
	case KindToken:
		s.tokens.set(id, Token{}, false)
	}
	return true
}

// put decodes a record and takes it in. After an error the state is as before.
func (s *State) put(k Kind, id string, value []byte, rev plan.Revision) error {
	switch k {
	case KindPlan:
		p, err := decodePlan(id, value, rev)
		if err != nil {
			return err
		}
		s.plans.set(id, p, true)
	case KindSubscriber:
		sub, err := decodeSubscriber(id, value, rev)
		if err != nil {
			return err
		}
		s.setSubscriber(id, sub, true)
		if sub.Revision != rev {
			s.modified[id] = rev
		}
	case KindRouter:
		r, err := decodeRouter(id, value, rev)
		if err != nil {
			return err
		}
		s.setRouter(id, r, true)
	case KindToken:
		t, err := decodeToken(id, value, rev)
		if err != nil {
			return err
		}
		s.tokens.set(id, t, true)
	}
	return nil
}

// records yields every record that the state has.
func (s *State) records() iter.Seq2[Kind, string] {
	return func(yield func(Kind, string) bool) {
		for _, t := range []struct {
			kind Kind
			ids  *btree.BTreeG[string]
		}{
			{KindPlan, s.plans.ids},
			{KindSubscriber, s.subscribers.ids},
			{KindRouter, s.routers.ids},
			{KindToken, s.tokens.ids},
		} {
			more := true
			t.ids.Ascend(func(id string) bool {
				more = yield(t.kind, id)
				return more
			})
			if !more {
				return
			}
		}
	}
}

// degree is the branching of the trees; flat around this value.
const degree = 32

// table is a map with its keys in order.
type table[V any] struct {
	byID map[string]V
	ids  *btree.BTreeG[string]
}

func newTable[V any]() table[V] {
	return table[V]{byID: map[string]V{}, ids: btree.NewOrderedG[string](degree)}
}

func (t *table[V]) set(id string, v V, exists bool) {
	if !exists {
		delete(t.byID, id)
		t.ids.Delete(id)
		return
	}
	t.byID[id] = v
	t.ids.ReplaceOrInsert(id)
}

func (t *table[V]) after(id string) iter.Seq[V] {
	return func(yield func(V) bool) {
		t.ids.AscendGreaterOrEqual(id, func(s string) bool {
			return s == id || yield(t.byID[s])
		})
	}
}

// index is a set of pairs in order, with the number of pairs for each first.
type index struct {
	pairs *btree.BTreeG[pair]
	count map[string]int
}

type pair struct{ of, id string }

func newIndex() index {
	return index{
		pairs: btree.NewG(degree, func(a, b pair) bool {
			if c := strings.Compare(a.of, b.of); c != 0 {
				return c < 0
			}
			return a.id < b.id
		}),
		count: map[string]int{},
	}
}

func (x *index) add(of, id string) {
	if _, had := x.pairs.ReplaceOrInsert(pair{of, id}); !had {
		x.count[of]++
	}
}

func (x *index) remove(of, id string) {
	if _, had := x.pairs.Delete(pair{of, id}); !had {
		return
	}
	if x.count[of]--; x.count[of] == 0 {
		delete(x.count, of)
	}
}

func (x *index) after(of, id string) iter.Seq[string] {
	return func(yield func(string) bool) {
		x.pairs.AscendGreaterOrEqual(pair{of, id}, func(p pair) bool {
			if p.of != of {
				return false
			}
			return p.id == id || yield(p.id)
		})
	}
}

func pick[V any](ids iter.Seq[string], from map[string]V) iter.Seq[V] {
	return func(yield func(V) bool) {
		for id := range ids {
			if !yield(from[id]) {
				return
			}
		}
	}
}
