package engine_test

import (
	"testing"

	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/engine/enginetest"
)

// BenchmarkWorkload offers one packet an iteration, in the engine's own calling
// pattern and dissection included; the making of the packet, which make
// bench-engine subtracts, is included too.
func BenchmarkWorkload(b *testing.B) {
	for _, w := range enginetest.Workloads() {
		b.Run(w.Name, func(b *testing.B) {
			s, err := engine.New(0, w.Config, engine.Options{Seed: 1})
			if err != nil {
				b.Fatal(err)
			}
			d := enginetest.NewDriver(s, w, enginetest.Watch{})
			d.Run(50_000)
			b.ReportAllocs()
			b.ResetTimer()
			d.Run(b.N)
		})
	}
}

// BenchmarkGenerator is the part of BenchmarkWorkload that is not the engine.
func BenchmarkGenerator(b *testing.B) {
	for _, w := range enginetest.Workloads() {
		b.Run(w.Name, func(b *testing.B) {
			g := w.Generator()
			var p engine.Packet
			for b.Loop() {
				g.At()
				g.Next(&p)
				g.Place(&p)
			}
		})
	}
}
