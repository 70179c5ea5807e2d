package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// command is a process that ends with ctx, and with this one.
func command(ctx context.Context, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.Stderr = os.Stderr
	return cmd
}

// child is a process of agents that answers questions.
type child struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

// answer is what a child says.
type answer struct {
	Connected int
	Answered  int         // since they were taken
	Reported  int         // agents that have reported twice: what they are told then is how it stays
	Times     []time.Time // of answers, if they were taken
}

// startChild starts a part of this program.
func startChild(ctx context.Context, args ...string) (*child, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	c := &child{cmd: command(ctx, self, args...)}
	if c.in, err = c.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	c.out = bufio.NewReader(out)
	return c, c.cmd.Start()
}

// ask sends a word and returns the answer.
func (c *child) ask(word string) (a answer, err error) {
	if _, err := fmt.Fprintln(c.in, word); err != nil {
		return a, err
	}
	line, err := c.out.ReadBytes('\n')
	if err != nil {
		return a, fmt.Errorf("process of agents: %w", err)
	}
	return a, json.Unmarshal(line, &a)
}

// stop ends the child.
func (c *child) stop() {
	_ = c.in.Close() // the sign to end
	_ = c.cmd.Wait() // how it ended does not matter any more
}

// crowd is all children of one job.
type crowd []*child

// ask asks all and adds up.
func (all crowd) ask(word string) (sum answer, err error) {
	for _, c := range all {
		a, err := c.ask(word)
		if err != nil {
			return sum, err
		}
		sum.Connected += a.Connected
		sum.Answered += a.Answered
		sum.Reported += a.Reported
		sum.Times = append(sum.Times, a.Times...)
	}
	return sum, nil
}

// until asks until the answer is as wanted.
func (all crowd) until(ctx context.Context, what string, within time.Duration, ok func(answer) bool) error {
	for end := time.Now().Add(within); ; {
		a, err := all.ask("count")
		if err != nil {
			return err
		}
		if ok(a) {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("%s: not within %v: %+v", what, within, a)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(50 * time.Millisecond):
		}
	}
}

func (all crowd) stop() {
	for _, c := range all {
		c.stop()
	}
}

// tally counts in a child what its parent asks for.
type tally struct {
	mu sync.Mutex
	a  answer
}

func (t *tally) add(fn func(*answer)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	fn(&t.a)
}

func (t *tally) answered() {
	now := time.Now()
	t.add(func(a *answer) {
		a.Answered++
		a.Times = append(a.Times, now)
	})
}

// serve answers the parent until it closes the pipe. do does other words.
func (t *tally) serve(do func(word string)) error {
	in, out := bufio.NewScanner(os.Stdin), json.NewEncoder(os.Stdout)
	for in.Scan() {
		t.mu.Lock()
		a := t.a
		if in.Text() == "take" {
			t.a.Answered, t.a.Times = 0, nil
		} else {
			a.Times = nil
		}
		t.mu.Unlock()
		if do != nil {
			do(in.Text())
		}
		if err := out.Encode(a); err != nil {
			return err
		}
	}
	return in.Err()
}

// usage is what processes have used.
type usage struct {
	cpu      time.Duration
	resident int64 // bytes
}

// used adds up what processes have used until now.
func used(pids ...int) (u usage, err error) {
	for _, pid := range pids {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			return u, err
		}
		// The name in parentheses may have spaces.
		_, rest, ok := strings.Cut(string(stat), ") ")
		f := strings.Fields(rest)
		if !ok || len(f) < 22 {
			return u, errors.New("/proc: stat is not understood")
		}
		for _, i := range []int{11, 12} { // utime, stime
			ticks, err := strconv.ParseInt(f[i], 10, 64)
			if err != nil {
				return u, err
			}
			u.cpu += time.Duration(ticks) * (time.Second / 100)
		}
		pages, err := strconv.ParseInt(f[21], 10, 64)
		if err != nil {
			return u, err
		}
		u.resident += pages * int64(os.Getpagesize())
	}
	return u, nil
}

// round is one change to all: it is made, and all answers are waited for.
func round(ctx context.Context, all crowd, n int, pids []int, change func() error) (p pushed, err error) {
	if _, err := all.ask("take"); err != nil {
		return p, err
	}
	before, err := used(pids...)
	if err != nil {
		return p, err
	}
	began := time.Now()
	if err := change(); err != nil {
		return p, err
	}
	if err := all.until(ctx, "answers of all agents", 5*time.Minute, func(a answer) bool { return a.Answered >= n }); err != nil {
		return p, err
	}
	time.Sleep(time.Second) // what is left to do for the server
	after, err := used(pids...)
	if err != nil {
		return p, err
	}
	a, err := all.ask("take")
	if err != nil {
		return p, err
	}
	p.p50, p.p99, p.last = summary(began, a.Times)
	p.cpu = float64((after.cpu - before.cpu).Microseconds()) / float64(n)
	return p, nil
}

// rounds does several, and returns the medians. The first warms up.
func rounds(ctx context.Context, o options, all crowd, pids []int, change func(i int) error) (pushed, error) {
	var p50, p99, last []time.Duration
	var cpu []float64
	for i := range o.rounds + 1 {
		p, err := round(ctx, all, o.n, pids, func() error { return change(i) })
		if err != nil {
			return pushed{}, err
		}
		if i == 0 {
			continue
		}
		p50, p99, last, cpu = append(p50, p.p50), append(p99, p.p99), append(last, p.last), append(cpu, p.cpu)
	}
	return pushed{cpu: median(cpu), p50: median(p50), p99: median(p99), last: median(last)}, nil
}
