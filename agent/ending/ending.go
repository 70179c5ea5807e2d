// Package ending tells how the agent before this one has ended. It is noted in
// a directory that routers keep in memory: a power cut, which is no fault of the
// agent, takes the note along, and nothing is written to flash.
package ending

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime/debug"
	"strconv"
	"strings"
)

// Reasons, one word each.
const (
	Panic       = "Panic"       // or another fatal error of the Go runtime
	Error       = "Error"       // it gave up and said why
	OutOfMemory = "OutOfMemory" // the kernel killed for want of memory
	Killed      = "Killed"      // nothing is known but that it was not stopped
)

// Previous are the agents on the same interface that have ended without being
// stopped, one after the other, until this one started.
type Previous struct {
	Count   int    // 0: the last one was stopped, or there was none since the router booted
	Reason  string // of the last
	Message string // for people: what is known of the last
}

// Record notes that this agent runs. A nil Record does nothing.
type Record struct {
	runs, crash string // files
	previous    Previous
	open        bool
}

const (
	maxCrash  = 8 << 10 // of what the runtime says when it ends, more than its first goroutine
	maxReason = 200     // characters of it that are told
)

// Begin reads how the agent before has ended, and notes that another one runs.
// name is that of the interface. What the Go runtime says when it ends this
// process is kept, too.
func Begin(dir, name string) (*Record, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("note that the agent runs: %w", err)
	}
	r := &Record{runs: filepath.Join(dir, name+".runs"), crash: filepath.Join(dir, name+".crash"), open: true}
	kills := killsForMemory()
	switch text, err := os.ReadFile(r.runs); {
	case err == nil:
		r.previous = r.read(string(text), kills)
	case !errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("note that the agent runs: %w", err)
	}
	note := fmt.Sprintln(r.previous.Count, kills)
	if err := os.WriteFile(r.runs, []byte(note), 0o600); err != nil {
		return nil, fmt.Errorf("note that the agent runs: %w", err)
	}
	f, err := os.OpenFile(r.crash, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("keep what is said in the end: %w", err)
	}
	if err := errors.Join(debug.SetCrashOutput(f, debug.CrashOptions{}), f.Close()); err != nil {
		return nil, fmt.Errorf("keep what is said in the end: %w", err)
	}
	return r, nil
}

// read understands what the agent before has left.
func (r *Record) read(note string, kills uint64) Previous {
	count, before, _ := strings.Cut(strings.TrimSpace(note), " ")
	n, errCount := strconv.Atoi(count)
	killsThen, err := strconv.ParseUint(before, 10, 64)
	if errCount != nil || err != nil {
		n, killsThen = 0, kills // torn: it ran, at least
	}
	p := Previous{Count: n + 1}
	switch said := r.said(); {
	case strings.HasPrefix(said, errorPrefix):
		p.Reason, p.Message = Error, strings.TrimPrefix(said, errorPrefix)
	case said != "":
		p.Reason, p.Message = Panic, said
	case kills > killsThen:
		p.Reason, p.Message = OutOfMemory, "the router ran out of memory, and the kernel killed it or another program"
	default:
		p.Reason, p.Message = Killed, "it was killed and could say nothing"
	}
	return p
}

const errorPrefix = "error: "

// said returns the line that says what the agent before died of; empty if it
// could say nothing.
func (r *Record) said() string {
	f, err := os.Open(r.crash)
	if err != nil {
		return ""
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxCrash))
	if err != nil {
		return ""
	}
	first := ""
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSpace(line)
		if first == "" {
			first = line
		}
		for _, head := range []string{errorPrefix, "panic: ", "fatal error: "} {
			if strings.HasPrefix(line, head) {
				return short(line)
			}
		}
	}
	if strings.HasPrefix(first, "goroutine ") {
		return fatal // the runtime says the words of those before it keeps what it says
	}
	return short(first)
}

// fatal stands for an error that the Go runtime finds in a program.
const fatal = "a fatal error of the Go runtime, such as that there is no memory; its words are in the agent's log"

func short(s string) string {
	if len(s) <= maxReason {
		return s
	}
	return strings.ToValidUTF8(s[:maxReason], "") + "..."
}

// Previous returns how those before have ended.
func (r *Record) Previous() Previous {
	if r == nil {
		return Previous{}
	}
	return r.previous
}

// End notes that this agent ends in order, or by itself because of an error.
func (r *Record) End(cause error) error {
	if r == nil || !r.open {
		return nil
	}
	r.open = false
	err := debug.SetCrashOutput(nil, debug.CrashOptions{})
	if cause != nil {
		return errors.Join(err, os.WriteFile(r.crash, []byte(errorPrefix+strings.ReplaceAll(cause.Error(), "\n", "; ")+"\n"), 0o600))
	}
	return errors.Join(err, os.Remove(r.runs), os.Remove(r.crash))
}

// killsForMemory returns how often the kernel has killed a process for want of
// memory since it booted, in a control group or as a whole; 0 if it does not
// count.
func killsForMemory() uint64 {
	text, err := os.ReadFile("/proc/vmstat")
	if err != nil {
		return 0
	}
	_, rest, _ := bytes.Cut(text, []byte("\noom_kill "))
	line, _, _ := bytes.Cut(rest, []byte("\n"))
	n, _ := strconv.ParseUint(string(line), 10, 64) // 0 if there is none
	return n
}
