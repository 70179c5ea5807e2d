package store

import (
	"iter"
	"slices"
	"strings"

	"github.com/google/btree"

	"github.com/cakefleet/cakefleet/controller/rollout"
	"github.com/cakefleet/cakefleet/controller/schedule"
	"github.com/cakefleet/cakefleet/internal/plan"
)

// State is the copy of all records in memory. It is only valid inside View;
// values may be kept, but their maps must not be changed.
type State struct {
	revision    plan.Revision
	plans       table[*plan.Plan]
	subscribers table[*plan.Subscriber]
	routers     table[*router]
	tokens      table[Token]
	cas         table[CA]
	trusts      table[trust]
	schedules   table[schedule.Schedule]
	places      table[places]
	rollouts    table[*rollout.Live]
	restores    table[Restored]
	operators   table[Operator]
	serials     table[Serial]
	revocations table[Revocation]
	routerOfKey map[plan.Key]string
	modified    map[string]plan.Revision // of subscribers whose key has another revision than the record
	changed     int64                    // revision of changedKey
	commit      commit                   // the import that counts and is not rolled forward; its id is empty if there is none

	// Indexes. They follow references even if the target doesn't exist, so
	// that a record that somebody removed by hand can be named.
	subscribersOfPlan   index[*plan.Subscriber]
	routersOfSubscriber map[string][]*router // in order; few each
	serving             int                  // routers in routersOfSubscriber
	routersOfPlan       index[*router]       // through the subscriber
	schedulesOfPlan     index[string]        // that change to it
	scheduleSet         *schedule.Set
	scheduleSetOld      bool // schedules were changed after scheduleSet was made
	rolloutSet          *rollout.Set
	rolloutsOld         bool // likewise
}

// router is a router beside whom it serves: who asks for one wants the other,
// and in a large fleet each search is a walk through memory that is in no cache.
type router struct {
	plan.Router
	subscriber *plan.Subscriber // nil: nobody, or somebody who does not exist
}

// Change is one record that is not as it was.
type Change struct {
	Kind     Kind
	ID       string
	Revision plan.Revision // of the change; for a deletion it may be newer
	Deleted  bool

	// Steps of a rollout from and to which routers should run something else.
	Steps [2]int
}

func newState() *State {
	return &State{
		plans:               newTable[*plan.Plan](),
		subscribers:         newTable[*plan.Subscriber](),
		routers:             newTable[*router](),
		tokens:              newTable[Token](),
		schedules:           newTable[schedule.Schedule](),
		places:              newTable[places](),
		rollouts:            newTable[*rollout.Live](),
		restores:            newTable[Restored](),
		operators:           newTable[Operator](),
		serials:             newTable[Serial](),
		revocations:         newTable[Revocation](),
		cas:                 newTable[CA](),
		trusts:              newTable[trust](),
		routerOfKey:         map[plan.Key]string{},
		modified:            map[string]plan.Revision{},
		subscribersOfPlan:   index[*plan.Subscriber]{},
		routersOfSubscriber: map[string][]*router{},
		routersOfPlan:       index[*router]{},
		schedulesOfPlan:     index[string]{},
	}
}

// Revision returns the revision up to which the state is complete.
func (s *State) Revision() plan.Revision { return s.revision }

// Plan returns a plan; ok is false if there is none of that name.
func (s *State) Plan(name string) (p plan.Plan, ok bool) {
	if v := s.plans.byID[name]; v != nil {
		return *v, true
	}
	return p, false
}

// PlanNamed returns a plan, which is not to be changed; nil if there is none of
// that name.
func (s *State) PlanNamed(name string) *plan.Plan { return s.plans.byID[name] }

// Subscriber returns a subscriber; ok is false if there is none of that id.
func (s *State) Subscriber(id string) (sub plan.Subscriber, ok bool) {
	if p := s.subscribers.byID[id]; p != nil {
		return *p, true
	}
	return sub, false
}

