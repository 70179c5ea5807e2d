package api_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/cakefleet/cakefleet/controller/api"
	"github.com/cakefleet/cakefleet/controller/door"
	"github.com/cakefleet/cakefleet/controller/fleet"
	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/simagent"
	"github.com/cakefleet/cakefleet/internal/wire"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// heap returns how many bytes live.
func heap() int64 {
	runtime.GC()
	runtime.GC() // what the first one's finalizers let go of
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// statistics is a report of a line that carries some packets more each time.
func statistics(sequence uint64) *plan.Report {
	direction := func(rate engine.BitsPerSecond) *engine.Stats {
		s := &engine.Stats{Config: engine.DefaultConfig(), NumTins: 4}
		s.Config.Rate = rate
		for i := range s.Tins[:s.NumTins] {
			tin := &s.Tins[i]
			tin.Packets, tin.Bytes = 100*sequence, 140_000*sequence
			for b := range 30 {
				tin.Sojourn[20+b] = 3 * sequence
			}
		}
		return s
	}
	return &plan.Report{Sequence: sequence, BootID: "b", Uptime: time.Duration(sequence) * time.Minute, Down: direction(100e6), Up: direction(10e6)}
}

// A day of a fleet under constant load: reports, news, sessions that end and
// begin again. What lives after six hours, when everything that is kept for a
// while is there, is what lives in the end. Of the 21 600 reports in between
// 12 bytes each would be seen.
func TestFleet022_ADayOfConstantLoad(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, sessions := newSessionsWith(t, api.SessionConfig{Interval: time.Minute, MaxAge: time.Hour})
		stop := running(sessions)
		f.setPlan("gold", 20e6)
		const routers, day, settled = 20, 24 * 60, 6 * 60
		streams := make([]*fakeStream, routers)
		var before int64
		for minute := range uint64(day) {
			if minute == settled {
				before = heap()
			}
			for i := range streams {
				id := fmt.Sprintf("home-%d", i)
				if minute == 0 {
					f.setRouter(id, "gold")
				}
				if s := streams[i]; s != nil && (minute+uint64(i))%45 == 0 {
					s.End(nil)
					streams[i] = nil
				}
				if streams[i] == nil {
					streams[i] = f.fakeStream(id)
					streams[i].say(hello(id))
				}
				for _, d := range streams[i].pushed() {
					streams[i].say(applied(d))
				}
				streams[i].say(&pb.ConnectRequest{Message: &pb.ConnectRequest_Report{Report: wire.FromReport(statistics(minute + 1))}})
			}
			time.Sleep(time.Minute)
		}
		if grown := heap() - before; grown > 256<<10 {
			t.Errorf("%d kB more live after a day than after six hours, when %d kB did", grown>>10, before>>10)
		}
		for _, s := range streams {
			s.End(nil)
		}
		stop()
	})
}

