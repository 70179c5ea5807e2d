package traffic

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

const childEnv = "CAKEFLEET_TRAFFIC"

// IsChild says whether this process was started by Start.
func IsChild() bool { return os.Getenv(childEnv) != "" }

// ChildMain does what the parent asked for until standard input ends, which
// it also does when the parent dies. It returns the exit status.
func ChildMain() int {
	if err := child(os.Getenv(childEnv), os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "traffic:", err)
		return 1
	}
	return 0
}

func child(text string, stdin io.Reader, stdout io.Writer) error {
	var spec Spec
	if err := json.Unmarshal([]byte(text), &spec); err != nil {
		return fmt.Errorf("read specification: %w", err)
	}
	if spec.Nice != 0 {
		if err := setNice(spec.Nice); err != nil {
			return err
		}
	}
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	go func() {
		_, _ = io.Copy(io.Discard, stdin)
		stop()
	}()

	c := &counters{bytes: map[string]*atomic.Uint64{}}
	if spec.Serve != 0 {
		if err := serve(ctx, spec, c); err != nil {
			return err
		}
	}
	for _, f := range spec.Flows {
		go runFlow(ctx, f, spec.Congestion, c)
	}
	for _, p := range spec.Probes {
		if err := startProbe(ctx, p, c); err != nil {
			return err
		}
	}
	// The first line says that the listeners are open.
	out := json.NewEncoder(stdout)
	every := time.NewTicker(tick)
	defer every.Stop()
	for {
		if err := out.Encode(c.read()); err != nil {
			return fmt.Errorf("write readings: %w", err)
		}
		select {
		case <-every.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// setNice sets the priority of every thread: to Linux it is a thread's, and
// new threads have that of the one that makes them.
func setNice(nice int) error {
	for range 2 { // one may have been made while the first round ran
		threads, err := os.ReadDir("/proc/self/task")
		if err != nil {
			return fmt.Errorf("set priority: %w", err)
		}
		for _, t := range threads {
			id, err := strconv.Atoi(t.Name())
			if err == nil {
				err = syscall.Setpriority(syscall.PRIO_PROCESS, id, nice)
			}
			if err != nil && !errors.Is(err, syscall.ESRCH) { // a thread that has ended
				return fmt.Errorf("set priority: %w", err)
			}
		}
	}
	return nil
}

// counters are what a process has counted.
type counters struct {
	mu     sync.Mutex // guards all below; the atomics are counted without it
	bytes  map[string]*atomic.Uint64
	sent   []packet
	echoed []packet
	err    string
}

func (c *counters) flow(name string) *atomic.Uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := c.bytes[name]
	if n == nil {
		n = new(atomic.Uint64)
		c.bytes[name] = n
	}
	return n
}

func (c *counters) broke(name string, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err == "" {
		c.err = fmt.Sprintf("%s: %v", name, err)
	}
}

func (c *counters) addSent(p packet) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.sent = append(c.sent, p)
}

func (c *counters) addEchoed(p packet) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.echoed = append(c.echoed, p)
}

// read returns what is new and forgets the packets.
func (c *counters) read() reading {
	c.mu.Lock()
	defer c.mu.Unlock()
	r := reading{At: time.Now().UnixNano(), Sent: c.sent, Echoed: c.echoed, Error: c.err}
	c.sent, c.echoed, c.err = nil, nil, ""
	if len(c.bytes) > 0 {
		r.Bytes = make(map[string]uint64, len(c.bytes))
		for name, n := range c.bytes {
			r.Bytes[name] = n.Load()
		}
	}
	return r
}