// Router returns a router; ok is false if there is none of that id.
func (s *State) Router(id string) (r plan.Router, ok bool) {
	if p := s.routers.byID[id]; p != nil {
		return p.Router, true
	}
	return r, false
}

// Served returns a router and whom it serves; nil stands for what does not
// exist. Neither is to be changed, nor kept outside View.
func (s *State) Served(id string) (r *plan.Router, sub *plan.Subscriber) {
	p := s.routers.byID[id]
	if p == nil {
		return nil, nil
	}
	return &p.Router, p.subscriber
}

// Token returns a join token; ok is false if there is none of that id.
func (s *State) Token(id string) (t Token, ok bool) {
	t, ok = s.tokens.byID[id]
	return t, ok
}

// Serial returns an announced serial; ok is false if there is none.
func (s *State) Serial(serial string) (x Serial, ok bool) {
	x, ok = s.serials.byID[serial]
	return x, ok
}

// Serials yields the announced serials that come after one, in order.
func (s *State) Serials(after string) iter.Seq[Serial] { return s.serials.after(after) }

// Revocation returns the revocation of a key; ok is false if it counts.
func (s *State) Revocation(k plan.Key) (r Revocation, ok bool) {
	if len(s.revocations.byID) == 0 {
		return r, false // the usual case, and asked for every session
	}
	r, ok = s.revocations.byID[k.String()]
	return r, ok
}

// RouterOfKey returns the router that has a key; ok is false if none has.
func (s *State) RouterOfKey(k plan.Key) (r plan.Router, ok bool) {
	id, ok := s.routerOfKey[k]
	if !ok {
		return r, false
	}
	return s.Router(id)
}

// Plans yields the plans whose name comes after a name, in order; "" is before
// all.
func (s *State) Plans(after string) iter.Seq[plan.Plan] { return values(s.plans.after(after)) }

// Subscribers yields the subscribers whose id comes after an id, in order.
func (s *State) Subscribers(after string) iter.Seq[plan.Subscriber] {
	return values(s.subscribers.after(after))
}

// Routers yields the routers whose id comes after an id, in order.
func (s *State) Routers(after string) iter.Seq[plan.Router] {
	return routers(s.routers.after(after))
}

// Tokens yields the join tokens whose id comes after an id, in order.
func (s *State) Tokens(after string) iter.Seq[Token] { return s.tokens.after(after) }

// SubscribersOfPlan yields the subscribers that refer to a plan and whose id
// comes after an id, in order.
func (s *State) SubscribersOfPlan(name, after string) iter.Seq[plan.Subscriber] {
	return values(ordered(s.subscribersOfPlan[name], subscriberID, &s.subscribers, after))
}

// RoutersOfSubscriber yields the routers that serve a subscriber, in order.
func (s *State) RoutersOfSubscriber(id string) iter.Seq[plan.Router] {
	return routers(slices.Values(s.routersOfSubscriber[id]))
}

// RoutersOfPlan yields the routers that a plan reaches and whose id comes
// after an id, in order.
func (s *State) RoutersOfPlan(name, after string) iter.Seq[plan.Router] {
	return routers(ordered(s.routersOfPlan[name], routerID, &s.routers, after))
}

// CountSubscribers returns how many subscribers refer to a plan.
func (s *State) CountSubscribers(planName string) int { return s.subscribersOfPlan[planName].len() }

// CountRouters returns how many routers a plan reaches.
func (s *State) CountRouters(planName string) int { return s.routersOfPlan[planName].len() }

// Len returns how many plans, subscribers and routers there are.
func (s *State) Len() (plans, subscribers, routers int) {
	return len(s.plans.byID), len(s.subscribers.byID), len(s.routers.byID)
}

// Unserved returns how many subscribers no router serves, and how many routers
// serve nobody. It costs nothing.
func (s *State) Unserved() (subscribers, routers int) {
	return len(s.subscribers.byID) - len(s.routersOfSubscriber), len(s.routers.byID) - s.serving
}

