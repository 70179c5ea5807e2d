package cakevec

import (
	"fmt"
	"maps"
	"strings"
	"time"

	"github.com/cakefleet/cakefleet/engine"
)

// counters compares an S, I, T, U or F line.
func (p *player) counters(w []string) error {
	var have map[string]any
	var where string
	kv := map[string]string{}
	for _, f := range w[1:] {
		k, v, _ := strings.Cut(f, "=")
		kv[k] = v
	}
	switch w[0] {
	case "S":
		p.sum.Snapshots++
		p.final = kv["final"] == "1"
		have = p.totals()
	case "I":
		have = p.internals()
	default:
		var t, q int
		if _, err := fmt.Sscan(kv["tin"], &t); err != nil || t < 0 || t >= engine.MaxTins {
			return p.errorf("tin %q", kv["tin"])
		}
		where = fmt.Sprintf(" tin %d", t)
		switch w[0] {
		case "T":
			have = p.tinCounters(t)
		case "U":
			have = p.tinInternals(t)
		default:
			if _, err := fmt.Sscan(kv["flow"], &q); err != nil {
				return p.errorf("flow %q", kv["flow"])
			}
			where += fmt.Sprintf(" flow %d", q)
			have = p.flow(t, q)
		}
	}
	if len(kv) != len(have) {
		return p.errorf("%s line of %d counters, want %d", w[0], len(kv), len(have))
	}
	for _, f := range w[1:] {
		k, v, _ := strings.Cut(f, "=")
		got, ok := have[k]
		if !ok {
			return p.errorf("%s line: unknown counter %q", w[0], k)
		}
		if got == nil {
			continue // the engine has no such thing
		}
		if s := fmt.Sprint(got); s != v {
			return p.differs(w[0]+where+" "+k, v, s)
		}
	}
	return nil
}

func (p *player) totals() map[string]any {
	var st engine.Stats
	p.s.Stats(p.now, &st)
	return map[string]any{
		"t": p.now, "events": p.sum.Events, "final": nil,
		"pkts": st.SentPackets, "bytes": st.SentBytes, "drops": st.Drops, "overlimits": st.Overlimits,
		"qlen": st.Qlen, "backlog": st.Backlog, "capacity": uint64(st.Capacity / 8),
		"mem_limit": st.MemoryLimit, "mem_used": st.MemoryUsed, "avg_netoff": st.AvgNetOff,
		"min_netlen": st.MinNetLen, "max_netlen": st.MaxNetLen, "min_adjlen": st.MinAdjLen, "max_adjlen": st.MaxAdjLen,
	}
}

func (p *player) internals() map[string]any {
	var in engine.Internals
	p.s.Internals(&in)
	return map[string]any{
		"rng": in.Rand, "draws": nil, "rate_bps": in.Rate, "rate_ns": in.RateNS, "rate_shft": in.RateShift,
		"time_next": in.TimeNext, "failsafe_next": in.Failsafe, "buffer_used": in.MemoryUsed,
		"cur_tin": in.CurTin, "cur_flow": nil, "overflow_timeout": in.HeapLeft, "avg_netoff_raw": in.AvgNetOff,
		"avg_pkt_interval": in.AvgGap, "avg_window_bytes": in.WindowBytes, "avg_window_begin": in.WindowBegin,
		"last_pkt_time": in.LastPacket,
	}
}

// us is a time as the kernel reports it: 32 bits of microseconds.
func us(d time.Duration) uint32 { return uint32(d / time.Microsecond) }

func (p *player) tinCounters(tin int) map[string]any {
	var st engine.Stats
	p.s.Stats(p.now, &st)
	for pos := range st.NumTins {
		t := &st.Tins[pos]
		if int(t.Index) != tin {
			continue
		}
		return map[string]any{
			"pos": pos + 1, "tin": t.Index, "threshold_bps": uint64(t.Threshold / 8), "bytes": t.Bytes, "backlog": t.BacklogBytes,
			"target_us": us(t.Target), "interval_us": us(t.Interval), "pkts": t.Packets, "drops": t.Drops,
			"marks": t.Marks, "ack_drops": t.AckDrops, "pk_delay_us": us(t.PeakDelay), "av_delay_us": us(t.AvgDelay),
			"sp_delay_us": us(t.BaseDelay), "way_inds": t.WayInds, "way_miss": t.WayMiss, "way_cols": t.WayCols,
			"sp_flows": t.SparseFlows, "bk_flows": t.BulkFlows, "un_flows": t.UnresponsiveFlows,
			"max_len": t.MaxLen, "quantum": t.Quantum,
		}
	}
	return nil
}

func (p *player) tinInternals(tin int) map[string]any {
	var in engine.Internals
	p.s.Internals(&in)
	var st engine.Stats
	p.s.Stats(p.now, &st)
	have := map[string]any{"way_directs": nil, "drop_overlimit": nil}
	for pos := range st.NumTins {
		if t := &st.Tins[pos]; int(t.Index) == tin {
			have["way_directs"], have["drop_overlimit"] = t.WayDirect, t.OverflowDrops
		}
	}
	t := &in.Tins[tin]
	maps.Copy(have, map[string]any{
		"tin": tin, "av_ns": t.AvgDelay, "pk_ns": t.PeakDelay, "sp_ns": t.BaseDelay,
		"sparse": t.Sparse, "bulk": t.Bulk, "decaying": t.Decaying, "deficit": t.Deficit, "tin_quantum": t.Quantum,
		"time_next": t.TimeNext, "rate_ns": t.RateNS, "rate_shft": t.RateShift,
		"target_ns": t.Target, "interval_ns": t.Interval, "mtu_time_ns": t.MTUTime,
	})
	return have
}

func (p *player) flow(tin, q int) map[string]any {
	var f engine.FlowStats
	p.s.FlowStats(tin, q, &f)
	dropping := 0
	if f.Dropping {
		dropping = 1
	}
	return map[string]any{
		"tin": tin, "flow": q, "set": int(f.State), "tag": fmt.Sprintf("%08x", f.Tag), "qlen": f.Qlen,
		"backlog": f.Backlog, "drops": f.Drops, "deficit": f.Deficit, "dropping": dropping, "count": f.Count,
		"p_drop": f.PDrop, "blue_timer": f.BlueTime, "drop_next": f.DropNext, "rec_inv_sqrt": f.InvSqrt,
		"srchost": f.SrcHost, "dsthost": f.DstHost,
	}
}
