package wire

import (
	"fmt"
	"math"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// maxBootID is the longest boot id that is taken from the wire, bytes.
const maxBootID = 64

// FromReport returns the message of r.
func FromReport(r *plan.Report) *pb.Report {
	return &pb.Report{
		Sequence: r.Sequence,
		BootId:   r.BootID,
		Uptime:   durationpb.New(r.Uptime),
		Down:     FromStats(r.Down),
		Up:       FromStats(r.Up),
		Agent: &pb.AgentStats{
			CpuTime:         durationpb.New(r.Agent.CPUTime),
			ResidentBytes:   r.Agent.ResidentBytes,
			BypassedPackets: r.Agent.BypassedPackets,
			QueueOverflows:  r.Agent.QueueOverflows,
			BatchSizeMilli:  r.Agent.BatchSizeMilli,
			SkippedReports:  r.Agent.SkippedReports,
		},
		Probe: fromProbe(r.Probe),
		Wan:   fromLinkState(r.WAN),
		Again: r.Again,
	}
}

// ToReport returns the report of m. The error names what is missing or does
// not fit.
func ToReport(m *pb.Report) (plan.Report, error) {
	switch {
	case m.GetSequence() == 0:
		return plan.Report{}, fmt.Errorf("sequence is missing")
	case m.GetBootId() == "" || len(m.GetBootId()) > maxBootID:
		return plan.Report{}, fmt.Errorf("boot_id: %d bytes, must be 1 to %d", len(m.GetBootId()), maxBootID)
	case len(m.GetAgain()) > maxBootID:
		return plan.Report{}, fmt.Errorf("again: %d bytes, at most %d are allowed", len(m.GetAgain()), maxBootID)
	}
	r := plan.Report{
		Sequence: m.GetSequence(),
		BootID:   m.GetBootId(),
		Again:    m.GetAgain(),
		Agent: plan.AgentStats{
			ResidentBytes:   m.GetAgent().GetResidentBytes(),
			BypassedPackets: m.GetAgent().GetBypassedPackets(),
			QueueOverflows:  m.GetAgent().GetQueueOverflows(),
			BatchSizeMilli:  m.GetAgent().GetBatchSizeMilli(),
			SkippedReports:  m.GetAgent().GetSkippedReports(),
		},
	}
	var err error
	if r.Uptime, err = toDuration(m.GetUptime()); err != nil {
		return plan.Report{}, fmt.Errorf("uptime: %w", err)
	}
	if r.Agent.CPUTime, err = toDuration(m.GetAgent().GetCpuTime()); err != nil {
		return plan.Report{}, fmt.Errorf("cpu_time: %w", err)
	}
	if r.Down, err = ToStats(m.GetDown()); err != nil {
		return plan.Report{}, fmt.Errorf("down: %w", err)
	}
	if r.Up, err = ToStats(m.GetUp()); err != nil {
		return plan.Report{}, fmt.Errorf("up: %w", err)
	}
	if r.Probe, err = toProbe(m.GetProbe()); err != nil {
		return plan.Report{}, fmt.Errorf("probe: %w", err)
	}
	r.WAN = toLinkState(m.GetWan())
	return r, nil
}

// FromProbe returns the message of p; nil for none.
func FromProbe(p plan.Probe) *pb.Probe {
	if p.Host == "" {
		return nil
	}
	m := &pb.Probe{Host: p.Host}
	if p.Interval > 0 {
		m.Interval = durationpb.New(p.Interval)
	}
	return m
}

// ToProbe returns the probe of m; none for nil, or if its interval makes no
// sense.
func ToProbe(m *pb.Probe) plan.Probe {
	interval, err := toDuration(m.GetInterval())
	if err != nil {
		return plan.Probe{}
	}
	return plan.Probe{Host: m.GetHost(), Interval: interval}
}

func fromProbe(p *plan.ProbeStats) *pb.ProbeStats {
	if p == nil {
		return nil
	}
	return &pb.ProbeStats{
		Host: p.Host, Address: p.Address, Error: p.Error,
		Idle: fromDelay(&p.Idle), Down: fromDelay(&p.Down), Up: fromDelay(&p.Up), Both: fromDelay(&p.Both), Light: fromDelay(&p.Light),
	}
}

// fromDelay returns the message of d; nil if nothing was counted.
func fromDelay(d *plan.ProbeDelay) *pb.ProbeDelay {
	h := FromHistogram(&d.Delay)
	if h == nil && d.Lost == 0 {
		return nil
	}
	return &pb.ProbeDelay{Delay: h, Lost: d.Lost}
}

func toProbe(m *pb.ProbeStats) (*plan.ProbeStats, error) {
	if m == nil {
		return nil, nil
	}
	p := &plan.ProbeStats{Host: m.GetHost(), Address: m.GetAddress(), Error: m.GetError()}
	for _, d := range []struct {
		name string
		from *pb.ProbeDelay
		to   *plan.ProbeDelay
	}{{"idle", m.GetIdle(), &p.Idle}, {"down", m.GetDown(), &p.Down}, {"up", m.GetUp(), &p.Up}, {"both", m.GetBoth(), &p.Both}, {"light", m.GetLight(), &p.Light}} {
		var err error
		if d.to.Delay, err = ToHistogram(d.from.GetDelay()); err != nil {
			return nil, fmt.Errorf("%s: %w", d.name, err)
		}
		d.to.Lost = d.from.GetLost()
	}
	return p, nil
}

func fromLinkState(l *plan.LinkState) *pb.LinkState {
	if l == nil {
		return nil
	}
	return &pb.LinkState{
		Name: l.Name, Index: l.Index, Up: l.Up, Carrier: l.Carrier, SpeedBps: uint64(l.Speed), Mtu: l.MTU,
		Comings: l.Comings, CarrierLosses: l.CarrierLosses,
	}
}

func toLinkState(m *pb.LinkState) *plan.LinkState {
	if m == nil {
		return nil
	}
	return &plan.LinkState{
		Name: m.GetName(), Index: m.GetIndex(), Up: m.GetUp(), Carrier: m.GetCarrier(), Speed: engine.BitsPerSecond(m.GetSpeedBps()), MTU: m.GetMtu(),
		Comings: m.GetComings(), CarrierLosses: m.GetCarrierLosses(),
	}
}

// FromStats returns the message of s; nil for nil.
func FromStats(s *engine.Stats) *pb.DirectionStats {
	if s == nil {
		return nil
	}
	m := &pb.DirectionStats{
		Shaping:         FromShaping(s.Config),
		SentBytes:       s.SentBytes,
		SentPackets:     s.SentPackets,
		Drops:           s.Drops,
		Overlimits:      s.Overlimits,
		Requeues:        s.Requeues,
		BacklogBytes:    s.Backlog,
		BacklogPackets:  uint64(s.Qlen),
		MemoryUsed:      s.MemoryUsed,
		MemoryLimit:     s.MemoryLimit,
		CapacityBps:     uint64(s.Capacity),
		MinNetworkSize:  uint32(s.MinNetLen),
		MaxNetworkSize:  uint32(s.MaxNetLen),
		MinAdjustedSize: uint32(s.MinAdjLen),
		MaxAdjustedSize: uint32(s.MaxAdjLen),
		AvgHeaderOffset: uint32(s.AvgNetOff),
		Tins:            make([]*pb.TinStats, s.NumTins),
	}
	for i := range m.Tins {
		m.Tins[i] = fromTin(&s.Tins[i])
	}
	return m
}

// ToStats returns the statistics of m; nil for nil. The error names what does
// not fit.
func ToStats(m *pb.DirectionStats) (*engine.Stats, error) {
	if m == nil {
		return nil, nil
	}
	config, err := ToShaping(m.GetShaping())
	if err != nil {
		return nil, err
	}
	s := &engine.Stats{
		Config:      config,
		SentBytes:   m.GetSentBytes(),
		SentPackets: m.GetSentPackets(),
		Drops:       m.GetDrops(),
		Overlimits:  m.GetOverlimits(),
		Requeues:    m.GetRequeues(),
		Backlog:     m.GetBacklogBytes(),
		MemoryUsed:  m.GetMemoryUsed(),
		MemoryLimit: m.GetMemoryLimit(),
		Capacity:    engine.BitsPerSecond(m.GetCapacityBps()),
		NumTins:     len(m.GetTins()),
	}
	if s.NumTins > engine.MaxTins {
		return nil, fmt.Errorf("tins: %d, at most %d are known", s.NumTins, engine.MaxTins)
	}
	if m.GetBacklogPackets() > math.MaxUint32 {
		return nil, fmt.Errorf("backlog_packets: value %d is out of range", m.GetBacklogPackets())
	}
	s.Qlen = uint32(m.GetBacklogPackets())
	for _, f := range []struct {
		name string
		from uint32
		to   *uint16
	}{
		{"min_network_size", m.GetMinNetworkSize(), &s.MinNetLen},
		{"max_network_size", m.GetMaxNetworkSize(), &s.MaxNetLen},
		{"min_adjusted_size", m.GetMinAdjustedSize(), &s.MinAdjLen},
		{"max_adjusted_size", m.GetMaxAdjustedSize(), &s.MaxAdjLen},
		{"avg_header_offset", m.GetAvgHeaderOffset(), &s.AvgNetOff},
	} {
		if f.from > math.MaxUint16 {
			return nil, fmt.Errorf("%s: value %d is out of range", f.name, f.from)
		}
		*f.to = uint16(f.from)
	}
	for i, t := range m.GetTins() {
		if err := toTin(&s.Tins[i], t); err != nil {
			return nil, fmt.Errorf("tin %d: %w", i, err)
		}
	}
	return s, nil
}

func fromTin(t *engine.TinStats) *pb.TinStats {
	return &pb.TinStats{
		ThresholdBps:      uint64(t.Threshold),
		TargetUs:          microseconds(t.Target),
		IntervalUs:        microseconds(t.Interval),
		PeakDelayUs:       microseconds(t.PeakDelay),
		AvgDelayUs:        microseconds(t.AvgDelay),
		BaseDelayUs:       microseconds(t.BaseDelay),
		BacklogBytes:      t.BacklogBytes,
		BacklogPackets:    uint64(t.BacklogPackets),
		Packets:           t.Packets,
		Bytes:             t.Bytes,
		WayIndirectHits:   t.WayInds,
		WayMisses:         t.WayMiss,
		WayCollisions:     t.WayCols,
		Drops:             t.Drops,
		DropBytes:         t.DropBytes,
		Marks:             t.Marks,
		MarkBytes:         t.MarkBytes,
		AckDrops:          t.AckDrops,
		AckDropBytes:      t.AckDropBytes,
		SparseFlows:       t.SparseFlows,
		BulkFlows:         t.BulkFlows,
		UnresponsiveFlows: t.UnresponsiveFlows,
		MaxLen:            t.MaxLen,
		Quantum:           t.Quantum,
		Sojourn:           FromHistogram(&t.Sojourn),
		Index:             uint32(t.Index),
		WayDirectHits:     t.WayDirect,
		OverflowDrops:     t.OverflowDrops,
		DecayingFlows:     t.DecayingFlows,
	}
}

func toTin(t *engine.TinStats, m *pb.TinStats) error {
	if m.GetBacklogPackets() > math.MaxUint32 {
		return fmt.Errorf("backlog_packets: value %d is out of range", m.GetBacklogPackets())
	}
	if m.GetIndex() >= engine.MaxTins {
		return fmt.Errorf("index: value %d is out of range", m.GetIndex())
	}
	us := func(n uint32) time.Duration { return time.Duration(n) * time.Microsecond }
	*t = engine.TinStats{
		Threshold:         engine.BitsPerSecond(m.GetThresholdBps()),
		Target:            us(m.GetTargetUs()),
		Interval:          us(m.GetIntervalUs()),
		PeakDelay:         us(m.GetPeakDelayUs()),
		AvgDelay:          us(m.GetAvgDelayUs()),
		BaseDelay:         us(m.GetBaseDelayUs()),
		BacklogBytes:      m.GetBacklogBytes(),
		BacklogPackets:    uint32(m.GetBacklogPackets()),
		Packets:           m.GetPackets(),
		Bytes:             m.GetBytes(),
		WayInds:           m.GetWayIndirectHits(),
		WayMiss:           m.GetWayMisses(),
		WayCols:           m.GetWayCollisions(),
		Drops:             m.GetDrops(),
		DropBytes:         m.GetDropBytes(),
		Marks:             m.GetMarks(),
		MarkBytes:         m.GetMarkBytes(),
		AckDrops:          m.GetAckDrops(),
		AckDropBytes:      m.GetAckDropBytes(),
		SparseFlows:       m.GetSparseFlows(),
		BulkFlows:         m.GetBulkFlows(),
		UnresponsiveFlows: m.GetUnresponsiveFlows(),
		MaxLen:            m.GetMaxLen(),
		Quantum:           m.GetQuantum(),
		Index:             uint8(m.GetIndex()),
		WayDirect:         m.GetWayDirectHits(),
		OverflowDrops:     m.GetOverflowDrops(),
		DecayingFlows:     m.GetDecayingFlows(),
	}
	var err error
	t.Sojourn, err = ToHistogram(m.GetSojourn())
	return err
}

// FromHistogram returns the message of h; nil if nothing was counted.
func FromHistogram(h *engine.Histogram) *pb.Histogram {
	n := len(h)
	for n > 0 && h[n-1] == 0 {
		n--
	}
	if n == 0 {
		return nil
	}
	return &pb.Histogram{Counts: append([]uint64(nil), h[:n]...)}
}

// ToHistogram returns the histogram of m; an empty one for nil.
func ToHistogram(m *pb.Histogram) (engine.Histogram, error) {
	var h engine.Histogram
	if len(m.GetCounts()) > len(h) {
		return h, fmt.Errorf("sojourn: %d buckets, at most %d are known", len(m.GetCounts()), len(h))
	}
	copy(h[:], m.GetCounts())
	return h, nil
}

// microseconds is d in the protocol's unit; what doesn't fit becomes the
// nearest value that does.
func microseconds(d time.Duration) uint32 {
	return uint32(min(max(d/time.Microsecond, 0), math.MaxUint32))
}

func toDuration(m *durationpb.Duration) (time.Duration, error) {
	if m == nil {
		return 0, nil
	}
	if err := m.CheckValid(); err != nil {
		return 0, err
	}
	d := m.AsDuration()
	if d < 0 {
		return 0, fmt.Errorf("value %v is negative", d)
	}
	return d, nil
}
