package outbox_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/cakefleet/cakefleet/agent/outbox"
	"github.com/cakefleet/cakefleet/internal/plan"
)

func TestNewestStatusWins(t *testing.T) {
	o := outbox.New()
	o.PutStatus(outbox.Address{Stream: 1, Nonce: 1}, plan.Status{Outcome: plan.OutcomeApplied, Applied: 5})
	o.PutStatus(outbox.Address{Stream: 1, Nonce: 2}, plan.Status{Outcome: plan.OutcomeRejected, Applied: 5, Error: "no"})
	<-o.Ready()
	want := outbox.Work{Status: &plan.Status{Outcome: plan.OutcomeRejected, Applied: 5, Error: "no"}, Nonce: 2}
	if diff := cmp.Diff(want, o.Take(1)); diff != "" {
		t.Errorf("first take (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(outbox.Work{}, o.Take(1)); diff != "" {
		t.Errorf("second take (-want +got):\n%s", diff)
	}
}

func TestNewsKeepsTheUnsentAnswer(t *testing.T) {
	o := outbox.New()
	o.PutStatus(outbox.Address{Stream: 1, Nonce: 7}, plan.Status{Outcome: plan.OutcomeRejected, Error: "no"})
	news := plan.Status{Conditions: []plan.Condition{{Type: "ClockOK", Status: true}}}
	o.PutStatus(outbox.Address{}, news)
	w := o.Take(1)
	if w.Nonce != 7 || w.Status.Outcome != plan.OutcomeRejected || w.Status.Error != "no" || len(w.Status.Conditions) != 1 {
		t.Errorf("got nonce %d, status %+v: the answer or the news is lost", w.Nonce, w.Status)
	}
}

func TestAnswerToAnotherStreamIsNews(t *testing.T) {
	o := outbox.New()
	o.PutStatus(outbox.Address{Stream: 1, Nonce: 1}, plan.Status{Outcome: plan.OutcomeApplied, Applied: 9})
	w := o.Take(2)
	if w.Nonce != 0 || w.Status.Outcome != plan.OutcomeNone || w.Status.Applied != 9 {
		t.Errorf("got nonce %d, status %+v", w.Nonce, w.Status)
	}
}

func TestStalledControllerCostsNoMemory(t *testing.T) {
	o := outbox.New()
	for range 1000 {
		o.PutReport()
	}
	if got := o.Skipped(); got != 999 {
		t.Errorf("skipped %d reports, want 999", got)
	}
	if w := o.Take(1); !w.Report {
		t.Error("no report is due")
	}
	if w := o.Take(1); w.Report {
		t.Error("more than one report was kept")
	}
}
