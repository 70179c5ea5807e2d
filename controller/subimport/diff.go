package subimport

import (
	"cmp"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/cakefleet/cakefleet/internal/plan"
)

// Records is what is stored; *store.State is one.
type Records interface {
	Plan(name string) (plan.Plan, bool)
	Subscriber(id string) (plan.Subscriber, bool)
	Subscribers(after string) iter.Seq[plan.Subscriber]
	RoutersOfSubscriber(id string) iter.Seq[plan.Router]
}

// Kind is what happens to a subscriber.
type Kind uint8

// The kinds of change.
const (
	Added Kind = iota
	Changed
	Removed
)

// Change is one subscriber that an import changes.
type Change struct {
	Kind   Kind
	Before plan.Subscriber // zero if added
	After  plan.Subscriber // zero if removed
}

// Diff is what an import does.
type Diff struct {
	Changes                            []Change // in the order of the file, then those removed by id
	Added, Changed, Removed, Unchanged int
	Errors                             []LineError // without Options.KeepGoing, nothing may be stored if there are any
}

// Options say how a file is meant.
type Options struct {
	RemoveMissing bool // subscribers that the file doesn't have are removed
	KeepGoing     bool // lines that are good count although others are bad
}

// Compare returns what has to change so that the records are as the file says.
// A label that the file has a column for becomes what the column says, and is
// removed where the column is empty; labels that it has no column for stay.
// Subscribers that the file doesn't have stay, unless RemoveMissing is set.
//
// With KeepGoing a subscriber that a bad line is about stays as it is. While
// there is a bad line of which that can't be known, nobody is removed.
func Compare(f File, stored Records, o Options) Diff {
	d := Diff{Errors: slices.Clone(f.Errors)}
	inFile := make(map[string]bool, len(f.Rows))
	unknown := 0
	for _, r := range f.Rows {
		inFile[r.ID] = true
		switch {
		case r.ID == "" || r.Bad && plan.ValidateID("subscriber", r.ID) != nil:
			unknown++
		case r.Bad && o.KeepGoing:
		default:
			d.row(f, r, stored, !r.Bad)
		}
	}
	switch {
	case f.Broken || !o.RemoveMissing:
	case len(f.Errors) > 0 && !o.KeepGoing:
	case unknown > 0:
		d.Errors = append(d.Errors, LineError{Message: fmt.Sprintf("nobody is removed, because %d bad lines may be about subscribers that are not in the file otherwise", unknown)})
	default:
		d.missing(stored, inFile, o.KeepGoing)
	}
	if len(d.Errors) > 0 {
		slices.SortStableFunc(d.Errors, func(a, b LineError) int { return cmp.Or(a.Line-b.Line, a.Record-b.Record) })
		if !o.KeepGoing || f.Broken {
			return Diff{Errors: d.Errors}
		}
	}
	return d
}

// Mass returns why a diff is too much to be meant: more than a share of the
// stored subscribers, and more than 10 of them, would be changed or removed;
// empty if it isn't.
func (d Diff) Mass(stored int, percent uint32) string {
	touched := d.Changed + d.Removed
	if touched <= alwaysFine || touched*100 <= stored*int(percent) {
		return ""
	}
	return fmt.Sprintf("%d of %d subscribers would be changed and %d removed, which is more than %d %%", d.Changed, stored, d.Removed, percent)
}

// alwaysFine is how many subscribers a file may change whatever their share.
const alwaysFine = 10

func (d *Diff) row(f File, r Row, stored Records, good bool) {
	if _, exists := stored.Plan(r.Plan); !exists {
		// A name that can't be one has its error from Parse.
		if plan.ValidateName("plan", r.Plan) == nil {
			d.Errors = append(d.Errors, r.fault(columnPlan, fmt.Sprintf("plan %s does not exist", r.Plan)))
		}
		return
	}
	before, exists := stored.Subscriber(r.ID)
	after := before
	after.Revision, after.Updated = 0, time.Time{}
	after.ID, after.Plan, after.Labels = r.ID, r.Plan, merge(before.Labels, append(slices.Clip(f.Labels), r.Clear...), r.Labels)
	l := before.EditLayers()
	was := l
	l.Billing = l.Billing.Without(r.Speaks).With(r.Billing)
	if r.Suspended != nil {
		l.BillingSuspension = *r.Suspended
	}
	after = after.WithLayers(l)
	if policy := l.BillingSuspension; policy != "" {
		if _, exists := stored.Plan(policy); !exists {
			if plan.ValidateName("plan", policy) == nil {
				d.Errors = append(d.Errors, r.fault(columnSuspended, fmt.Sprintf("plan %s does not exist", policy)))
			}
			return
		}
	}
	if exists && before.Plan == after.Plan && maps.Equal(before.Labels, after.Labels) && l == was {
		d.Unchanged++
		return
	}
	// What no single column is to blame for, such as the number of labels.
	if err := after.Validate(); err != nil {
		if good {
			d.Errors = append(d.Errors, r.fault("", err.Error()))
		}
		return
	}
	if !exists {
		d.Added++
		d.Changes = append(d.Changes, Change{Kind: Added, After: after})
		return
	}
	d.Changed++
	d.Changes = append(d.Changes, Change{Kind: Changed, Before: before, After: after})
}

// missing collects the subscribers to remove.
func (d *Diff) missing(stored Records, inFile map[string]bool, keepGoing bool) {
	if len(inFile) == 0 {
		d.Errors = append(d.Errors, LineError{Message: "file has no subscriber; to remove all of them, remove them one by one"})
		return
	}
	for sub := range stored.Subscribers("") {
		if inFile[sub.ID] {
			continue
		}
		served := false
		for r := range stored.RoutersOfSubscriber(sub.ID) {
			served = true
			d.Errors = append(d.Errors, LineError{Message: fmt.Sprintf("subscriber %s is not in the file, but router %s serves it", sub.ID, r.ID)})
			break
		}
		if served && keepGoing {
			continue
		}
		d.Removed++
		d.Changes = append(d.Changes, Change{Kind: Removed, Before: sub})
	}
}

// merge returns the labels of a subscriber after the import; nil if it has
// none.
func merge(before map[string]string, columns []string, row map[string]string) map[string]string {
	after := maps.Clone(before)
	for _, c := range columns {
		delete(after, c)
	}
	if len(after) == 0 {
		return row
	}
	maps.Copy(after, row)
	return after
}

// Describe returns what an import says of a subscriber for people, such as "plan
// gold, site north".
func Describe(s plan.Subscriber) string {
	var b strings.Builder
	b.WriteString("plan " + s.Plan)
	if l := s.EditLayers(); l.Billing.Fields != 0 || l.BillingSuspension != "" {
		if l.Billing.Fields != 0 {
			b.WriteString(", " + l.Billing.String())
		}
		if l.BillingSuspension != "" {
			b.WriteString(", suspended with " + l.BillingSuspension)
		}
	}
	for _, k := range slices.Sorted(maps.Keys(s.Labels)) {
		fmt.Fprintf(&b, ", %s %s", k, s.Labels[k])
	}
	return b.String()
}
