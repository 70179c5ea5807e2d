package wire

import (
	"errors"
	"fmt"
	"math"
	"math/bits"
	"time"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// This file reads and writes Report without its generated type. Reports are
// nearly all that a controller receives and an agent sends, and reflection over
// several hundred fields costs both of them more than everything else about a
// report. That it says the same as the generated code is tested field by field.

var errReport = errors.New("report: is not protobuf")

// CutReport returns the report in a ConnectRequest that has nothing else in it,
// which nearly all have.
func CutReport(message []byte) (report []byte, ok bool) {
	const tag = 3<<3 | byte(protowire.BytesType)
	if len(message) == 0 || message[0] != tag {
		return nil, false
	}
	report, n := protowire.ConsumeBytes(message[1:])
	return report, n == len(message)-1
}

// ReportHead is what tells reports apart.
type ReportHead struct {
	Sequence uint64
	BootID   []byte // within the message
	Since    uint64 // see Report.since
}

// ReadReportHead returns the head of the report in b.
func ReadReportHead(b []byte) (ReportHead, error) {
	var h ReportHead
	r := reader{b: b}
	for r.next() {
		switch r.num {
		case 1:
			h.Sequence = r.v
		case 2:
			h.BootID = r.sub
		case 7:
			h.Since = r.v
		}
	}
	if r.bad {
		return h, errReport
	}
	switch {
	case h.Sequence == 0:
		return h, errors.New("sequence is missing")
	case len(h.BootID) == 0 || len(h.BootID) > maxBootID:
		return h, fmt.Errorf("boot_id: %d bytes, must be 1 to %d", len(h.BootID), maxBootID)
	}
	return h, nil
}

// Scratch is a report with the memory for both directions, to be used again
// and again.
type Scratch struct {
	plan.Report
	down, up engine.Stats
	probe    plan.ProbeStats
	wan      plan.LinkState
}

// Copy makes s a copy of r.
func (s *Scratch) Copy(r *plan.Report) {
	s.Report = *r
	s.Down, s.Up = copyStats(&s.down, r.Down), copyStats(&s.up, r.Up)
	if r.Probe != nil {
		s.probe = *r.Probe
		s.Probe = &s.probe
	}
	if r.WAN != nil {
		s.wan = *r.WAN
		s.WAN = &s.wan
	}
}

func copyStats(to, from *engine.Stats) *engine.Stats {
	if from == nil {
		return nil
	}
	// The tins that are not in use are most of it, and a struct of this size is
	// copied word by word.
	to.Config = from.Config
	to.SentBytes, to.SentPackets, to.Drops, to.Overlimits, to.Requeues = from.SentBytes, from.SentPackets, from.Drops, from.Overlimits, from.Requeues
	to.Backlog, to.Qlen = from.Backlog, from.Qlen
	to.MemoryUsed, to.MemoryLimit, to.Capacity = from.MemoryUsed, from.MemoryLimit, from.Capacity
	to.MinNetLen, to.MaxNetLen, to.MinAdjLen, to.MaxAdjLen, to.AvgNetOff = from.MinNetLen, from.MaxNetLen, from.MinAdjLen, from.MaxAdjLen, from.AvgNetOff
	copy(to.Tins[:from.NumTins], from.Tins[:from.NumTins])
	if to.NumTins > from.NumTins {
		clear(to.Tins[from.NumTins:to.NumTins])
	}
	to.NumTins = from.NumTins
	return to
}

// Read makes s the report in b. If b is a difference, s has to be the report
// that it names, which is the caller's to see to. The error names what does not
// fit, as that of ToReport does; s is not to be used then.
func (s *Scratch) Read(b []byte) error {
	h, err := ReadReportHead(b)
	if err != nil {
		return err
	}
	r := reader{b: b, difference: h.Since != 0}
	if !r.difference {
		s.Report = plan.Report{}
	}
	s.Sequence, s.Uptime, s.Again = h.Sequence, 0, ""
	if s.BootID != string(h.BootID) {
		s.BootID = string(h.BootID)
	}
	was := s.Report
	s.Down, s.Up, s.Agent, s.Probe, s.WAN = nil, nil, plan.AgentStats{}, nil, nil
	for r.next() {
		switch r.num {
		case 3:
			if s.Uptime, err = r.duration(0, false); err != nil {
				return fmt.Errorf("uptime: %w", err)
			}
		case 4:
			if s.Down, err = r.stats(&s.down, was.Down); err != nil {
				return fmt.Errorf("down: %w", err)
			}
		case 5:
			if s.Up, err = r.stats(&s.up, was.Up); err != nil {
				return fmt.Errorf("up: %w", err)
			}
		case 6:
			if err = r.agent(&s.Agent, was.Agent); err != nil {
				return err
			}
		case 8:
			if s.Probe, err = r.probe(&s.probe, was.Probe); err != nil {
				return fmt.Errorf("probe: %w", err)
			}
		case 9:
			s.WAN = r.linkState(&s.wan, was.WAN)
		case 10:
			if len(r.sub) > maxBootID {
				return fmt.Errorf("again: %d bytes, at most %d are allowed", len(r.sub), maxBootID)
			}
			s.Again = string(r.sub)
		}
	}
	if r.bad {
		return errReport
	}
	return nil
}

// reader goes through the fields of one message.
type reader struct {
	b          []byte
	difference bool // integers are differences in the zigzag encoding

	num uint32
	v   uint64 // of an integer
	sub []byte // of a message, string or packed list
	bad bool
}

// next reads a field; false at the end and where nothing can be understood.
func (r *reader) next() bool {
	if len(r.b) == 0 {
		return false
	}
	tag, n := uvarint(r.b)
	if n <= 0 {
		r.bad = true
		return false
	}
	r.b, r.num, r.v, r.sub = r.b[n:], uint32(tag>>3), 0, nil
	switch protowire.Type(tag & 7) {
	case protowire.VarintType:
		r.v, n = uvarint(r.b)
	case protowire.BytesType:
		r.sub, n = protowire.ConsumeBytes(r.b)
	default:
		n = protowire.ConsumeFieldValue(protowire.Number(tag>>3), protowire.Type(tag&7), r.b)
	}
	if n < 0 || tag>>3 == 0 {
		r.bad = true
		return false
	}
	r.b = r.b[n:]
	return true
}

// uvarint reads an integer; most are of one or two bytes.
func uvarint(b []byte) (v uint64, n int) {
	if len(b) >= 2 {
		if b[0] < 0x80 {
			return uint64(b[0]), 1
		}
		if b[1] < 0x80 {
			return uint64(b[0]&0x7f) | uint64(b[1])<<7, 2
		}
	}
	return protowire.ConsumeVarint(b)
}

// u64 returns the present integer, which was old.
func (r *reader) u64(old uint64) uint64 {
	if r.difference {
		return old + (r.v>>1 ^ -(r.v & 1))
	}
	return r.v
}

func (r *reader) u32(old uint32) uint32 { return uint32(r.u64(uint64(old))) }

func (r *reader) within(sub []byte) reader { return reader{b: sub, difference: r.difference} }

// duration reads a google.protobuf.Duration that was old.
func (r *reader) duration(old time.Duration, difference bool) (time.Duration, error) {
	sec, nano := uint64(old/time.Second), uint32(old%time.Second)
	in := reader{b: r.sub, difference: difference}
	if !difference {
		sec, nano = 0, 0
	}
	for in.next() {
		switch in.num {
		case 1:
			sec = in.u64(sec)
		case 2:
			nano = in.u32(nano)
		}
	}
	const most = int64(math.MaxInt64 / time.Second)
	switch s, n := int64(sec), int32(nano); {
	case in.bad:
		return 0, errReport
	case s < 0 || n < 0:
		return 0, fmt.Errorf("value %v is negative", time.Duration(s)*time.Second+time.Duration(n))
	case s > most || n >= int32(time.Second):
		return 0, fmt.Errorf("value %d s and %d ns is out of range", s, n)
	case s == most:
		return math.MaxInt64, nil
	default:
		return time.Duration(s)*time.Second + time.Duration(n), nil
	}
}

func (r *reader) agent(a *plan.AgentStats, was plan.AgentStats) error {
	*a = was
	a.CPUTime = 0
	if !r.difference {
		*a, was = plan.AgentStats{}, plan.AgentStats{}
	}
	in := r.within(r.sub)
	for in.next() {
		switch in.num {
		case 1:
			var err error
			if a.CPUTime, err = in.duration(was.CPUTime, in.difference); err != nil {
				return fmt.Errorf("cpu_time: %w", err)
			}
		case 2:
			a.ResidentBytes = in.u64(was.ResidentBytes)
		case 3:
			a.BypassedPackets = in.u64(was.BypassedPackets)
		case 4:
			a.QueueOverflows = in.u64(was.QueueOverflows)
		case 5:
			a.BatchSizeMilli = in.u32(was.BatchSizeMilli)
		case 6:
			a.SkippedReports = in.u64(was.SkippedReports)
		}
	}
	if in.bad {
		return errReport
	}
	return nil
}

// stats reads one direction into s, which holds what it was if was is s.
func (r *reader) stats(s, was *engine.Stats) (*engine.Stats, error) {
	if was == nil || !r.difference {
		*s = engine.Stats{}
	}
	in := r.within(r.sub)
	had, tins, shaped := s.NumTins, 0, false
	qlen := uint64(s.Qlen)
	lens := [5]uint32{uint32(s.MinNetLen), uint32(s.MaxNetLen), uint32(s.MinAdjLen), uint32(s.MaxAdjLen), uint32(s.AvgNetOff)}
	for in.next() {
		switch in.num {
		case 1:
			shaped = true
			if err := in.shaping(&s.Config, had > 0 || was != nil); err != nil {
				return nil, err
			}
		case 2:
			s.SentBytes = in.u64(s.SentBytes)
		case 3:
			s.SentPackets = in.u64(s.SentPackets)
		case 4:
			s.Drops = in.u64(s.Drops)
		case 5:
			s.Overlimits = in.u64(s.Overlimits)
		case 6:
			s.Requeues = in.u64(s.Requeues)
		case 7:
			s.Backlog = in.u64(s.Backlog)
		case 8:
			qlen = in.u64(qlen)
		case 9:
			s.MemoryUsed = in.u64(s.MemoryUsed)
		case 10:
			s.MemoryLimit = in.u64(s.MemoryLimit)
		case 11:
			s.Capacity = engine.BitsPerSecond(in.u64(uint64(s.Capacity)))
		case 12, 13, 14, 15, 16:
			lens[in.num-12] = in.u32(lens[in.num-12])
		case 17:
			if tins == engine.MaxTins {
				return nil, fmt.Errorf("tins: more than %d, at most %d are known", tins, engine.MaxTins)
			}
			if tins >= had {
				s.Tins[tins] = engine.TinStats{}
			}
			if err := in.tin(&s.Tins[tins]); err != nil {
				return nil, fmt.Errorf("tin %d: %w", tins, err)
			}
			tins++
		}
	}
	switch {
	case in.bad:
		return nil, errReport
	case !shaped:
		return nil, errors.New("shaping is missing")
	case qlen > math.MaxUint32:
		return nil, fmt.Errorf("backlog_packets: value %d is out of range", qlen)
	}
	s.Qlen, s.NumTins = uint32(qlen), tins
	for i, to := range [5]*uint16{&s.MinNetLen, &s.MaxNetLen, &s.MinAdjLen, &s.MaxAdjLen, &s.AvgNetOff} {
		if lens[i] > math.MaxUint16 {
			return nil, fmt.Errorf("%s: value %d is out of range", lenNames[i], lens[i])
		}
		*to = uint16(lens[i])
	}
	clear(s.Tins[tins:])
	return s, nil
}

var lenNames = [5]string{"min_network_size", "max_network_size", "min_adjusted_size", "max_adjusted_size", "avg_header_offset"}

// shaping reads the configuration into c, which holds what it was if known.
func (r *reader) shaping(c *engine.Config, known bool) error {
	var m pb.Shaping
	if r.difference && known {
		m.RateBps, m.Overhead, m.Mpu, m.Mtu = uint64(c.Rate), int32(c.Overhead), uint32(c.MPU), uint32(c.MTU)
		m.RttUs, m.TargetUs = uint32(c.RTT/time.Microsecond), uint32(c.Target/time.Microsecond)
		m.MemoryLimit, m.Fwmark = c.MemoryLimit, c.Fwmark
	}
	in := r.within(r.sub)
	for in.next() {
		switch in.num {
		case 1:
			m.RateBps = in.u64(m.RateBps)
		case 2:
			m.Tins = pb.TinMode(in.v)
		case 3:
			m.Flows = pb.FlowMode(in.v)
		case 4:
			m.AckFilter = pb.AckFilter(in.v)
		case 5:
			m.Framing = pb.Framing(in.v)
		case 6:
			m.Nat = in.v != 0
		case 7:
			m.Wash = in.v != 0
		case 8:
			m.Ingress = in.v != 0
		case 9:
			m.AutorateIngress = in.v != 0
		case 10:
			m.SplitGso = in.v != 0
		case 11:
			m.Raw = in.v != 0
		case 12:
			in.v = uint64(uint32(protowire.DecodeZigZag(in.v & math.MaxUint32)))
			m.Overhead = int32(in.u32(uint32(m.Overhead)))
		case 13:
			m.Mpu = in.u32(m.Mpu)
		case 14:
			m.Mtu = in.u32(m.Mtu)
		case 15:
			m.RttUs = in.u32(m.RttUs)
		case 16:
			m.TargetUs = in.u32(m.TargetUs)
		case 17:
			m.MemoryLimit = in.u32(m.MemoryLimit)
		case 18:
			m.Fwmark = in.u32(m.Fwmark)
		}
	}
	if in.bad {
		return errReport
	}
	var err error
	*c, err = ToShaping(&m)
	return err
}

// tin reads one tin into t, which holds what it was if that matters.
func (r *reader) tin(t *engine.TinStats) error {
	in := r.within(r.sub)
	qlen, index, counted := uint64(t.BacklogPackets), uint32(t.Index), false
	us := func(d *time.Duration) { *d = time.Duration(in.u32(uint32(*d/time.Microsecond))) * time.Microsecond }
	for in.next() {
		switch in.num {
		case 2:
			t.Threshold = engine.BitsPerSecond(in.u64(uint64(t.Threshold)))
		case 3:
			us(&t.Target)
		case 4:
			us(&t.Interval)
		case 5:
			us(&t.PeakDelay)
		case 6:
			us(&t.AvgDelay)
		case 7:
			us(&t.BaseDelay)
		case 8:
			t.BacklogBytes = in.u64(t.BacklogBytes)
		case 9:
			qlen = in.u64(qlen)
		case 10:
			t.Packets = in.u64(t.Packets)
		case 11:
			t.Bytes = in.u64(t.Bytes)
		case 12:
			t.WayInds = in.u64(t.WayInds)
		case 13:
			t.WayMiss = in.u64(t.WayMiss)
		case 14:
			t.WayCols = in.u64(t.WayCols)
		case 15:
			t.Drops = in.u64(t.Drops)
		case 16:
			t.DropBytes = in.u64(t.DropBytes)
		case 17:
			t.Marks = in.u64(t.Marks)
		case 18:
			t.MarkBytes = in.u64(t.MarkBytes)
		case 19:
			t.AckDrops = in.u64(t.AckDrops)
		case 20:
			t.AckDropBytes = in.u64(t.AckDropBytes)
		case 21:
			t.SparseFlows = in.u32(t.SparseFlows)
		case 22:
			t.BulkFlows = in.u32(t.BulkFlows)
		case 23:
			t.UnresponsiveFlows = in.u32(t.UnresponsiveFlows)
		case 24:
			t.MaxLen = in.u32(t.MaxLen)
		case 25:
			t.Quantum = in.u32(t.Quantum)
		case 26:
			counted = true
			if err := in.histogram(&t.Sojourn); err != nil {
				return err
			}
		case 27:
			index = in.u32(index)
		case 28:
			t.WayDirect = in.u64(t.WayDirect)
		case 29:
			t.OverflowDrops = in.u64(t.OverflowDrops)
		case 30:
			t.DecayingFlows = in.u32(t.DecayingFlows)
		}
	}
	switch {
	case in.bad:
		return errReport
	case qlen > math.MaxUint32:
		return fmt.Errorf("backlog_packets: value %d is out of range", qlen)
	case index >= engine.MaxTins:
		return fmt.Errorf("index: value %d is out of range", index)
	}
	t.BacklogPackets, t.Index = uint32(qlen), uint8(index)
	if !counted {
		t.Sojourn = engine.Histogram{}
	}
	return nil
}

// histogram reads counts, packed as they should be or one by one.
func (r *reader) histogram(h *engine.Histogram) error {
	in := r.within(r.sub)
	n := 0
	add := func() bool {
		if n >= len(h) {
			return false
		}
		h[n] = in.u64(h[n])
		n++
		return true
	}
	for in.next() {
		if in.num != 1 {
			continue
		}
		if in.sub == nil {
			if !add() {
				return fmt.Errorf("sojourn: more than %d buckets", len(h))
			}
			continue
		}
		for b := in.sub; len(b) > 0; {
			v, k := uvarint(b)
			if k < 0 {
				return errReport
			}
			b, in.v = b[k:], v
			if !add() {
				return fmt.Errorf("sojourn: more than %d buckets", len(h))
			}
		}
	}
	if in.bad {
		return errReport
	}
	return nil
}

// text returns the string, which is old most of the time.
func (r *reader) text(old string) string {
	if old == string(r.sub) {
		return old
	}
	return string(r.sub)
}

// probe reads into p, which holds what it was if was is p.
func (r *reader) probe(p, was *plan.ProbeStats) (*plan.ProbeStats, error) {
	if was == nil || !r.difference {
		*p = plan.ProbeStats{}
	}
	before := [3]string{p.Host, p.Address, p.Error}
	p.Host, p.Address, p.Error = "", "", ""
	in := r.within(r.sub)
	var counted [8]bool
	delays := [8]*plan.ProbeDelay{3: &p.Idle, 4: &p.Down, 5: &p.Up, 6: &p.Both, 7: &p.Light}
	for in.next() {
		switch in.num {
		case 1:
			p.Host = in.text(before[0])
		case 2:
			p.Address = in.text(before[1])
		case 3, 4, 5, 6, 7:
			counted[in.num] = true
			if err := in.delay(delays[in.num]); err != nil {
				return nil, fmt.Errorf("%s: %w", delayNames[in.num], err)
			}
		case 8:
			p.Error = in.text(before[2])
		}
	}
	if in.bad {
		return nil, errReport
	}
	for i, d := range delays {
		if d != nil && !counted[i] {
			*d = plan.ProbeDelay{}
		}
	}
	return p, nil
}

var delayNames = [8]string{3: "idle", 4: "down", 5: "up", 6: "both", 7: "light"}

func (r *reader) delay(d *plan.ProbeDelay) error {
	in := r.within(r.sub)
	counted := false
	for in.next() {
		switch in.num {
		case 1:
			counted = true
			if err := in.histogram(&d.Delay); err != nil {
				return err
			}
		case 2:
			d.Lost = in.u64(d.Lost)
		}
	}
	if in.bad {
		return errReport
	}
	if !counted {
		d.Delay = engine.Histogram{}
	}
	return nil
}

// linkState reads into l, which holds what it was if was is l.
func (r *reader) linkState(l, was *plan.LinkState) *plan.LinkState {
	if was == nil || !r.difference {
		*l = plan.LinkState{}
	}
	name := l.Name
	l.Name, l.Up, l.Carrier = "", false, false
	in := r.within(r.sub)
	for in.next() {
		switch in.num {
		case 1:
			l.Name = in.text(name)
		case 2:
			l.Index = in.u32(l.Index)
		case 3:
			l.Up = in.v != 0
		case 4:
			l.Carrier = in.v != 0
		case 5:
			l.Speed = engine.BitsPerSecond(in.u64(uint64(l.Speed)))
		case 6:
			l.MTU = in.u32(l.MTU)
		case 7:
			l.Comings = in.u64(l.Comings)
		case 8:
			l.CarrierLosses = in.u64(l.CarrierLosses)
		}
	}
	r.bad = r.bad || in.bad
	return l
}

// AppendReportRequest appends a ConnectRequest with a report to b, see
// AppendReport and CutReport.
func AppendReportRequest(b []byte, r, before *plan.Report) []byte {
	w := writer{b: b}
	at := w.open(3)
	w.b = AppendReport(w.b, r, before)
	w.end(at)
	return w.b
}

// AppendReport appends the message of r to b: the difference from before, or
// the whole if before is nil.
func AppendReport(b []byte, r, before *plan.Report) []byte {
	w := writer{b: b}
	w.plain(1, r.Sequence)
	w.text(2, r.BootID)
	w.duration(3, r.Uptime, 0)
	was := &plan.Report{}
	if before != nil {
		w.difference, was = true, before
	}
	if r.Down != nil {
		w.stats(4, r.Down, was.Down)
	}
	if r.Up != nil {
		w.stats(5, r.Up, was.Up)
	}
	at := w.open(6)
	w.duration(1, r.Agent.CPUTime, was.Agent.CPUTime)
	w.u64(2, r.Agent.ResidentBytes, was.Agent.ResidentBytes)
	w.u64(3, r.Agent.BypassedPackets, was.Agent.BypassedPackets)
	w.u64(4, r.Agent.QueueOverflows, was.Agent.QueueOverflows)
	w.u32(5, r.Agent.BatchSizeMilli, was.Agent.BatchSizeMilli)
	w.u64(6, r.Agent.SkippedReports, was.Agent.SkippedReports)
	w.end(at)
	if before != nil {
		w.plain(7, before.Sequence)
	}
	w.probe(r.Probe, was.Probe)
	w.linkState(r.WAN, was.WAN)
	w.text(10, r.Again)
	return w.b
}

// noStats is what a direction is compared with that was not there before.
var noStats engine.Stats

// writer appends the fields of one message.
type writer struct {
	b          []byte
	difference bool
}

func (w *writer) plain(num protowire.Number, v uint64) {
	if v == 0 {
		return
	}
	if tag := uint64(num) << 3; tag < 0x80 {
		w.b = append(w.b, byte(tag))
	} else {
		w.b = append(w.b, byte(tag)|0x80, byte(tag>>7))
	}
	w.varint(v)
}

func (w *writer) varint(v uint64) {
	for v >= 0x80 {
		w.b = append(w.b, byte(v)|0x80)
		v >>= 7
	}
	w.b = append(w.b, byte(v))
}

func (w *writer) u64(num protowire.Number, v, was uint64) {
	if w.difference {
		n := int64(v - was)
		v = uint64(n<<1 ^ n>>63)
	}
	w.plain(num, v)
}

// u32 is u64 for 32 bits: differences wrap there.
func (w *writer) u32(num protowire.Number, v, was uint32) {
	if w.difference {
		n := int32(v - was)
		v = uint32(n<<1 ^ n>>31)
	}
	w.plain(num, uint64(v))
}

func (w *writer) us(num protowire.Number, v, was time.Duration) {
	if v != was || !w.difference {
		w.u32(num, microseconds(v), microseconds(was))
	}
}

func (w *writer) text(num protowire.Number, s string) {
	if s != "" {
		w.b = protowire.AppendTag(w.b, num, protowire.BytesType)
		w.b = protowire.AppendString(w.b, s)
	}
}

func (w *writer) flag(num protowire.Number, on bool) {
	if on {
		w.plain(num, 1)
	}
}

// open begins a message or a packed list with room for a length of one byte;
// end takes what it returns.
func (w *writer) open(num protowire.Number) int {
	w.b = append(protowire.AppendTag(w.b, num, protowire.BytesType), 0)
	return len(w.b)
}

// end writes the length of what began at from.
func (w *writer) end(from int) {
	n := len(w.b) - from
	if n < 0x80 {
		w.b[from-1] = byte(n)
		return
	}
	more := (bits.Len(uint(n))+6)/7 - 1
	w.b = append(w.b, "\x00\x00\x00\x00"[:more]...)
	copy(w.b[from+more:], w.b[from:from+n])
	protowire.AppendVarint(w.b[from-1:from-1], uint64(n))
}

func (w *writer) duration(num protowire.Number, d, was time.Duration) {
	at := w.open(num)
	w.u64(1, uint64(d/time.Second), uint64(was/time.Second))
	nano := uint32(d % time.Second)
	if w.difference {
		n := int32(nano - uint32(was%time.Second))
		nano = uint32(n<<1 ^ n>>31)
	}
	w.plain(2, uint64(int64(int32(nano)))) // int32: what looks negative has ten bytes
	w.end(at)
}

func (w *writer) stats(num protowire.Number, s, was *engine.Stats) {
	if was == nil {
		was = &noStats
	}
	at := w.open(num)
	w.shaping(&s.Config, &was.Config)
	w.u64(2, s.SentBytes, was.SentBytes)
	w.u64(3, s.SentPackets, was.SentPackets)
	w.u64(4, s.Drops, was.Drops)
	w.u64(5, s.Overlimits, was.Overlimits)
	w.u64(6, s.Requeues, was.Requeues)
	w.u64(7, s.Backlog, was.Backlog)
	w.u64(8, uint64(s.Qlen), uint64(was.Qlen))
	w.u64(9, s.MemoryUsed, was.MemoryUsed)
	w.u64(10, s.MemoryLimit, was.MemoryLimit)
	w.u64(11, uint64(s.Capacity), uint64(was.Capacity))
	w.u32(12, uint32(s.MinNetLen), uint32(was.MinNetLen))
	w.u32(13, uint32(s.MaxNetLen), uint32(was.MaxNetLen))
	w.u32(14, uint32(s.MinAdjLen), uint32(was.MinAdjLen))
	w.u32(15, uint32(s.MaxAdjLen), uint32(was.MaxAdjLen))
	w.u32(16, uint32(s.AvgNetOff), uint32(was.AvgNetOff))
	for i := range s.Tins[:s.NumTins] {
		before := &noStats.Tins[0]
		if i < was.NumTins {
			before = &was.Tins[i]
		}
		w.tin(&s.Tins[i], before)
	}
	w.end(at)
}

func (w *writer) shaping(c, was *engine.Config) {
	at := w.open(1)
	w.u64(1, uint64(c.Rate), uint64(was.Rate))
	w.plain(2, uint64(c.Tins)+1)
	w.plain(3, uint64(c.Flows)+1)
	w.plain(4, uint64(c.AckFilter)+1)
	w.plain(5, uint64(c.Framing)+1)
	w.flag(6, c.NAT)
	w.flag(7, c.Wash)
	w.flag(8, c.Ingress)
	w.flag(9, c.Autorate)
	w.flag(10, c.SplitGSO)
	w.flag(11, c.Raw)
	overhead := int32(c.Overhead)
	if w.difference {
		n := overhead - int32(was.Overhead)
		overhead = n<<1 ^ n>>31
	}
	w.plain(12, uint64(uint32(overhead<<1^overhead>>31)))
	w.u32(13, uint32(c.MPU), uint32(was.MPU))
	w.u32(14, uint32(c.MTU), uint32(was.MTU))
	w.u32(15, uint32(c.RTT/time.Microsecond), uint32(was.RTT/time.Microsecond))
	w.u32(16, uint32(c.Target/time.Microsecond), uint32(was.Target/time.Microsecond))
	w.u32(17, c.MemoryLimit, was.MemoryLimit)
	w.u32(18, c.Fwmark, was.Fwmark)
	w.end(at)
}

func (w *writer) tin(t, was *engine.TinStats) {
	at := w.open(17)
	w.u64(2, uint64(t.Threshold), uint64(was.Threshold))
	w.us(3, t.Target, was.Target)
	w.us(4, t.Interval, was.Interval)
	w.us(5, t.PeakDelay, was.PeakDelay)
	w.us(6, t.AvgDelay, was.AvgDelay)
	w.us(7, t.BaseDelay, was.BaseDelay)
	w.u64(8, t.BacklogBytes, was.BacklogBytes)
	w.u64(9, uint64(t.BacklogPackets), uint64(was.BacklogPackets))
	w.u64(10, t.Packets, was.Packets)
	w.u64(11, t.Bytes, was.Bytes)
	w.u64(12, t.WayInds, was.WayInds)
	w.u64(13, t.WayMiss, was.WayMiss)
	w.u64(14, t.WayCols, was.WayCols)
	w.u64(15, t.Drops, was.Drops)
	w.u64(16, t.DropBytes, was.DropBytes)
	w.u64(17, t.Marks, was.Marks)
	w.u64(18, t.MarkBytes, was.MarkBytes)
	w.u64(19, t.AckDrops, was.AckDrops)
	w.u64(20, t.AckDropBytes, was.AckDropBytes)
	w.u32(21, t.SparseFlows, was.SparseFlows)
	w.u32(22, t.BulkFlows, was.BulkFlows)
	w.u32(23, t.UnresponsiveFlows, was.UnresponsiveFlows)
	w.u32(24, t.MaxLen, was.MaxLen)
	w.u32(25, t.Quantum, was.Quantum)
	w.histogram(26, &t.Sojourn, &was.Sojourn)
	w.u32(27, uint32(t.Index), uint32(was.Index))
	w.u64(28, t.WayDirect, was.WayDirect)
	w.u64(29, t.OverflowDrops, was.OverflowDrops)
	w.u32(30, t.DecayingFlows, was.DecayingFlows)
	w.end(at)
}

// histogram writes nothing if nothing was counted, and zeros at the end not.
func (w *writer) histogram(num protowire.Number, h, was *engine.Histogram) {
	if !w.difference {
		was = &noStats.Tins[0].Sojourn
	}
	n := len(h)
	for n > 0 && h[n-1] == was[n-1] {
		n--
	}
	if empty(h) {
		return
	}
	at := w.open(num)
	if n > 0 {
		list := w.open(1)
		b := w.b
		for i := range n {
			d := int64(h[i] - was[i])
			if lo := int32(d); int64(lo) == d && (lo >= 0 || w.difference) { // nearly always; it is a router that does this
				v := uint32(lo)
				if w.difference {
					v = uint32(lo<<1 ^ lo>>31)
				}
				for v >= 0x80 {
					b = append(b, byte(v)|0x80)
					v >>= 7
				}
				b = append(b, byte(v))
				continue
			}
			if w.difference {
				d = d<<1 ^ d>>63
			}
			b = protowire.AppendVarint(b, uint64(d))
		}
		w.b = b
		w.end(list)
	}
	w.end(at)
}

func empty(h *engine.Histogram) bool {
	for i := len(h) - 1; i >= 0; i-- {
		if h[i] != 0 {
			return false
		}
	}
	return true
}

func (w *writer) probe(p, was *plan.ProbeStats) {
	if p == nil {
		return
	}
	if was == nil {
		was = &noProbe
	}
	at := w.open(8)
	w.text(1, p.Host)
	w.text(2, p.Address)
	for i, d := range [...]*plan.ProbeDelay{&p.Idle, &p.Down, &p.Up, &p.Both, &p.Light} {
		w.delay(protowire.Number(3+i), d, [...]*plan.ProbeDelay{&was.Idle, &was.Down, &was.Up, &was.Both, &was.Light}[i])
	}
	w.text(8, p.Error)
	w.end(at)
}

// noProbe is what a probe is compared with that was not there before.
var noProbe plan.ProbeStats

// delay writes nothing if nothing was counted.
func (w *writer) delay(num protowire.Number, d, was *plan.ProbeDelay) {
	if *d == (plan.ProbeDelay{}) {
		return
	}
	at := w.open(num)
	w.histogram(1, &d.Delay, &was.Delay)
	w.u64(2, d.Lost, was.Lost)
	w.end(at)
}

func (w *writer) linkState(l, was *plan.LinkState) {
	if l == nil {
		return
	}
	if was == nil {
		was = &plan.LinkState{}
	}
	at := w.open(9)
	w.text(1, l.Name)
	w.u32(2, l.Index, was.Index)
	w.flag(3, l.Up)
	w.flag(4, l.Carrier)
	w.u64(5, uint64(l.Speed), uint64(was.Speed))
	w.u32(6, l.MTU, was.MTU)
	w.u64(7, l.Comings, was.Comings)
	w.u64(8, l.CarrierLosses, was.CarrierLosses)
	w.end(at)
}