// Affected yields the ids of the routers whose desired state depends on what
// changed, in no order. It costs what it yields.
func (s *State) Affected(c Change) iter.Seq[string] {
	switch c.Kind {
	case KindPlan:
		return ids(s.routersOfPlan[c.ID].values())
	case KindSubscriber:
		return ids(slices.Values(s.routersOfSubscriber[c.ID]))
	case KindRouter:
		return func(yield func(string) bool) { yield(c.ID) }
	case KindSchedule:
		return s.affectedBySchedule(c.ID)
	case KindRevocation:
		return func(yield func(string) bool) {
			if k, err := plan.ParseKey(c.ID); err == nil {
				if id, ok := s.routerOfKey[k]; ok {
					yield(id)
				}
			}
		}
	case KindRollout:
		return s.affectedByRollout(c)
	default:
		return func(func(string) bool) {}
	}
}

func (s *State) setSubscriber(id string, sub plan.Subscriber, exists bool) {
	delete(s.modified, id)
	old := s.subscribers.byID[id]
	if old != nil && exists && samePlans(old, &sub) {
		*old = sub
		return
	}
	served := s.routersOfSubscriber[id]
	now := old
	if old == nil && exists {
		now = &plan.Subscriber{}
	}
	if old != nil {
		for _, name := range old.Plans() {
			s.subscribersOfPlan.remove(name, old)
			for _, r := range served {
				s.routersOfPlan.remove(name, r)
			}
		}
	}
	if !exists {
		s.subscribers.set(id, nil, false)
		for _, r := range served {
			r.subscriber = nil
		}
		return
	}
	*now = sub
	if old == nil {
		s.subscribers.set(id, now, true)
		for _, r := range served {
			r.subscriber = now
		}
	}
	for _, name := range sub.Plans() {
		s.subscribersOfPlan.add(name, now)
		for _, r := range served {
			s.routersOfPlan.add(name, r)
		}
	}
}

func samePlans(a, b *plan.Subscriber) bool {
	if a.Layers == nil && b.Layers == nil {
		return a.Plan == b.Plan
	}
	return slices.Equal(a.Plans(), b.Plans())
}

func (s *State) setRouter(id string, r plan.Router, exists bool) {
	now := s.routers.byID[id]
	if now != nil {
		if s.routerOfKey[now.Key] == id {
			delete(s.routerOfKey, now.Key)
		}
		s.serve(now, false)
	}
	if !exists {
		s.routers.set(id, nil, false)
		return
	}
	if now == nil {
		now = &router{}
		s.routers.set(id, now, true)
	}
	*now = router{r, s.subscribers.byID[r.Subscriber]}
	if r.Key != (plan.Key{}) {
		s.routerOfKey[r.Key] = id
	}
	s.serve(now, true)
}

// serve puts a router into the indexes of whom it serves, or takes it out.
func (s *State) serve(r *router, does bool) {
	if id := r.Subscriber; id != "" {
		all := s.routersOfSubscriber[id]
		at, _ := slices.BinarySearchFunc(all, r.ID, func(r *router, id string) int { return strings.Compare(r.ID, id) })
		if does {
			all = slices.Insert(all, at, r)
			s.serving++
		} else {
			all = slices.Delete(all, at, at+1)
			s.serving--
		}
		if len(all) == 0 {
			delete(s.routersOfSubscriber, id)
		} else {
			s.routersOfSubscriber[id] = all
		}
	}
	if r.subscriber == nil {
		return
	}
	for _, name := range r.subscriber.Plans() {
		if does {
			s.routersOfPlan.add(name, r)
		} else {
			s.routersOfPlan.remove(name, r)
		}
	}
}

// users returns how many records refer to a record, of the first kind that
// does, and the first of them.
func (s *State) users(k Kind, id string) (by Kind, count int, first string) {
	switch k {
	case KindPlan:
		if subs := s.subscribersOfPlan[id]; subs.len() > 0 {
			return KindSubscriber, subs.len(), slices.Min(slices.Collect(mapped(subs.values(), subscriberID)))
		}
		if all := s.schedulesOfPlan[id]; all.len() > 0 {
			return KindSchedule, all.len(), slices.Min(all.all)
		}
	case KindSubscriber:
		if all := s.routersOfSubscriber[id]; len(all) > 0 {
			return KindRouter, len(all), all[0].ID
		}
	default: // nothing refers to the others
	}
	return "", 0, ""
}

