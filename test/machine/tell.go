package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"

	"github.com/cakefleet/cakefleet/test/machine/order"
)

// teller prints what tests do as the go command would.
type teller struct {
	out    io.Writer
	tests  []order.Test
	ended  []bool
	failed bool
	events *events // of the test that runs; nil: none does, or text is printed
	start  func(pkg string) (*events, error)
}

func newTeller(ctx context.Context, out io.Writer, tests []order.Test, asJSON bool) (*teller, error) {
	t := &teller{out: out, tests: tests, ended: make([]bool, len(tests))}
	if !asJSON {
		return t, nil
	}
	// The go command makes it if need be.
	path, err := exec.CommandContext(ctx, "go", "tool", "-n", "test2json").Output()
	if err != nil {
		return nil, fmt.Errorf("go tool test2json: %w", err)
	}
	t.start = func(pkg string) (*events, error) { return newEvents(strings.TrimSpace(string(path)), pkg, out) }
	return t, nil
}

// take tells of one message.
func (t *teller) take(m order.Message) {
	if m.Done || m.Test >= len(t.tests) {
		return
	}
	switch {
	case m.Begins && t.start != nil:
		var err error
		if t.events, err = t.start(t.tests[m.Test].Package); err != nil {
			fmt.Fprintln(os.Stderr, "machine:", err)
		}
	case m.Output != "":
		t.output(m.Output)
	case m.Ended:
		line := fmt.Sprintf("%s\t%.3fs", t.tests[m.Test].Package, m.Took.Seconds())
		if m.Failed != "" {
			t.close(m.Test, true, "FAIL\t"+line+": "+m.Failed)
			return
		}
		t.close(m.Test, false, "ok  \t"+line)
	}
}

func (t *teller) output(text string) {
	if t.events != nil {
		_, _ = io.WriteString(t.events.in, text)
		return
	}
	_, _ = io.WriteString(t.out, text)
}

// close tells how a package has ended.
func (t *teller) close(i int, failed bool, line string) {
	if t.events != nil {
		t.events.close()
		t.events = nil
	}
	t.ended[i] = true
	t.failed = t.failed || failed
	if t.start == nil {
		fmt.Fprintln(t.out, line)
		return
	}
	pkg := t.tests[i].Package
	action := "pass"
	if failed {
		action = "fail"
	}
	t.event(event{Action: "output", Package: pkg, Output: line + "\n"})
	t.event(event{Action: action, Package: pkg})
}

func (t *teller) event(e event) {
	if b, err := json.Marshal(e); err == nil {
		_, _ = t.out.Write(append(b, '\n'))
	}
}

// end tells of the tests that have not ended, and why; then it returns whether
// all went well.
func (t *teller) end(why string) error {
	if why != "" {
		t.failed = true
	}
	for i, test := range t.tests {
		if t.ended[i] {
			continue
		}
		if why == "" {
			why = "the machine did not run it"
		}
		if t.events != nil { // it is the one that ran
			t.output("\n")
		}
		t.close(i, true, "FAIL\t"+test.Package+": "+why)
		why = "not run, as the machine had ended"
	}
	if t.failed {
		return errFailed
	}
	return nil
}

// event is one of test2json's.
type event struct {
	Action  string
	Package string
	Test    string `json:",omitempty"`
	Output  string `json:",omitempty"`
}

// events makes events of what one test binary writes.
type events struct {
	in   io.WriteCloser
	done chan struct{}
	cmd  *exec.Cmd
}

// newEvents starts test2json, whose events go to out, but those of how the
// package began and ended: it can't know that.
func newEvents(path, pkg string, out io.Writer) (*events, error) {
	e := &events{cmd: exec.Command(path, "-p", pkg), done: make(chan struct{})}
	e.cmd.Stderr = os.Stderr
	from, err := e.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if e.in, err = e.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	if err := e.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		defer close(e.done)
		for lines := bufio.NewReader(from); ; {
			line, err := lines.ReadBytes('\n')
			if err != nil {
				return
			}
			var ev event
			if json.Unmarshal(bytes.TrimSpace(line), &ev) == nil && ev.Test == "" && ev.Action != "output" {
				continue
			}
			_, _ = out.Write(line)
		}
	}()
	return e, nil
}

func (e *events) close() {
	_ = e.in.Close()
	<-e.done
	_ = e.cmd.Wait()
}
