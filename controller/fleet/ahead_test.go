package fleet_test

import (
	"testing"
	"time"

	"github.com/cakefleet/cakefleet/controller/fleet"
	"github.com/cakefleet/cakefleet/internal/plan"
)

// A router that runs what a restored store has forgotten is not moved back
// until that is accepted, or until something newer is desired.
func TestAheadOfRestoredStore(t *testing.T) {
	h, now := fleet.NewHub(), start()
	old, forgotten := desired(5, 1e6), desired(8, 2e6)
	old.Known = plan.Known{Revision: 1010, Above: 6, Until: 1000}
	s := h.Open("r", runs(forgotten), "peer", now, &listener{})
	if _, ok, wait := s.Next(now, old); ok || wait <= 0 {
		t.Fatalf("sent: %t; looked at again after %v", ok, wait)
	}
	wantSync(t, h, old, fleet.Ahead)

	// The same link as it runs moves nothing.
	same := forgotten
	same.Revision, same.Known = 5, old.Known
	wantWait(t, s, now, same, 0)
	wantSync(t, h, same, fleet.InSync)

	made := desired(1005, 3e6)
	made.Known = old.Known
	want(t, s, now, made, 1)

	s = h.Open("r", runs(forgotten), "peer", now, &listener{})
	old.Known.Accepted = true
	want(t, s, now, old, 1)
	s.Status(now, 1, applied(old))
	wantSync(t, h, old, fleet.InSync)
}

// A controller that has not seen yet what another one has sent doesn't send
// what was before.
func TestAheadOfSlowWatch(t *testing.T) {
	h, now := fleet.NewHub(), start()
	old, newer := desired(5, 1e6), desired(8, 2e6)
	old.Known, newer.Known = plan.Known{Revision: 7}, plan.Known{Revision: 8}
	s := h.Open("r", runs(newer), "peer", now, &listener{})
	if _, ok, _ := s.Next(now, old); ok {
		t.Fatal("sent something older")
	}
	wantSync(t, h, old, fleet.Ahead)
	wantWait(t, s, now, newer, 0)
	wantSync(t, h, newer, fleet.InSync)
	now = now.Add(time.Second)
	next := desired(9, 3e6)
	next.Known = plan.Known{Revision: 9}
	want(t, s, now, next, 1)
}
