package fleet

import (
	"slices"
	"time"

	"github.com/cakefleet/cakefleet/internal/plan"
)

// Bounds of what is remembered of a router that starts again and again.
const (
	bootWindow = time.Hour // in which boots have to take turns
	maxBoots   = 4         // that are remembered
	// maxReturns is how often a boot that another had followed may say hello
	// again. One time may be a connection that was slow to get here while the
	// router restarted; two times are two devices that live.
	maxReturns = 1
)

// Clone is two devices with one identity.
type Clone struct {
	Devices [2]plan.Device // the one that was there before is first
}

// boots tells two devices with one identity from one that restarts. An agent
// chooses its boot id at random when it starts and never has it again, so that
// a boot that was followed by another and then says hello is alive beside it.
// A connection that breaks and comes back, from another address or not, has the
// boot id that it had.
type boots struct {
	m *memory // nil until a boot follows another: few routers have one
}

type memory struct {
	followed []followed // at most maxBoots, the oldest first
	returns  []time.Time
}

// followed is a boot that another one has followed.
type followed struct {
	bootID string
	at     time.Time
}

// hello notes that device now says hello after device was. It returns both if
// they have taken turns.
func (b *boots) hello(t time.Time, was, now plan.Device) *Clone {
	if was.BootID == "" || was.BootID == now.BootID {
		return nil
	}
	if b.m == nil {
		b.m = &memory{}
	}
	m := b.m
	old := func(at time.Time) bool { return t.Sub(at) >= bootWindow }
	m.followed = slices.DeleteFunc(m.followed, func(f followed) bool { return old(f.at) || f.bootID == was.BootID })
	m.returns = slices.DeleteFunc(m.returns, old)
	returned := slices.ContainsFunc(m.followed, func(f followed) bool { return f.bootID == now.BootID })
	if m.followed = append(m.followed, followed{was.BootID, t}); len(m.followed) > maxBoots {
		m.followed = slices.Delete(m.followed, 0, 1)
	}
	if !returned {
		return nil
	}
	if m.returns = append(m.returns, t); len(m.returns) <= maxReturns {
		return nil
	}
	b.m = nil // after an operator has released it, it begins anew
	return &Clone{Devices: [2]plan.Device{was, now}}
}

func deviceOf(h Hello, peer string) plan.Device {
	return plan.Device{Address: peer, BootID: h.BootID, Model: h.Model}
}
