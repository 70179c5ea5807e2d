package nfqueue

import (
	"testing"
	"time"
)

// BenchmarkThread is what the thread of a packet loop costs a packet without
// the engine: reading it, and the verdict, within which the kernel sends it.
// The share of the latter is what loops on other cores could take over.
func BenchmarkThread(b *testing.B) {
	for _, c := range []struct {
		name  string
		bytes int
	}{{"small", 100}, {"full", 1400}} {
		b.Run(c.name, func(b *testing.B) {
			w := newWire(b)
			q, r := w.open(b, Config{MaxLen: 1000, Copy: ShortCopy})
			near, far := w.udp(b, "192.0.2.1:4000", "192.0.2.2:4000")
			if err := far.Close(); err != nil { // nobody there: what arrives costs next to nothing more
				b.Fatal(err)
			}
			if err := r.Install(Direction{}, Direction{On: true, Number: q.UpNumber()}); err != nil {
				b.Fatal(err)
			}
			var pkts [Batch]Packet
			packet := make([]byte, c.bytes)
			var reading, verdicts time.Duration
			packets := 0
			renewed := time.Now()
			for b.Loop() {
				if time.Since(renewed) > Lifetime/4 {
					if err := r.Renew(Lifetime); err != nil {
						b.Fatal(err)
					}
					renewed = time.Now()
				}
				for range Batch / 2 {
					_, _ = near.Write(packet) // refused, as nobody is there
				}
				start := time.Now()
				n, err := q.Recv(pkts[:])
				read := time.Now()
				if err != nil {
					b.Fatal(err)
				}
				for i := range pkts[:n] {
					if err := q.Accept(pkts[i].Ref); err != nil {
						b.Fatal(err)
					}
				}
				if err := q.Flush(); err != nil {
					b.Fatal(err)
				}
				reading += read.Sub(start)
				verdicts += time.Since(read)
				packets += n
			}
			if packets == 0 {
				b.Fatal("no packet came")
			}
			b.ReportMetric(float64(reading.Nanoseconds())/float64(packets), "ns-read/packet")
			b.ReportMetric(float64(verdicts.Nanoseconds())/float64(packets), "ns-verdict/packet")
			b.ReportMetric(0, "ns/op")
		})
	}
}