// What is beyond all bounds ends its session with a code that says so, or is
// left out and told; what the real agent can send at most is far from it.
func TestFleet045_ReportsBeyondAllBounds(t *testing.T) {
	t.Run("the largest of an agent", func(t *testing.T) {
		r := &plan.Report{
			Sequence: ^uint64(0), BootID: strings.Repeat("b", 64), Uptime: 1<<63 - 1, Again: strings.Repeat("o", 64),
			Probe: &plan.ProbeStats{Host: strings.Repeat("h", 253), Address: strings.Repeat("a", 39), Error: strings.Repeat("e", 200)},
			WAN:   &plan.LinkState{Name: "fifteen-letters", Index: ^uint32(0), Speed: ^engine.BitsPerSecond(0)},
		}
		fill := func(h *engine.Histogram) {
			for i := range h {
				h[i] = ^uint64(0)
			}
		}
		for _, d := range []*plan.ProbeDelay{&r.Probe.Idle, &r.Probe.Down, &r.Probe.Up, &r.Probe.Both, &r.Probe.Light} {
			fill(&d.Delay)
		}
		direction := func() *engine.Stats {
			s := &engine.Stats{NumTins: engine.MaxTins}
			for i := range s.Tins {
				fill(&s.Tins[i].Sojourn)
			}
			return s
		}
		r.Down, r.Up = direction(), direction()
		size, most := len(wire.AppendReportRequest(nil, r, nil)), door.DefaultLimits().Message
		if size > most {
			t.Errorf("%d bytes, the door takes %d", size, most)
		}
		t.Logf("%d bytes of %d", size, most)
	})
	f := newFixture(t)
	f.setPlan("gold", 20e6)
	f.setRouter("home-1", "gold")
	classes := func(n int, tin *pb.TinStats) *pb.Report {
		r := &pb.Report{Sequence: 1, BootId: "boot-1", Down: &pb.DirectionStats{}}
		for range n {
			r.Down.Tins = append(r.Down.Tins, tin)
		}
		return r
	}
	t.Run("10 000 classes", func(t *testing.T) {
		a := f.connect("home-1", &pb.Hello{})
		d := a.desired()
		a.report(classes(10_000, &pb.TinStats{}))
		a.apply(d) // the session goes on
		ops := f.dial(f.operators, f.operatorCert())
		f.waitSync(ops, pb.SyncState_SYNC_STATE_IN_SYNC)
		if log := f.log.String(); !strings.Contains(log, "more than 8, at most 8 are known") {
			t.Errorf("not told why:\n%s", log)
		}
	})
	t.Run("more than 4 MiB", func(t *testing.T) {
		a := f.connect("home-1", &pb.Hello{})
		r := classes(10_000, &pb.TinStats{Packets: 1 << 60, Bytes: 1 << 60})
		for proto.Size(r) <= 4<<20 {
			r.Down.Tins = append(r.Down.Tins, r.GetDown().GetTins()...)
		}
		_ = a.stream.Send(&pb.ConnectRequest{Message: &pb.ConnectRequest_Report{Report: r}}) // the end may come before all of it went out
		if code := a.ends(); code != codes.ResourceExhausted {
			t.Errorf("ended with %v", code)
		}
	})
}

// Very many routers are listed page by page, in order and each once, and a page
// costs what its own routers cost, not what those before it do: ten times as
// many take ten times as long.
func TestFleet046_ListIsLinear(t *testing.T) {
	const n, size = 5_000, 500
	f := newBenchFleet(t, n)
	routers := api.NewRouterService(f.store, fleet.NewHub())
	var costs []uint64
	token, last, seen := "", "", 0
	for page := 0; page == 0 || token != ""; page++ {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		resp, err := routers.ListRouters(t.Context(), &pb.ListRoutersRequest{PageSize: size, PageToken: token})
		runtime.ReadMemStats(&after)
		noError(t, err)
		for _, r := range resp.GetRouters() {
			if r.GetId() <= last {
				t.Fatalf("%s comes after %s", r.GetId(), last)
			}
			last = r.GetId()
		}
		seen += len(resp.GetRouters())
		costs = append(costs, (after.Mallocs-before.Mallocs)/uint64(len(resp.GetRouters())))
		token = resp.GetNextPageToken()
	}
	if seen != n {
		t.Errorf("%d routers, want %d", seen, n)
	}
	if first, last := costs[0], costs[len(costs)-1]; last > first+first/5 {
		t.Errorf("objects for each router: %v from page to page", costs)
	}
	t.Logf("objects for each router: %v", costs)
}

// slowStream takes a while for every message, in which nothing else is sent by
// the worker that has it.
type slowStream struct {
	*fakeStream
	each time.Duration
}

func (s slowStream) Send(m proto.Message) error {
	if m.(*pb.ConnectResponse).GetDesired() != nil {
		time.Sleep(s.each)
	}
	return s.fakeStream.Send(m)
}

