package model_test

import (
	"slices"
	"testing"
	"time"

	"github.com/cakefleet/cakefleet/test/fleet/model"
)

// good is a history without a fault in it: two writes, a controller that fails,
// and a router that moves.
func good() model.History {
	return model.History{
		PlanOf: map[string]string{"r": "gold"},
		Events: []model.Event{
			{Kind: model.Wrote, Plan: "gold", Revision: 5, Hash: "a"},
			{Kind: model.Began, Router: "r", Session: 1, At: "c1"},
			{Kind: model.Pushed, Router: "r", Session: 1, Nonce: 1, Revision: 7, Hash: "a"}, // the router's own record is newer
			{Kind: model.Applied, Router: "r", Revision: 7, Hash: "a"},
			{Kind: model.Answered, Router: "r", Session: 1, Nonce: 1},
			{Kind: model.Showed, Router: "r", At: "c1", Revision: 7, Hash: "a"},
			{Time: time.Second, Kind: model.Failed, At: "c1", Routers: []string{"r"}},
			{Time: 2 * time.Second, Kind: model.Began, Router: "r", Session: 2, At: "c2"},
			{Kind: model.MaybeWrote, Plan: "gold", Hash: "m"},
			{Kind: model.Wrote, Plan: "gold", Revision: 9, Hash: "b"},
			{Kind: model.Pushed, Router: "r", Session: 2, Nonce: 1, Revision: 9, Hash: "b"},
			{Kind: model.Applied, Router: "r", Revision: 9, Hash: "b"},
			{Kind: model.Answered, Router: "r", Session: 2, Nonce: 1},
			{Kind: model.Led, Step: 1, By: "c1"},
			{Kind: model.Led, Step: 2, By: "c2"},
		},
		Plans: map[string]model.State{"gold": {Revision: 9, Hash: "b"}},
		Runs:  map[string]model.State{"r": {Revision: 9, Hash: "b"}},
		Shown: map[string]map[string]string{"c1": {"r": "in sync"}, "c2": {"r": "in sync"}},
	}
}

func TestJudge(t *testing.T) {
	add := func(e model.Event) func(*model.History) {
		return func(h *model.History) { h.Events = append(h.Events, e) }
	}
	drop := func(i int) func(*model.History) {
		return func(h *model.History) { h.Events = slices.Delete(h.Events, i, i+1) }
	}
	for _, c := range []struct {
		name string
		harm func(*model.History)
		want string // rule; empty: none
	}{
		{"good", func(*model.History) {}, ""},
		{"a write that nobody knows of may count", func(h *model.History) {
			h.Plans["gold"] = model.State{Revision: 11, Hash: "m"}
			h.Runs["r"] = h.Plans["gold"]
		}, ""},
		{"asked again after a long time", add(model.Event{Time: 20 * time.Second, Kind: model.Pushed, Router: "r", Session: 2, Nonce: 2, Revision: 9, Hash: "b"}), "unanswered"},
		{"asked again at once", func(h *model.History) {
			h.Events = append(h.Events, model.Event{Time: 2 * time.Second, Kind: model.Pushed, Router: "r", Session: 2, Nonce: 2, Revision: 9, Hash: "b"},
				model.Event{Kind: model.Answered, Router: "r", Session: 2, Nonce: 2})
		}, "repeated"},
		{"never written", add(model.Event{Kind: model.Pushed, Router: "r", Session: 3, Nonce: 1, Revision: 10, Hash: "x"}), "unpublished"},
		{"another at this revision", add(model.Event{Kind: model.Pushed, Router: "r", Session: 3, Nonce: 1, Revision: 9, Hash: "a"}), "unpublished"},
		{"back", add(model.Event{Kind: model.Applied, Router: "r", Revision: 7, Hash: "a"}), "stale"},
		{"twice", add(model.Event{Kind: model.Applied, Router: "r", Revision: 9, Hash: "b"}), "stale"},
		{"not answered", drop(12), "unanswered"},
		{"guessed", drop(3), "guessed"},
		{"never came back", drop(7), "stranded"},
		{"older is stored", func(h *model.History) { h.Plans["gold"] = model.State{Revision: 5, Hash: "a"} }, "lost"},
		{"another is stored", func(h *model.History) { h.Plans["gold"] = model.State{Revision: 9, Hash: "a"} }, "lost"},
		{"foreign is stored", func(h *model.History) { h.Plans["gold"] = model.State{Revision: 12, Hash: "x"} }, "lost"},
		{"runs older", func(h *model.History) { h.Runs["r"] = model.State{Revision: 7, Hash: "a"} }, "not converged"},
		{"one does not know", func(h *model.History) { h.Shown["c2"]["r"] = "pending" }, "not converged"},
		{"a step twice", add(model.Event{Kind: model.Led, Step: 2, By: "c3"}), "led by two"},
		{"a step is missing", add(model.Event{Kind: model.Led, Step: 4, By: "c2"}), "led by two"},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := good()
			c.harm(&h)
			found := model.Judge(h)
			if c.want == "" && len(found) > 0 {
				t.Errorf("found %v", found)
			}
			if c.want != "" && !slices.ContainsFunc(found, func(v model.Violation) bool { return v.Rule == c.want }) {
				t.Errorf("found %v, not %q", found, c.want)
			}
		})
	}
}
