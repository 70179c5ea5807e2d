// Package resolve says what a router should run. It is pure: records and the
// time in, the desired state out, the same on every controller.
package resolve

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"sync"
	"time"

	"github.com/cakefleet/cakefleet/internal/plan"
)

// Records is where Router looks; *store.State is one.
type Records interface {
	Router(id string) (plan.Router, bool)
	Subscriber(id string) (plan.Subscriber, bool)
	Plan(name string) (plan.Plan, bool)
}

// Router returns the desired state of the router of that id; ok is false if
// there is no such router. hashes may be nil.
//
// The revision is that of the newest record that was looked at, so that it
// never goes back while references hold, and Since is that record's time.
// Where nothing is to be shaped, Reason says why.
func Router(from Records, id string, now time.Time, hashes *Hashes) (d plan.Desired, ok bool) {
	r, ok := from.Router(id)
	if !ok {
		return plan.Desired{}, false
	}
	d = plan.Desired{Revision: r.Revision, Since: r.Updated}
	if r.Subscriber == "" {
		d.Reason = "no subscriber"
		return d, true
	}
	sub, ok := from.Subscriber(r.Subscriber)
	if !ok {
		d.Reason = fmt.Sprintf("subscriber %s is gone", r.Subscriber)
		return d, true
	}
	newer(&d, sub.Revision, sub.Updated)
	p, ok := from.Plan(sub.Plan)
	if !ok {
		d.Reason = fmt.Sprintf("plan %s is gone", sub.Plan)
		return d, true
	}
	newer(&d, p.Revision, p.Updated)
	if sub.Layers == nil {
		d.Link, d.Hash = hashes.of(&p)
		return d, true
	}
	layered(&d, from, sub.Layers, p.Link, now)
	return d, true
}

// layered fills in the link of a subscriber that has layers.
func layered(d *plan.Desired, from Records, l *plan.Layers, link plan.Link, now time.Time) {
	if policy, ok := from.Plan(l.Suspended()); ok {
		newer(d, policy.Revision, policy.Updated)
	}
	boosted := now.Before(l.Boost.Until)
	layers := layersOf(from, l, boosted)
	d.Link = compose(link, layers)
	d.Hash = d.Link.Hash()
	if !boosted {
		return
	}
	d.Changes = l.Boost.Until
	then := compose(link, layersOf(from, l, false))
	hash := then.Hash()
	if hash == d.Hash {
		return // a suspension leaves nothing of it
	}
	d.ExpiresAfter, d.Then, d.LinkHash = l.Boost.Until.Sub(now), then, d.Hash
	// A boost that ends at another time, or in something else, is another state
	// though the link is the same.
	sum := sha256.Sum256(fmt.Appendf(nil, "%s until %d then %s", d.LinkHash, l.Boost.Until.UnixMicro(), hash))
	d.Hash = hex.EncodeToString(sum[:16])
}

// layer is what one owner sets.
type layer struct {
	owner plan.Owner
	set   plan.Settings
}

// layersOf returns the layers above the plan, lowest first.
func layersOf(from Records, l *plan.Layers, boosted bool) []layer {
	all := make([]layer, 0, 4)
	add := func(owner plan.Owner, s plan.Settings) {
		if s.Fields != 0 {
			all = append(all, layer{owner, s})
		}
	}
	add(plan.OwnerBilling, l.Billing)
	add(plan.OwnerOverride, l.Override)
	if boosted {
		add(plan.OwnerBoost, l.Boost.Settings)
	}
	if policy, ok := from.Plan(l.Suspended()); ok {
		add(plan.OwnerSuspension, plan.RatesOf(policy.Link))
	}
	return all
}

func compose(link plan.Link, layers []layer) *plan.Link {
	for i := range layers {
		layers[i].set.Over(&link)
	}
	return &link
}

// Owners returns whose word each field of a router's desired state is; ok is
// false if nothing is shaped.
func Owners(from Records, id string, now time.Time) (owners [plan.NumFields]plan.Owner, ok bool) {
	r, _ := from.Router(id)
	sub, ok := from.Subscriber(r.Subscriber)
	if !ok {
		return owners, false
	}
	if _, ok := from.Plan(sub.Plan); !ok {
		return owners, false
	}
	if sub.Layers == nil {
		return owners, true
	}
	for _, l := range layersOf(from, sub.Layers, now.Before(sub.Layers.Boost.Until)) {
		for i := range owners {
			if l.set.Has(i) {
				owners[i] = l.owner
			}
		}
	}
	return owners, true
}

func newer(d *plan.Desired, rev plan.Revision, updated time.Time) {
	if rev > d.Revision {
		d.Revision, d.Since = rev, updated
	}
}

// Hashes remembers the hash of each plan's link, because most routers run one
// of few plans. The zero value is ready; a nil one remembers nothing. All
// methods may be called from any goroutine.
type Hashes struct {
	mu    sync.RWMutex
	known map[string]*hashed // guarded by mu; by name of the plan
}

type hashed struct {
	link plan.Link
	hash string
}

// maxKnown bounds what Hashes holds: about 2 MB.
const maxKnown = 4096

// of returns a copy of a plan's link that must not be changed, and its hash.
func (h *Hashes) of(p *plan.Plan) (*plan.Link, string) {
	if h == nil {
		link := p.Link
		return &link, link.Hash()
	}
	h.mu.RLock()
	e := h.known[p.Name]
	h.mu.RUnlock()
	if e == nil || e.link != p.Link {
		e = &hashed{link: p.Link, hash: p.Link.Hash()}
		h.mu.Lock()
		if h.known == nil || len(h.known) >= maxKnown {
			h.known = map[string]*hashed{}
		}
		h.known[p.Name] = e
		h.mu.Unlock()
	}
	return &e.link, e.hash
}
