package fleet_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/cakefleet/cakefleet/controller/fleet"
	"github.com/cakefleet/cakefleet/internal/plan"
)

// Two devices at two controllers, which tell each other, are found like two at
// one; a device that moves, or that starts anew at another one each time, is
// not taken for two.
func TestFleet048_ElsewhereToo(t *testing.T) {
	type hubs [2]*fleet.Hub
	now := start()
	var open map[string]*listener // by controller and boot, the newest session
	// opens lets a boot connect to a controller, and both learn of it.
	opens := func(h hubs, at int, boot string) (clone *fleet.Clone) {
		now = now.Add(time.Minute)
		l := &listener{}
		s := h[at].Open("r", fleet.Hello{BootID: boot}, "peer "+boot, now, l)
		open[fmt.Sprint(at, boot)] = l
		if clone = s.Clone(); clone != nil {
			return clone
		}
		for id, n := range h[at].Newcomers(time.Time{}) {
			for range 2 { // told twice, it counts once
				if c := h[1-at].Elsewhere(id, n, now.Add(time.Second)); c != nil {
					clone = c
				}
			}
		}
		return clone
	}
	for _, c := range []struct {
		name  string
		turns []string // controller and boot
		clone bool
	}{
		{"two that live", []string{"0a", "1b", "0a", "1b"}, true},
		{"two that live, wherever they come to", []string{"0a", "1b", "1a", "0b"}, true},
		{"a lost connection", []string{"0a", "1b", "0a"}, false},
		{"one that moves", []string{"0a", "1a", "0a", "1a", "0a", "1a"}, false},
		{"one that starts anew", []string{"0a", "1b", "0c", "1d", "0e", "0f", "1g"}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := hubs{fleet.NewHub(), fleet.NewHub()}
			open = map[string]*listener{}
			var clone *fleet.Clone
			for i, turn := range c.turns {
				if clone != nil {
					t.Fatalf("found after %d of %v", i, c.turns)
				}
				clone = opens(h, int(turn[0]-'0'), turn[1:])
				if clone != nil {
					continue // the quarantine ends what is left
				}
				for j, hub := range h {
					if connected, _ := hub.Sync("r", desired(1, 1)); connected != (j == int(turn[0]-'0')) {
						t.Errorf("turn %d: connected to %d: %t", i, j, connected)
					}
				}
			}
			if (clone != nil) != c.clone {
				t.Errorf("found: %v, want %t", clone, c.clone)
			}
			if clone != nil && (clone.Devices[0].BootID != "a" || clone.Devices[1].BootID != "b" || clone.Devices[1].Address != "peer b") {
				t.Errorf("devices are %+v", clone.Devices)
			}
		})
	}

	// What is older than what a controller knows itself changes nothing.
	h := fleet.NewHub()
	s := h.Open("r", fleet.Hello{BootID: "a"}, "p", now, &listener{})
	if c := h.Elsewhere("r", fleet.Newcomer{Since: now.Add(-time.Second), Device: plan.Device{BootID: "b"}}, now); c != nil || !s.Seen(now) {
		t.Error("an older session elsewhere ends the one here")
	}
	if c := h.Elsewhere("unknown", fleet.Newcomer{Since: now}, now); c != nil {
		t.Errorf("a stranger is %v", c)
	}
}
