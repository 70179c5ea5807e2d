package homes

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// Fleet is a controller in the provider's network and an agent on each router.
type Fleet struct {
	Controller *Process
	Agents     []*Process // by home; nil where none runs
	// ReportInterval is the time between two reports; to be changed before the
	// controller is started.
	ReportInterval time.Duration

	net *Network
	bin string
	dir string
}

// Ports of the controller's doors.
const (
	agentsPort    = "8443"
	operatorsPort = "8444"
)

// NewFleet returns one of which nothing runs yet. The programs are in bin;
// state and logs go to dir.
func NewFleet(net *Network, bin, dir string) (*Fleet, error) {
	bin, err := filepath.Abs(bin)
	if err != nil {
		return nil, err
	}
	if dir, err = filepath.Abs(dir); err != nil {
		return nil, err
	}
	return &Fleet{net: net, bin: bin, dir: dir, Agents: make([]*Process, len(net.Homes)), ReportInterval: time.Second}, nil
}

// ControllerAddress is where agents find the controller.
func (f *Fleet) ControllerAddress() string { return Noc4.String() + ":" + agentsPort }

// Credentials is the operator's file.
func (f *Fleet) Credentials() string { return filepath.Join(f.dir, "controller", "operator.pem") }

// StartController starts the controller, or starts it again with the state it
// had.
func (f *Fleet) StartController() (err error) {
	f.Controller, err = start(f.net.Noc, bulkNice, filepath.Join(f.dir, "controller.log"), filepath.Join(f.bin, "cakefleet-controller"),
		"--data-dir", filepath.Join(f.dir, "controller"),
		"--listen-agents", ":"+agentsPort,
		"--listen-operators", "127.0.0.1:"+operatorsPort,
		"--report-interval", f.ReportInterval.String())
	return err
}

// StartAgent starts the agent of a home, counted from 0. The token is for its
// first start only.
func (f *Fleet) StartAgent(home int, token string, more ...string) (err error) {
	h := f.net.Homes[home]
	state := filepath.Join(f.dir, h.Name)
	if err := os.MkdirAll(state, 0o700); err != nil {
		return err
	}
	// The directory would be in a router's memory; routers here share that.
	args := []string{"--controller", f.ControllerAddress(), "--interface", WAN, "--state-dir", state, "--run-dir", filepath.Join(state, "run"), "--router-model", "demo router"}
	if token != "" {
		file := filepath.Join(state, "token")
		if err := os.WriteFile(file, []byte(token+"\n"), 0o600); err != nil {
			return err
		}
		args = append(args, "--token-file", file)
	}
	f.Agents[home], err = start(h.Router, routerNice, filepath.Join(f.dir, h.Name+".log"), filepath.Join(f.bin, "cakefleet-agent"), append(args, more...)...)
	return err
}

// Ctl runs cakefleetctl where the controller runs and returns its result. What
// else it has to say for people goes to notes, unless that is nil.
func (f *Fleet) Ctl(ctx context.Context, notes io.Writer, args ...string) (string, error) {
	var stdout bytes.Buffer
	err := f.CtlTo(ctx, &stdout, notes, args...)
	return stdout.String(), err
}

// CtlTo is Ctl for a command that goes on for long: its result is written
// while it comes.
func (f *Fleet) CtlTo(ctx context.Context, stdout, notes io.Writer, args ...string) error {
	cmd := exec.CommandContext(ctx, filepath.Join(f.bin, "cakefleetctl"),
		append([]string{"--controller", "127.0.0.1:" + operatorsPort, "--credentials", f.Credentials()}, args...)...)
	var stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = stdout, &stderr
	if err := f.net.Noc.Run(cmd); err != nil {
		return fmt.Errorf("cakefleetctl %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(stderr.String()))
	}
	if notes != nil {
		_, _ = stderr.WriteTo(notes)
	}
	return nil
}

// RouterState is what the controller knows of a router.
type RouterState struct {
	ID               string
	Connected, Sync  bool  // in sync: the newest desired state was acknowledged and read back
	Desired, Applied int64 // revisions
	Rejected         int64 // revision that was refused
	Error            string
}

// Routers asks cakefleetctl for the state of all routers.
func (f *Fleet) Routers(ctx context.Context) ([]RouterState, error) {
	text, err := f.Ctl(ctx, nil, "router", "list", "-o", "json")
	if err != nil {
		return nil, err
	}
	var list struct {
		Routers []struct {
			ID      string
			Desired struct {
				Revision int64 `json:",string"`
			}
			Reported struct {
				Applied  int64 `json:"applied_revision,string"`
				Rejected int64 `json:"rejected_revision,string"`
				Error    string
			}
			Session struct {
				Connected bool
				Sync      string
			}
		}
	}
	if err := json.Unmarshal([]byte(text), &list); err != nil {
		return nil, fmt.Errorf("read the list of routers: %w", err)
	}
	var states []RouterState
	for _, r := range list.Routers {
		states = append(states, RouterState{
			ID: r.ID, Connected: r.Session.Connected, Sync: r.Session.Sync == "SYNC_STATE_IN_SYNC",
			Desired: r.Desired.Revision, Applied: r.Reported.Applied, Rejected: r.Reported.Rejected, Error: r.Reported.Error,
		})
	}
	return states, nil
}

// Await asks until all routers fit. It gives up when ctx ends, or when a
// program of the fleet has ended.
func (f *Fleet) Await(ctx context.Context, fits func(RouterState) bool) error {
	for {
		states, asked := f.Routers(ctx)
		n := 0
		for _, s := range states {
			if fits(s) {
				n++
			}
		}
		if n == len(f.Agents) {
			return nil
		}
		if err := f.Ended(); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w; the routers are: %+v", errors.Join(context.Cause(ctx), asked), states)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// AwaitController asks until the controller answers.
func (f *Fleet) AwaitController(ctx context.Context) error {
	for {
		_, err := f.Ctl(ctx, nil, "plan", "list")
		if err == nil {
			return nil
		}
		if err := f.Ended(); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", context.Cause(ctx), err)
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// Stop stops everything that runs, agents first.
func (f *Fleet) Stop() error {
	var errs []error
	for i, a := range f.Agents {
		if a != nil {
			errs = append(errs, a.Stop())
			f.Agents[i] = nil
		}
	}
	if f.Controller != nil {
		errs = append(errs, f.Controller.Stop())
		f.Controller = nil
	}
	return errors.Join(errs...)
}

// Ended returns an error if a program of the fleet has ended by itself, with
// the end of what it wrote.
func (f *Fleet) Ended() error {
	for _, p := range append([]*Process{f.Controller}, f.Agents...) {
		if p == nil {
			continue
		}
		select {
		case <-p.done:
			text, _ := os.ReadFile(p.Log) // better than nothing
			return fmt.Errorf("%s has ended (%w): %s", filepath.Base(p.cmd.Path), p.err, tail(text, 2000))
		default:
		}
	}
	return nil
}

func tail(text []byte, n int) []byte { return text[max(0, len(text)-n):] }
