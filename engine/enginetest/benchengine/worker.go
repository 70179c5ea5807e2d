//go:build linux

package main

import (
	"encoding/json"
	"fmt"
	"io"
	"runtime"
	"strings"
	"time"

	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/engine/enginetest"
	"github.com/cakefleet/cakefleet/engine/enginetest/insn"
)

// generatorOnly behind a workload's name asks for its traffic to be made and
// thrown away.
const generatorOnly = "-generator"

type timing struct {
	Nanoseconds int64
	Allocations uint64
}

type memory struct {
	Diffserv4 uint64 // all four tins in use, empty
	Diffserv8 uint64 // all eight tins in use, empty
	Loaded    uint64 // at the end of W1, with what keeps track of its packets
}

// work does one measurement in a process that does nothing else. Under the
// counting emulator the marks tell which instructions are meant.
func work(out io.Writer, measurement string, n int) error {
	if measurement == "memory" {
		m, err := measureMemory(n)
		if err != nil {
			return err
		}
		return json.NewEncoder(out).Encode(m)
	}
	name, empty := strings.CutSuffix(measurement, generatorOnly)
	w, err := enginetest.WorkloadByName(name)
	if err != nil {
		return err
	}
	run, err := prepare(w, n, empty)
	if err != nil {
		return fmt.Errorf("workload %s: %w", name, err)
	}
	runtime.GC()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	start := time.Now()
	insn.Begin()
	run()
	insn.End()
	took := time.Since(start)
	runtime.ReadMemStats(&after)
	return json.NewEncoder(out).Encode(timing{
		Nanoseconds: took.Nanoseconds(),
		Allocations: after.Mallocs - before.Mallocs,
	})
}

func prepare(w enginetest.Workload, n int, empty bool) (run func(), err error) {
	if empty {
		g := w.Generator()
		return func() {
			var p engine.Packet
			for range n {
				g.At()
				g.Next(&p)
				g.Place(&p)
			}
		}, nil
	}
	s, err := engine.New(0, w.Config, engine.Options{Seed: 1})
	if err != nil {
		return nil, err
	}
	d := enginetest.NewDriver(s, w, enginetest.Watch{})
	return func() { d.Run(n) }, nil
}

// measureMemory tells what the heap keeps for one Scheduler, everything it has
// made on demand included.
func measureMemory(n int) (memory, error) {
	var m memory
	for _, of := range []struct {
		tins   engine.TinMode
		loaded bool
		bytes  *uint64
	}{
		{engine.Diffserv4, false, &m.Diffserv4},
		{engine.Diffserv8, false, &m.Diffserv8},
		{engine.Diffserv4, true, &m.Loaded},
	} {
		w, err := enginetest.WorkloadByName("W1")
		if err != nil {
			return m, err
		}
		w.Config.Tins = of.tins
		before := heap()
		s, err := engine.New(0, w.Config, engine.Options{Seed: 1})
		if err != nil {
			return m, fmt.Errorf("memory: %w", err)
		}
		now := visitEveryTin(s)
		if of.loaded {
			now = enginetest.Drive(s, w, n, enginetest.Watch{})
		}
		*of.bytes = heap() - before
		s.Reset(now)
		runtime.KeepAlive(s)
	}
	return m, nil
}

// visitEveryTin sends one packet of each DSCP through s and returns when the
// last one left.
func visitEveryTin(s *engine.Scheduler) engine.Time {
	f := enginetest.PlainFlow(0)
	var now engine.Time
	for dscp := range 64 {
		f.TOS = uint8(dscp << 2)
		frame := f.AppendFrame(nil, 54)
		p := engine.Packet{Len: 54, Truesize: 768, NetOff: enginetest.EthernetHeader}
		s.Dissect(frame[enginetest.EthernetHeader:], &p)
		s.Enqueue(now, &p)
		for s.Len() > 0 {
			now = max(now, s.NextSend())
			s.Dequeue(now)
		}
	}
	return now
}

func heap() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}
