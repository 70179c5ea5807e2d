package traffic

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"time"
)

// Process is one running end.
type Process struct {
	cmd    *exec.Cmd
	stdin  io.Closer
	stderr *strings.Builder // complete once done is closed
	done   chan struct{}
	err    error // set before done is closed
	once   sync.Once
}

// Start runs this program again as one end of the traffic and lets its
// readings go to rec. start starts the command, such as in a namespace. It
// returns once the process runs and its listeners are open.
func Start(start func(*exec.Cmd) error, spec Spec, rec *Record) (*Process, error) {
	text, err := json.Marshal(spec)
	if err != nil {
		return nil, fmt.Errorf("start traffic: %w", err)
	}
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("start traffic: %w", err)
	}
	p := &Process{cmd: exec.Command(self), stderr: new(strings.Builder), done: make(chan struct{})}
	p.cmd.Env = append(os.Environ(), childEnv+"="+string(text))
	p.cmd.Stderr = p.stderr
	stdin, err := p.cmd.StdinPipe()
	if err != nil {
		return nil, fmt.Errorf("start traffic: %w", err)
	}
	stdout, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, fmt.Errorf("start traffic: %w", err)
	}
	p.stdin = stdin
	if err := start(p.cmd); err != nil {
		return nil, fmt.Errorf("start traffic: %w", err)
	}
	ready := make(chan struct{})
	go p.read(stdout, rec, ready)
	select {
	case <-ready:
		return p, nil
	case <-p.done:
		return nil, fmt.Errorf("start traffic: %w", p.err)
	case <-time.After(time.Minute):
		return nil, errors.Join(errors.New("start traffic: the process says nothing"), p.Stop())
	}
}

func (p *Process) read(stdout io.Reader, rec *Record, ready chan struct{}) {
	defer close(p.done)
	lines := bufio.NewReader(stdout)
	for first := true; ; first = false {
		line, err := lines.ReadBytes('\n')
		if err != nil {
			break
		}
		var r reading
		if err := json.Unmarshal(line, &r); err != nil {
			p.err = fmt.Errorf("read %q: %w", line, err)
			break
		}
		rec.add(r)
		if first {
			close(ready)
		}
	}
	if err := p.cmd.Wait(); err != nil {
		p.err = errors.Join(p.err, fmt.Errorf("%w: %s", err, strings.TrimSpace(p.stderr.String())))
	}
}

// Stop ends the process and returns what it died of, if it did not end by
// itself. It is idempotent.
func (p *Process) Stop() error {
	p.once.Do(func() { _ = p.stdin.Close() }) // how it is told to end
	select {
	case <-p.done:
	case <-time.After(time.Minute):
		_ = p.cmd.Process.Kill() // Wait says what became of it
		<-p.done
	}
	return p.err
}
