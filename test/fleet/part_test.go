package fleet_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/cakefleet/cakefleet/controller"
	"github.com/cakefleet/cakefleet/controller/lead"
	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/controller/store/etcdtest"
)

// partEnv has the part that a process of this program plays, as JSON. Without
// it the process is the test.
const partEnv = "CAKEFLEET_TEST_PART"

// part is what a process does.
type part struct {
	Etcd       *etcdtest.Member
	Controller *controllerPart
}

// controllerPart is one controller and the led work of this test.
type controllerPart struct {
	Name      string
	Dir       string
	IP        string
	Endpoints []string
	CA        string // folder of the fleet's authority
	Lose      string // what an event of a watch contains that is lost; empty: nothing is
	NoFence   bool   // leave the fence out of led work
}

// ttl is the time of the led work's lease.
const ttl = 2 * time.Second

func TestMain(m *testing.M) {
	text := os.Getenv(partEnv)
	if text == "" {
		os.Exit(m.Run())
	}
	// Nothing of a test that is killed goes on.
	go func(parent int) {
		for os.Getppid() == parent {
			time.Sleep(time.Second)
		}
		os.Exit(1)
	}(os.Getppid())
	var p part
	err := json.Unmarshal([]byte(text), &p)
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	switch {
	case err != nil:
	case p.Etcd != nil:
		err = p.Etcd.Run(ctx)
	default:
		err = p.Controller.run(ctx)
	}
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

func (p *controllerPart) run(ctx context.Context) error {
	c := controller.DefaultConfig()
	c.DataDir, c.ListenHTTP, c.ListenAdmin = p.Dir, "", ""
	c.ListenAgents, c.ListenOperators = p.IP+":8443", p.IP+":8444"
	c.ListenPeers = p.IP + ":8447"
	c.EtcdEndpoints = p.Endpoints
	c.CACert, c.CAKey = p.CA+"/ca.pem", p.CA+"/ca.key"
	c.Logger = hclog.New(&hclog.LoggerOptions{Name: p.Name, Level: hclog.Warn, Output: os.Stderr})
	if p.Lose != "" {
		c.BetweenStore = func(kv store.Leaser) store.Leaser { return &losing{kv, []byte(p.Lose)} }
	}
	ctl, err := controller.New(c)
	if err != nil {
		return err
	}
	done := make(chan error, 2)
	go func() { done <- ctl.Run(ctx) }()
	go func() { done <- p.tally(ctx) }()
	return errors.Join(<-done, <-done)
}

// losing is a KV whose watches don't see some events.
type losing struct {
	store.Leaser
	lose []byte
}

func (l *losing) Watch(ctx context.Context, prefix string, after int64, seen func(store.Batch)) error {
	return l.Leaser.Watch(ctx, prefix, after, func(b store.Batch) {
		var kept []store.Item
		for _, it := range b.Items {
			if !bytes.Contains(it.Value, l.lose) {
				kept = append(kept, it)
			}
		}
		b.Items = kept
		seen(b)
	})
}

// The led work counts in the store, and writes down who did each step. Only the
// fence keeps two from doing the same step: the writes compare nothing else.
const (
	tallyKey = "/cakefleet-test/tally"
	stepsKey = "/cakefleet-test/steps/"
)

func (p *controllerPart) tally(ctx context.Context) error {
	if len(p.Endpoints) == 0 {
		return nil // a controller that is alone
	}
	s, err := store.OpenEtcd(ctx, store.Config{Endpoints: p.Endpoints})
	if err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	defer func() { _ = s.Close() }()
	kv, err := s.Leases()
	if err != nil {
		return err
	}
	return lead.New(kv, lead.Config{Name: p.Name, TTL: ttl}).Run(ctx, "test-tally", func(ctx context.Context, fence store.Compare) error {
		for ctx.Err() == nil {
			if err := p.step(ctx, kv, fence); err != nil {
				return err
			}
		}
		return nil
	})
}

// step does one step. It looks at its context before, and not again: that is
// where a real leader may be stopped for as long as it likes.
func (p *controllerPart) step(ctx context.Context, kv store.Leaser, fence store.Compare) error {
	items, _, err := kv.Get(ctx, tallyKey)
	if err != nil {
		return err
	}
	n := 0
	if len(items) > 0 {
		if n, err = strconv.Atoi(string(items[0].Value)); err != nil {
			return err
		}
	}
	n++
	work, compares := 20*time.Millisecond, []store.Compare{fence}
	if p.NoFence {
		work, compares = time.Second, nil // long enough to be stopped in
	}
	time.Sleep(work)
	ops := []store.Op{
		{Key: tallyKey, Value: []byte(strconv.Itoa(n))},
		{Key: fmt.Sprintf("%s%06d/%s-%d", stepsKey, n, p.Name, os.Getpid()), Value: []byte(p.Name)},
	}
	// A write that is on its way is on its way, whatever happens to the work.
	res, err := kv.Txn(context.WithoutCancel(ctx), compares, ops)
	if err == nil && !res.OK {
		return store.ErrFenced
	}
	return err
}