// revisionOf returns the revision of a record; 0 if there is none.
func (s *State) revisionOf(k Kind, id string) plan.Revision {
	switch k {
	case KindPlan:
		if p := s.plans.byID[id]; p != nil {
			return p.Revision
		}
		return 0
	case KindSubscriber:
		if sub := s.subscribers.byID[id]; sub != nil {
			return sub.Revision
		}
		return 0
	case KindRouter:
		if r := s.routers.byID[id]; r != nil {
			return r.Revision
		}
		return 0
	case KindToken:
		return s.tokens.byID[id].Revision
	case KindSchedule:
		return s.schedules.byID[id].Revision
	case KindPlace:
		return s.places.byID[id].revision
	case KindRollout:
		if l, ok := s.rollouts.byID[id]; ok {
			return l.Revision
		}
		return 0
	case KindRestore:
		return s.restores.byID[id].Stored
	case KindOperator:
		return s.operators.byID[id].Revision
	case KindSerial:
		return s.serials.byID[id].Revision
	case KindRevocation:
		return s.revocations.byID[id].Revision
	case KindCA:
		return s.cas.byID[id].Revision
	case KindTrust:
		return s.trusts.byID[id].revision
	default:
		return 0
	}
}

// stored returns the revision of the key of a subscriber whose record has a
// revision.
func (s *State) stored(id string, rev plan.Revision) plan.Revision {
	if m, ok := s.modified[id]; ok && s.revisionOf(KindSubscriber, id) == rev {
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
		s.plans.set(id, nil, false)
	case KindSubscriber:
		s.setSubscriber(id, plan.Subscriber{}, false)
	case KindRouter:
		s.setRouter(id, plan.Router{}, false)
	case KindToken:
		s.tokens.set(id, Token{}, false)
	case KindSchedule:
		s.setSchedule(id, schedule.Schedule{}, false)
	case KindPlace:
		s.places.set(id, places{}, false)
	case KindRollout:
		return s.setRollout(id, rollout.Rollout{}, false) == nil
	case KindRestore:
		s.restores.set(id, Restored{}, false)
	case KindOperator:
		s.operators.set(id, Operator{}, false)
	case KindSerial:
		s.serials.set(id, Serial{}, false)
	case KindRevocation:
		s.revocations.set(id, Revocation{}, false)
	case KindCA:
		s.cas.set(id, CA{}, false)
	case KindTrust:
		s.trusts.set(id, trust{}, false)
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
		s.plans.set(id, &p, true)
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
	case KindSchedule:
		v, err := decodeSchedule(id, value, rev)
		if err != nil {
			return err
		}
		s.setSchedule(id, v, true)
	case KindPlace:
		all, err := rollout.DecodePlaces(value)
		if err != nil {
			return err
		}
		s.places.set(id, places{id, all, rev}, true)
	case KindRollout:
		r, err := decodeRollout(id, value, rev)
		if err != nil {
			return err
		}
		return s.setRollout(id, r, true)
	case KindRestore:
		r, err := decodeRestored(value, rev)
		if err != nil {
			return err
		}
		s.restores.set(id, r, true)
	case KindOperator:
		o, err := decodeOperator(id, value, rev)
		if err != nil {
			return err
		}
		s.operators.set(id, o, true)
	case KindSerial:
		x, err := decodeSerial(id, value, rev)
		if err != nil {
			return err
		}
		s.serials.set(id, x, true)
	case KindRevocation:
		r, err := decodeRevocation(id, value, rev)
		if err != nil {
			return err
		}
		s.revocations.set(id, r, true)
	case KindCA:
		c, err := decodeCA(value, rev)
		if err != nil {
			return err
		}
		s.cas.set(id, c, true)
	case KindTrust:
		t, err := decodeTrust(value, rev)
		if err != nil {
			return err
		}
		s.trusts.set(id, t, true)
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
			{KindSchedule, s.schedules.ids},
			{KindPlace, s.places.ids},
			{KindRollout, s.rollouts.ids},
			{KindRestore, s.restores.ids},
			{KindOperator, s.operators.ids},
			{KindSerial, s.serials.ids},
			{KindRevocation, s.revocations.ids},
			{KindCA, s.cas.ids},
			{KindTrust, s.trusts.ids},
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
	if _, had := t.byID[id]; !had {
		t.ids.ReplaceOrInsert(id)
	}
	t.byID[id] = v
}

func (t *table[V]) after(id string) iter.Seq[V] {
	return func(yield func(V) bool) {
		t.ids.AscendGreaterOrEqual(id, func(s string) bool {
			return s == id || yield(t.byID[s])
		})
	}
}

// index has for each record those that refer to it. It is no tree: a search in
// one compares with a dozen names that are all over a large fleet's memory.
type index[R comparable] map[string]*members[R]

// members is a set that keeps the order in which its members came, but for
// those that took the place of one that left: mostly that of their memory, so
// that all of a large fleet are looked at many times as fast as in a map's order.
type members[R comparable] struct {
	all []R
	at  map[R]int32
}

func (x index[R]) add(of string, r R) {
	m := x[of]
	if m == nil {
		m = &members[R]{at: map[R]int32{}}
		x[of] = m
	}
	if !m.has(r) {
		m.at[r] = int32(len(m.all))
		m.all = append(m.all, r)
	}
}

func (x index[R]) remove(of string, r R) {
	m := x[of]
	if !m.has(r) {
		return
	}
	if m.len() == 1 {
		delete(x, of)
		return
	}
	at, last := m.at[r], len(m.all)-1
	moved := m.all[last]
	m.all[at], m.at[moved] = moved, at
	delete(m.at, r)
	clear(m.all[last:])
	m.all = m.all[:last]
}

func (m *members[R]) len() int {
	if m == nil {
		return 0
	}
	return len(m.all)
}

func (m *members[R]) has(r R) bool {
	if m == nil {
		return false
	}
	_, is := m.at[r]
	return is
}

// values yields all in no order that counts.
func (m *members[R]) values() iter.Seq[R] {
	if m == nil {
		return func(func(R) bool) {}
	}
	return slices.Values(m.all)
}

// rare is a part of a table that is sorted sooner than the table is looked
// through for it.
const rare = 64

// ordered yields those of a table's records that are some, and whose id comes
// after an id, in order.
func ordered[R comparable](some *members[R], id func(R) string, of *table[R], after string) iter.Seq[R] {
	if some.len() < len(of.byID)/rare {
		return func(yield func(R) bool) {
			var all []R
			for r := range some.values() {
				if id(r) > after {
					all = append(all, r)
				}
			}
			slices.SortFunc(all, func(a, b R) int { return strings.Compare(id(a), id(b)) })
			for _, r := range all {
				if !yield(r) {
					return
				}
			}
		}
	}
	return func(yield func(R) bool) {
		if some.len() == 0 {
			return
		}
		for r := range of.after(after) {
			if some.has(r) && !yield(r) {
				return
			}
		}
	}
}

func subscriberID(sub *plan.Subscriber) string { return sub.ID }

func routerID(r *router) string { return r.ID }

func ids(of iter.Seq[*router]) iter.Seq[string] { return mapped(of, routerID) }

// values yields what pointers point to.
func values[V any](of iter.Seq[*V]) iter.Seq[V] {
	return mapped(of, func(p *V) V { return *p })
}

func routers(of iter.Seq[*router]) iter.Seq[plan.Router] {
	return mapped(of, func(r *router) plan.Router { return r.Router })
}

func mapped[V, W any](of iter.Seq[V], to func(V) W) iter.Seq[W] {
	return func(yield func(W) bool) {
		for v := range of {
			if !yield(to(v)) {
				return
			}
		}
	}
}