// Pushes to very many that go out at a rate at which the last one waits 50 s:
// none is given up or asked for again by that.
func TestFleet062_PushesInAQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, sessions := newSessions(t)
		f.setPlan("gold", 1e6)
		const n, rate = 1_000, 20
		each := time.Duration(runtime.GOMAXPROCS(0)) * time.Second / rate
		_, key := f.key("all")
		writes := make([]store.SubscriberWrite, n)
		for i := range writes {
			writes[i].Subscriber = plan.Subscriber{ID: fmt.Sprint(i), Plan: "gold"}
		}
		_, err := f.store.WriteSubscribers(t.Context(), writes)
		noError(t, err)
		streams := make([]*fakeStream, n)
		for i := range streams {
			id := fmt.Sprintf("home-%d", i)
			f.keys[id] = f.keys["all"]
			_, err := f.store.PutRouter(t.Context(), plan.Router{ID: id, Subscriber: fmt.Sprint(i), Key: key}, store.Any)
			noError(t, err)
			s := &fakeStream{t: t, out: make(chan *pb.ConnectResponse, 20), ended: make(chan error, 1)}
			session, err := sessions.Begin(peerContext(t, f.keys[id], id), slowStream{s, each})
			noError(t, err)
			s.session.Store(&session)
			streams[i] = s
		}
		// Routers answer within a second.
		pushes := func(seconds int) (pushes int) {
			for range seconds {
				time.Sleep(time.Second)
				for _, s := range streams {
					for len(s.out) > 0 {
						if d := (<-s.out).GetDesired(); d != nil {
							pushes++
							s.say(applied(d))
						}
					}
				}
			}
			return pushes
		}
		for i, s := range streams {
			s.say(hello(fmt.Sprintf("home-%d", i)))
		}
		if got := pushes(2 * n / rate); got != n {
			t.Errorf("%d first pushes to %d routers", got, n)
		}
		f.setPlan("gold", 2e6)
		early := pushes(n / rate / 2)
		if early > n*3/4 {
			t.Fatalf("%d pushes after half of the time: nothing waits", early)
		}
		if got := early + pushes(2*n/rate); got != n {
			t.Errorf("%d pushes to %d routers", got, n)
		}
		for _, s := range streams {
			select {
			case err := <-s.ended:
				t.Fatalf("a session ended while it waited: %v", err)
			default:
			}
			s.End(nil)
		}
		sessions.Wait()
	})
}

// Agents that come and go leave nothing behind: what lives after five rounds is
// what lived after the first.
func TestFleet070_AgentsComeAndGo(t *testing.T) {
	f := newFixture(t)
	f.setPlan("gold", 20e6)
	const n, rounds = 150, 5
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(f.authority.CertificatePEM())
	agents := &simagent.Fleet{
		TLS: &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS13}, Version: "v1", Model: "m", ReportEvery: -1,
		Address: func(*simagent.Agent) (string, net.Addr) { return f.agents.(tcp).address, nil },
	}
	var answered atomic.Int64
	agents.Hooks.Answered = func(*simagent.Agent) { answered.Add(1) }
	var all []*simagent.Agent
	for i := range n {
		id := fmt.Sprintf("home-%d", i)
		f.setRouter(id, "gold")
		all = append(all, agents.New(id, "b", *f.routerCert(id)))
	}
	var after []int64
	for round := range rounds {
		f.setPlan("gold", engine.BitsPerSecond(30e6+round)) // so that there is something to answer
		answered.Store(0)
		ctx, leave := context.WithCancel(t.Context())
		done := make(chan struct{})
		for _, a := range all {
			go func() { a.Run(ctx); done <- struct{}{} }()
		}
		eventually(t, "all have answered", func() bool { return answered.Load() >= n })
		leave()
		for range all {
			<-done
		}
		eventually(t, "nobody is left", func() bool { return f.door.Len() == 0 })
		after = append(after, heap())
	}
	first, last := after[0], after[len(after)-1]
	if last > first+first/5 || last > first+(rounds-1)*n<<10 { // a kilobyte of each session
		t.Errorf("bytes that live after each round: %d", after)
	}
	t.Logf("bytes that live after each round: %d", after)
}

// One change of one subscriber allocates the same in a small fleet as in one of
// ten times its size: nothing in its way goes over the fleet.
func TestFleet080_CostOfOneChange(t *testing.T) {
	each := func(n int) float64 {
		f := newBenchFleet(t, n)
		f.connect(t, n)
		defer f.close()
		f.change(t)
		c, _ := f.change(t)
		return float64(c.objects) / float64(c.changes)
	}
	small, large := each(changesPerRound), each(10*changesPerRound)
	if large > small*1.1 {
		t.Errorf("%.1f objects for each change in a large fleet, %.1f in a small one", large, small)
	}
	t.Logf("%.1f objects for each change in a large fleet, %.1f in a small one", large, small)
}
