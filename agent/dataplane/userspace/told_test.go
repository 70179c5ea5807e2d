package userspace

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cakefleet/cakefleet/agent"
	"github.com/cakefleet/cakefleet/agent/dataplane"
	"github.com/cakefleet/cakefleet/agent/dataplane/dataplanetest"
	"github.com/cakefleet/cakefleet/agent/dataplane/nfqueue"
	"github.com/cakefleet/cakefleet/agent/dataplane/wan"
	"github.com/cakefleet/cakefleet/agent/session/sessiontest"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/testnet"
	"github.com/cakefleet/cakefleet/internal/wire"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// faulty is the kernel's queue with a fault of the packet loop's own.
type faulty struct {
	queue
	faults *faults
}

type faults struct {
	panics atomic.Int32  // left to happen, one a read
	stall  chan struct{} // has a value: the loop stands still until goesOn has one
	goesOn chan struct{}
}

func (f faulty) Recv(pkts []nfqueue.Packet) (int, error) {
	if n := f.faults.panics.Load(); n > 0 && f.faults.panics.CompareAndSwap(n, n-1) {
		panic("planted")
	}
	select {
	case <-f.faults.stall:
		<-f.faults.goesOn
	default:
	}
	return f.queue.Recv(pkts)
}

// told waits for a status of the session that fits.
func told(t *testing.T, s *sessiontest.Session, what string, fits func(*pb.Status) bool) *pb.Status {
	t.Helper()
	var last *pb.Status
	for end := time.After(time.Minute); ; {
		select {
		case last = <-s.Statuses:
			if fits(last) {
				return last
			}
		case <-end:
			t.Fatalf("%s: the controller is not told; the last it heard is %v", what, last)
		}
	}
}

// has tells whether a status has a condition, with words in what it says.
func has(st *pb.Status, name string, holds bool, words string) bool {
	for _, c := range st.GetConditions() {
		if c.GetType() == name {
			return c.GetStatus() == holds && strings.Contains(c.GetMessage(), words)
		}
	}
	return false
}

// TestLoopFaultsAreTold has a whole agent on the kernel's queue, whose packet
// loop panics, panics until it is given up, and stands still. Each time the
// customer is online, a controller hears of it in a sentence, and that packets
// are shaped again.
func TestLoopFaultsAreTold(t *testing.T) {
	testnet.Require(t)
	for n := 1; n <= MaxLoops; n++ {
		t.Run(fmt.Sprintf("loops=%d", n), func(t *testing.T) { loopFaultsAreTold(t, n) })
	}
}

func loopFaultsAreTold(t *testing.T, loops int) {
	host, router, far := testnet.Make(t, "host"), testnet.Make(t, "router"), testnet.Make(t, "far")
	err := errors.Join(
		testnet.Veth(host, "eth0", router, "lan"), testnet.Veth(router, "wan", far, "eth0"),
		host.Addr("eth0", "10.1.0.2/24"), router.Addr("lan", "10.1.0.1/24"), router.Addr("wan", "198.51.100.1/24"), far.Addr("eth0", "198.51.100.2/24"),
		router.Forward(), host.Route("0.0.0.0/0", "10.1.0.1"), far.Route("10.1.0.0/24", "198.51.100.1"),
	)
	if err != nil {
		t.Fatal(err)
	}
	online := echo(t, host, far, "198.51.100.2:7")
	fault := &faults{stall: make(chan struct{}, 1), goesOn: make(chan struct{})}
	var plane *wan.Plane
	err = router.Do(func() (err error) {
		plane, err = wan.Open(wan.Config{Interface: "wan", Open: func() (d dataplane.Dataplane, name string, err error) {
			err = router.Do(func() error {
				p, err := openParts("wan", loops)
				if err != nil {
					return err
				}
				p.queues[loops-1] = faulty{p.queues[loops-1], fault} // of the upload
				d = newDataplane(Config{Interface: "wan", Seed: 1, Loops: loops}, p)
				return nil
			})
			return d, "userspace", err
		}})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	c := sessiontest.Start(t, sessiontest.Config{Interval: time.Second})
	token := c.AddToken("home-1")
	a, err := agent.New(agent.Config{
		Controller: c.Address, StateDir: t.TempDir(), Token: func() (string, error) { return token, nil },
		Dataplane: plane, DataplaneName: plane.Name, Interface: plane,
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- a.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	var s *sessiontest.Session
	select {
	case s = <-c.Sessions:
	case <-time.After(time.Minute):
		t.Fatal("there is no session")
	}
	l := dataplanetest.Link()
	s.Push(wire.FromDesired(plan.Desired{Revision: 1, Hash: l.Hash(), Link: &l}, 1))
	shaped := func(st *pb.Status) bool {
		return st.GetEffectiveHash() == l.Hash() && has(st, "Degraded", false, "")
	}
	told(t, s, "it shapes", shaped)
	online("shaped")

	fault.panics.Store(1)
	online("after a panic")
	told(t, s, "a panic", func(st *pb.Status) bool {
		return has(st, "Degraded", true, "the packet loop has panicked and started afresh, what waited has passed unshaped: panic 1: planted")
	})
	online("after a panic that was told")

	fault.panics.Store(maxPanics - 1) // one has been
	online("after the loop has ended")
	told(t, s, "the loop has ended", func(st *pb.Status) bool {
		return has(st, "Crashed", true, "3 panics in the packet loop, the last: planted")
	})
	told(t, s, "another loop", func(st *pb.Status) bool {
		return shaped(st) && has(st, "Crashed", true, "the data plane has given up and is opened anew")
	})
	online("with another loop")

	fault.stall <- struct{}{}
	online("while the loop stands still")
	told(t, s, "the loop stands still", func(st *pb.Status) bool {
		return has(st, "Degraded", true, "the packet loop stands still: packets pass unshaped until it moves")
	})
	online("while the loop stands still and it is told")
	fault.goesOn <- struct{}{}
	told(t, s, "the loop moves", shaped)
	online("when the loop moves")
}
