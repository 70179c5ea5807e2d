// Package resolve says what a router should run. It is pure: records in, the
// desired state out, the same on every controller.
package resolve

import (
	"fmt"
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
// there is no such router.
func Router(from Records, id string) (d plan.Desired, ok bool) {
	r, ok := from.Router(id)
	if !ok {
		return plan.Desired{}, false
	}
	var sub *plan.Subscriber
	var p *plan.Plan
	if s, ok := from.Subscriber(r.Subscriber); ok {
		sub = &s
		if q, ok := from.Plan(s.Plan); ok {
			p = &q
		}
	}
	return Desired(r, sub, p), true
}

// Desired returns the desired state of a router. sub is the subscriber that it
// serves and p the plan of that subscriber; each is nil if it doesn't exist.
//
// The revision is that of the newest record that was looked at, so that it
// never goes back while references hold, and Since is that record's time.
// Where nothing is to be shaped, Reason says why.
func Desired(r plan.Router, sub *plan.Subscriber, p *plan.Plan) plan.Desired {
	d := plan.Desired{Revision: r.Revision, Since: r.Updated}
	if r.Subscriber == "" {
		d.Reason = "no subscriber"
		return d
	}
	if sub == nil {
		d.Reason = fmt.Sprintf("subscriber %s is gone", r.Subscriber)
		return d
	}
	newer(&d, sub.Revision, sub.Updated)
	if p == nil {
		d.Reason = fmt.Sprintf("plan %s is gone", sub.Plan)
		return d
	}
	newer(&d, p.Revision, p.Updated)
	link := p.Link
	d.Link = &link
	d.Hash = link.Hash()
	return d
}

func newer(d *plan.Desired, rev plan.Revision, updated time.Time) {
	if rev > d.Revision {
		d.Revision, d.Since = rev, updated
	}
}
