package api_test

import (
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/cakefleet/cakefleet/controller/api"
	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/controller/store/storetest"
)

// Two devices with one identity live at two controllers. Each of their sessions
// ends the other's, wherever that is, and when they have taken turns both are
// refused by both controllers.
func TestFleet048_ClonesAtTwoControllers(t *testing.T) {
	kv, dir := storetest.NewKV(), t.TempDir()
	one := newFixtureOn(t, kv, dir, api.SessionConfig{Interval: interval})
	two := newFixtureOn(t, kv, dir, api.SessionConfig{Interval: interval})
	two.keys = one.keys
	membersOne, _ := one.join(kv, "core-1")
	membersTwo, _ := two.join(kv, "core-2")
	one.setPlan("gold", 20e6)
	one.setRouter("home-1", "gold")
	ops := one.dial(one.operators, one.operatorCert())
	known := func(f *fixture) (is bool) {
		f.store.View(func(st *store.State) { _, is = st.Router("home-1") })
		return is
	}
	eventually(t, "the controllers know each other and the router", func() bool {
		return known(one) && known(two) && len(membersOne.Others()) == 1 && len(membersTwo.Others()) == 1
	})
	cert := one.routerCert("home-1")
	look := func(f *fixture) { f.sessions.LookElsewhere(t.Context()) }

	// One that moves is one, and what it has left behind ends.
	left, err := one.session(one.dial(one.agents, cert), "home-1", "same")
	noError(t, err)
	_, err = two.session(two.dial(two.agents, cert), "home-1", "same")
	noError(t, err)
	look(two)
	look(one)
	if got := left.ends(); got != codes.Aborted {
		t.Errorf("the session that was left ends with %v", got)
	}

	type end struct {
		f    *fixture
		conn *grpc.ClientConn
		boot string
		live *agent
	}
	ends := []*end{{f: one, conn: one.dial(one.agents, cert), boot: "a"}, {f: two, conn: two.dial(two.agents, cert), boot: "b"}}
	quarantined := func() bool { return one.router(ops, "home-1").GetQuarantine() != nil }
	turns := 0
	for ; turns < 4; turns++ {
		now, before := ends[turns%2], ends[1-turns%2]
		now.live, err = now.f.session(now.conn, "home-1", now.boot)
		if status.Code(err) == codes.FailedPrecondition { // what the turn before has proved is written
			break
		}
		noError(t, err)
		look(now.f)
		look(before.f)
		if before.live != nil {
			if got := before.live.ends(); got != codes.Aborted && got != codes.FailedPrecondition {
				t.Errorf("turn %d: the other one's session ends with %v", turns, got)
			}
		}
	}
	if turns < 3 {
		t.Errorf("in quarantine after %d turns, want 3 or 4", turns)
	}
	eventually(t, "home-1 is in quarantine", quarantined)
	if devices := one.router(ops, "home-1").GetQuarantine().GetDevices(); len(devices) != 2 || devices[0].GetBootId() == devices[1].GetBootId() || devices[0].GetAddress() == "" || devices[1].GetAddress() == "" {
		t.Errorf("devices are %v", devices)
	}
	for _, e := range ends {
		eventually(t, "both controllers refuse "+e.boot, func() bool {
			_, err := e.f.session(e.conn, "home-1", e.boot)
			return status.Code(err) == codes.FailedPrecondition
		})
	}
}
