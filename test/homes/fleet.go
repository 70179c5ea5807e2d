package homes

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// Fleet is a controller in the provider's network and an agent on each router.
type Fleet struct {
	Controller *Process
	Agents     []*Process // by home; nil where none runs

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
	return &Fleet{net: net, bin: bin, dir: dir, Agents: make([]*Process, len(net.Homes))}, nil
}

// ControllerAddress is where agents find the controller.
func (f *Fleet) ControllerAddress() string { return Noc4.String() + ":" + agentsPort }

// Credentials is the operator's file.
func (f *Fleet) Credentials() string { return filepath.Join(f.dir, "controller", "operator.pem") }

// StartController starts the controller, or starts it again with the state it
// had.
func (f *Fleet) StartController() (err error) {
	f.Controller, err = start(f.net.Noc, filepath.Join(f.dir, "controller.log"), filepath.Join(f.bin, "cakefleet-controller"),
		"--data-dir", filepath.Join(f.dir, "controller"),
		"--listen-agents", ":"+agentsPort,
		"--listen-operators", "127.0.0.1:"+operatorsPort,
		"--report-interval", "1s")
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
	args := []string{"--controller", f.ControllerAddress(), "--interface", WAN, "--state-dir", state, "--router-model", "demo router"}
	if token != "" {
		file := filepath.Join(state, "token")
		if err := os.WriteFile(file, []byte(token+"\n"), 0o600); err != nil {
			return err
		}
		args = append(args, "--token-file", file)
	}
	f.Agents[home], err = start(h.Router, filepath.Join(f.dir, h.Name+".log"), filepath.Join(f.bin, "cakefleet-agent"), append(args, more...)...)
	return err
}

// Ctl runs cakefleetctl where the controller runs and returns what it printed.
func (f *Fleet) Ctl(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, filepath.Join(f.bin, "cakefleetctl"),
		append([]string{"--controller", "127.0.0.1:" + operatorsPort, "--credentials", f.Credentials()}, args...)...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := f.net.Noc.Run(cmd); err != nil {
		return stdout.String(), fmt.Errorf("cakefleetctl %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return stdout.String(), nil
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
