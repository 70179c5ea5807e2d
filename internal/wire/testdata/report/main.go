// The report program makes reports with four tins in use both ways, to be run
// under a machine that counts instructions.
package main

import (
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/engine/enginetest/insn"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/wire"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

const rounds = 20

func busy(n uint64) *engine.Stats {
	s := &engine.Stats{Config: engine.DefaultConfig(), SentBytes: n * 1400, SentPackets: n, Drops: n / 500, Overlimits: n * 2, NumTins: 4}
	s.Config.Rate = 115e6
	for i := range s.Tins[:4] {
		k := n >> i
		s.Tins[i] = engine.TinStats{
			Threshold: 115e6, Target: 5e6, Interval: 100e6, PeakDelay: time.Duration(n%5000) * time.Microsecond, Packets: k, Bytes: k * 1400,
			WayDirect: k, WayMiss: k / 400, Drops: k / 500, DropBytes: k * 3, Marks: k / 5000, SparseFlows: 3, BulkFlows: 1, MaxLen: 1514, Quantum: 300, Index: uint8(i),
		}
		for b := 12; b < 62; b++ {
			s.Tins[i].Sojourn[b] = k / uint64(b-10)
		}
	}
	return s
}

func main() {
	var sent, next wire.Scratch // next is what the agent keeps of the report
	r := &plan.Report{Sequence: 1, BootID: "0123456789abcdef", Uptime: 720 * time.Hour, Down: busy(700e6), Up: busy(300e6)}
	sent.Copy(r)
	whole := len(wire.AppendReportRequest(nil, r, nil))
	r = &plan.Report{Sequence: 2, BootID: "0123456789abcdef", Uptime: 720*time.Hour + 10*time.Second, Down: busy(700e6 + 90_000), Up: busy(300e6 + 40_000)}
	var raw, out []byte
	for i := range rounds + 1 {
		if i == 1 { // the first prepares things
			insn.Begin()
		}
		raw = wire.AppendReportRequest(raw[:0], r, &sent.Report)
		m := &pb.ConnectRequest{}
		m.ProtoReflect().SetUnknown(raw)
		var err error
		if out, err = (proto.MarshalOptions{}).MarshalAppend(out[:0], m); err != nil {
			panic(err)
		}
		next.Copy(r)
	}
	insn.End()
	fmt.Println(rounds, len(out), whole)
}
