package subimport

import (
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"

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
	Errors                             []LineError // if there are any, nothing may be stored
}

// Compare returns what has to change so that the records are as the file says.
// A label that the file has a column for becomes what the column says, and is
// removed where the column is empty; labels that it has no column for stay.
// Subscribers that the file doesn't have stay, unless removeMissing is set.
func Compare(f File, stored Records, removeMissing bool) Diff {
	d := Diff{Errors: slices.Clone(f.Errors)}
	inFile := make(map[string]bool, len(f.Rows))
	for _, r := range f.Rows {
		inFile[r.ID] = true
		d.row(f, r, stored)
	}
	if removeMissing && len(f.Errors) == 0 {
		d.missing(stored, inFile)
	}
	if len(d.Errors) > 0 {
		slices.SortStableFunc(d.Errors, func(a, b LineError) int { return a.Line - b.Line })
		return Diff{Errors: d.Errors}
	}
	return d
}

func (d *Diff) row(f File, r Row, stored Records) {
	if _, exists := stored.Plan(r.Plan); !exists {
		// A name that can't be one has its error from Parse.
		if plan.ValidateName("plan", r.Plan) == nil {
			d.Errors = append(d.Errors, LineError{r.Line, columnPlan, fmt.Sprintf("plan %s does not exist", r.Plan)})
		}
		return
	}
	before, exists := stored.Subscriber(r.ID)
	after := plan.Subscriber{ID: r.ID, Plan: r.Plan, Labels: merge(before.Labels, f.Labels, r.Labels)}
	if exists && before.Plan == after.Plan && maps.Equal(before.Labels, after.Labels) {
		d.Unchanged++
		return
	}
	// What no single column is to blame for, such as the number of labels.
	if err := after.Validate(); err != nil && len(f.Errors) == 0 {
		d.Errors = append(d.Errors, LineError{r.Line, "", err.Error()})
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
func (d *Diff) missing(stored Records, inFile map[string]bool) {
	if len(inFile) == 0 {
		d.Errors = append(d.Errors, LineError{Message: "file has no subscriber; to remove all of them, remove them one by one"})
		return
	}
	for sub := range stored.Subscribers("") {
		if inFile[sub.ID] {
			continue
		}
		for r := range stored.RoutersOfSubscriber(sub.ID) {
			d.Errors = append(d.Errors, LineError{Message: fmt.Sprintf("subscriber %s is not in the file, but router %s serves it", sub.ID, r.ID)})
			break
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

// Describe returns a subscriber's plan and labels for people, such as "plan
// gold, site north".
func Describe(s plan.Subscriber) string {
	var b strings.Builder
	b.WriteString("plan " + s.Plan)
	for _, k := range slices.Sorted(maps.Keys(s.Labels)) {
		fmt.Fprintf(&b, ", %s %s", k, s.Labels[k])
	}
	return b.String()
}
