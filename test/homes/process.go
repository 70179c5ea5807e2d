package homes

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"github.com/cakefleet/cakefleet/internal/testnet"
)

// Process is one of the fleet's programs, running in a namespace. It outlives
// the program that started it unless it is stopped.
type Process struct {
	Log string // file with what it writes

	cmd  *exec.Cmd
	done chan struct{}
	err  error // set before done is closed
}

func start(ns *testnet.Namespace, nice int, log, program string, args ...string) (*Process, error) {
	f, err := os.OpenFile(log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", program, err)
	}
	defer f.Close()
	cmd := exec.Command(program, args...)
	cmd.Stdout, cmd.Stderr = f, f
	// Ctrl-C is for the one who started us all; it ends these in order.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := ns.Do(func() error {
		// Of this thread, which ns throws away afterwards; the program inherits it.
		if err := syscall.Setpriority(syscall.PRIO_PROCESS, 0, nice); err != nil {
			return err
		}
		return cmd.Start()
	}); err != nil {
		return nil, fmt.Errorf("start %s: %w", program, err)
	}
	p := &Process{Log: log, cmd: cmd, done: make(chan struct{})}
	go func() {
		p.err = cmd.Wait()
		close(p.done)
	}()
	return p, nil
}

// PID returns its process id.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Done is closed when it has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// Signal sends it a signal.
func (p *Process) Signal(s syscall.Signal) error { return p.cmd.Process.Signal(s) }

// Kill ends it without asking and waits for its end.
func (p *Process) Kill() error {
	if err := p.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	<-p.done
	return nil
}

// Stop asks it to end and waits. It is an error if that takes too long or the
// program reports one.
func (p *Process) Stop() error {
	select {
	case <-p.done:
		return p.ended()
	default:
	}
	if err := p.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	select {
	case <-p.done:
		return p.ended()
	case <-time.After(time.Minute):
		return errors.Join(fmt.Errorf("%s does not end when asked", filepath.Base(p.cmd.Path)), p.Kill())
	}
}

func (p *Process) ended() error {
	if p.err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w; see %s", filepath.Base(p.cmd.Path), p.err, p.Log)
}
