package engine

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

// Report is one qdisc of a recorded listing.
type Report struct {
	Kind    string // "cake", "cake3" or "cake_mq"
	Header  Header
	Stats   Stats
	Unknown []string // words among the options that are not known here
}

// ParseText reads the CAKE qdiscs of a listing of `tc -s qdisc show`, of
// today's tc or the one of 2015. Other qdiscs, and lines and words that it does
// not know, are skipped; options come out as far as they are printed. An error
// names the line.
//
// What tc rounded stays rounded: a rate of 107812Kbit, a delay of 6.4ms.
func ParseText(text []byte) ([]Report, error) {
	var p textParser
	line := 0
	for l := range bytes.Lines(text) {
		line++
		if err := p.line(strings.TrimRight(string(l), "\r\n")); err != nil {
			return nil, fmt.Errorf("line %d: %w", line, err)
		}
	}
	return p.reports, nil
}

type textParser struct {
	reports []Report
	cur     *Report // nil between CAKE qdiscs
	sized   bool    // the number of tins is known
}

func (p *textParser) line(l string) error {
	if strings.HasPrefix(l, "qdisc ") {
		return p.qdisc(strings.Fields(l)[1:])
	}
	if p.cur == nil {
		return nil
	}
	st := &p.cur.Stats
	f := strings.Fields(l)
	has := func(prefix string) bool { return strings.HasPrefix(l, " "+prefix+" ") }
	switch {
	case has("Sent"):
		for i := range f[:len(f)-1] {
			var to *uint64
			switch f[i] {
			case "Sent":
				to = &st.SentBytes
			case "bytes":
				to = &st.SentPackets
			case "(dropped":
				to = &st.Drops
			case "overlimits":
				to = &st.Overlimits
			case "requeues":
				to = &st.Requeues
			default:
				continue
			}
			n, err := strconv.ParseUint(strings.TrimRight(f[i+1], ",)"), 10, 64)
			if err != nil {
				return fmt.Errorf("%q after %s: not a count", f[i+1], f[i])
			}
			*to = n
		}
	case has("backlog") && len(f) >= 3:
		n, err := parseSize(f[1])
		if err != nil {
			return fmt.Errorf("backlog %q: %w", f[1], err)
		}
		q, err := strconv.ParseUint(strings.TrimSuffix(f[2], "p"), 10, 32)
		if err != nil {
			return fmt.Errorf("backlog %q: not a number of packets", f[2])
		}
		st.Backlog, st.Qlen = n, uint32(q)
	case has("memory used:") && len(f) == 5:
		used, err := parseSize(f[2])
		if err != nil {
			return fmt.Errorf("memory used %q: %w", f[2], err)
		}
		limit, err := parseSize(f[4])
		if err != nil {
			return fmt.Errorf("memory limit %q: %w", f[4], err)
		}
		st.MemoryUsed, st.MemoryLimit = used, limit
	case has("capacity estimate:") && len(f) == 3:
		r, err := parseTableRate(f[2])
		if err != nil {
			return fmt.Errorf("capacity estimate %q: %w", f[2], err)
		}
		st.Capacity = r
	case has("min/max network layer size:"):
		return parseMinMax(l, &st.MinNetLen, &st.MaxNetLen)
	case has("min/max overhead-adjusted size:"):
		return parseMinMax(l, &st.MinAdjLen, &st.MaxAdjLen)
	case has("average network hdr offset:"):
		n, err := strconv.ParseUint(f[len(f)-1], 10, 16)
		if err != nil {
			return fmt.Errorf("average network hdr offset %q: not a number of bytes", f[len(f)-1])
		}
		st.AvgNetOff = uint16(n)
	default:
		return p.row(l)
	}
	return nil
}

// qdisc reads the first line: where the qdisc is, and its options.
func (p *textParser) qdisc(f []string) error {
	p.cur, p.sized = nil, false
	if len(f) < 2 || f[0] != "cake" && f[0] != "cake3" && f[0] != "cake_mq" {
		return nil
	}
	r := Report{Kind: f[0], Header: Header{Handle: f[1]}}
	f = f[2:]
	for len(f) > 0 {
		switch {
		case f[0] == "root" || f[0] == "offloaded":
			f = f[1:]
			continue
		case len(f) == 1:
		case f[0] == "dev":
			r.Header.Dev, f = f[1], f[2:]
			continue
		case f[0] == "parent":
			r.Header.Parent, f = f[1], f[2:]
			continue
		case f[0] == "refcnt":
			n, err := strconv.ParseUint(f[1], 10, 31)
			if err != nil {
				return fmt.Errorf("refcnt %q: not a number", f[1])
			}
			r.Header.Refcnt, f = int(n), f[2:]
			continue
		}
		break
	}

	base := DefaultConfig()
	if r.Kind == "cake3" {
		base.Tins, base.Flows = Cake3, Flows
	}
	k := keywordParser{c: base, words: f, recorded: true}
	for k.at < len(k.words) {
		at := k.at
		if err := k.word(); err != nil {
			if k.at > at+1 { // a known word with a bad argument
				return err
			}
			r.Unknown = append(r.Unknown, f[at])
		}
	}
	k.finish()
	if r.Kind == "cake3" && k.c.Tins == Diffserv4 { // its own diffserv4
		k.c.Tins = Cake3
	}
	r.Stats.Config = k.c
	p.reports = append(p.reports, r)
	p.cur = &p.reports[len(p.reports)-1]
	return nil
}

// row reads a line of the table. The labels of 2015 have 8 characters and no
// blank behind them, today's have 10 and one.
func (p *textParser) row(l string) error {
	const cake3Label, label, width = 8, 10, 12
	var row *tinRow
	var cells []string
	if len(l) > cake3Label {
		for i := range cake3Rows {
			if cake3Rows[i].label == l[:cake3Label] && p.cur.Kind == "cake3" {
				row = findRow(cake3Rows[i].today)
				cells = strings.Fields(l[cake3Label:])
				// Counts of 12 digits touch each other.
				if n := p.cur.Stats.NumTins; p.sized && len(cells) != n && len(l) == cake3Label+n*width {
					cells = cells[:0]
					for c := range n {
						cells = append(cells, strings.TrimSpace(l[cake3Label+c*width:][:width]))
					}
				}
			}
		}
	}
	if row == nil && len(l) > label && strings.HasPrefix(l, "  ") {
		row = findRow(strings.TrimSpace(l[:label]))
		cells = strings.Fields(l[label:])
	}
	if row == nil {
		return nil
	}
	st := &p.cur.Stats
	if !p.sized {
		if len(cells) > MaxTins {
			return fmt.Errorf("%s: %d tins, at most %d", row.label, len(cells), MaxTins)
		}
		st.NumTins, p.sized = len(cells), true
	}
	if len(cells) != st.NumTins {
		return fmt.Errorf("%s: %d values, want %d", row.label, len(cells), st.NumTins)
	}
	for i, c := range cells {
		var n uint64
		var err error
		switch row.kind {
		case cellRate:
			var r BitsPerSecond
			r, err = parseTableRate(c)
			n = uint64(r)
		case cellTime:
			var d time.Duration
			d, err = parseAnyTime(c)
			n = uint64(d)
		case cellSize:
			n, err = parseSize(c)
		default:
			n, err = strconv.ParseUint(c, 10, 64)
		}
		if err != nil {
			return fmt.Errorf("%s %q: %w", row.label, c, err)
		}
		row.field(&st.Tins[i]).set(n)
	}
	return nil
}

// parseTableRate reads a rate that tc printed, which may be 0bit.
func parseTableRate(s string) (BitsPerSecond, error) {
	mant, exp, suffix, err := parseDecimal(s)
	if err != nil {
		return 0, err
	}
	mult, ok := findUnit(rateUnits, suffix)
	if !ok {
		return 0, fmt.Errorf("unknown unit %q", suffix)
	}
	v, ok := scale(mant, exp, mult)
	if !ok {
		return 0, fmt.Errorf("too large")
	}
	return BitsPerSecond(v), nil
}

// parseMinMax reads "label: 65535 /       0".
func parseMinMax(l string, lo, hi *uint16) error {
	label, values, _ := strings.Cut(l, ":")
	a, b, ok := strings.Cut(values, "/")
	x, err := strconv.ParseUint(strings.TrimSpace(a), 10, 16)
	y, err2 := strconv.ParseUint(strings.TrimSpace(b), 10, 16)
	if !ok || err != nil || err2 != nil {
		return fmt.Errorf("%s %q: not two numbers of bytes", strings.TrimSpace(label), strings.TrimSpace(values))
	}
	*lo, *hi = uint16(x), uint16(y)
	return nil
}

// ParseJSON reads the CAKE qdiscs of a listing of `tc -j -s qdisc show`, or a
// single object of it. Other qdiscs and unknown members are skipped. Nothing is
// rounded here.
func ParseJSON(text []byte) ([]Report, error) {
	var list []json.RawMessage
	if t := bytes.TrimSpace(text); len(t) != 0 && t[0] == '{' {
		list = []json.RawMessage{t}
	} else if err := json.Unmarshal(text, &list); err != nil {
		return nil, fmt.Errorf("listing: %w", err)
	}
	var reports []Report
	for i, raw := range list {
		var head struct {
			Kind string `json:"kind"`
		}
		if err := json.Unmarshal(raw, &head); err != nil {
			return nil, fmt.Errorf("qdisc %d: %w", i, err)
		}
		if head.Kind != "cake" && head.Kind != "cake3" && head.Kind != "cake_mq" {
			continue
		}
		var q jsonQdisc
		if err := json.Unmarshal(raw, &q); err != nil {
			return nil, fmt.Errorf("qdisc %d: %w", i, err)
		}
		r, err := q.report()
		if err != nil {
			return nil, fmt.Errorf("qdisc %d: %w", i, err)
		}
		r.Kind = head.Kind
		reports = append(reports, r)
	}
	return reports, nil
}

type jsonQdisc struct {
	Handle  string `json:"handle"`
	Dev     string `json:"dev"`
	Parent  string `json:"parent"`
	Refcnt  int32  `json:"refcnt"`
	Options struct {
		Bandwidth any    `json:"bandwidth"` // a number or "unlimited"
		Autorate  string `json:"autorate"`
		Diffserv  string `json:"diffserv"`
		Flowmode  string `json:"flowmode"`
		NAT       bool   `json:"nat"`
		Wash      bool   `json:"wash"`
		Ingress   bool   `json:"ingress"`
		AckFilter string `json:"ack-filter"`
		SplitGSO  bool   `json:"split_gso"`
		RTT       uint32 `json:"rtt"`
		Raw       bool   `json:"raw"`
		ATM       string `json:"atm"`
		Overhead  int16  `json:"overhead"`
		MPU       uint16 `json:"mpu"`
		Memlimit  uint32 `json:"memlimit"`
		Fwmark    string `json:"fwmark"`
	} `json:"options"`
	Bytes      uint64    `json:"bytes"`
	Packets    uint64    `json:"packets"`
	Drops      uint64    `json:"drops"`
	Overlimits uint64    `json:"overlimits"`
	Requeues   uint64    `json:"requeues"`
	Backlog    uint64    `json:"backlog"`
	Qlen       uint32    `json:"qlen"`
	MemUsed    uint64    `json:"memory_used"`
	MemLimit   uint64    `json:"memory_limit"`
	Capacity   uint64    `json:"capacity_estimate"`
	MinNet     uint16    `json:"min_network_size"`
	MaxNet     uint16    `json:"max_network_size"`
	MinAdj     uint16    `json:"min_adj_size"`
	MaxAdj     uint16    `json:"max_adj_size"`
	AvgOff     uint16    `json:"avg_hdr_offset"`
	Tins       []jsonTin `json:"tins"`
}

type jsonTin struct {
	Threshold   uint64 `json:"threshold_rate"`
	Bytes       uint64 `json:"sent_bytes"`
	Backlog     uint64 `json:"backlog_bytes"`
	Target      uint64 `json:"target_us"`
	Interval    uint64 `json:"interval_us"`
	Peak        uint64 `json:"peak_delay_us"`
	Avg         uint64 `json:"avg_delay_us"`
	Base        uint64 `json:"base_delay_us"`
	Packets     uint64 `json:"sent_packets"`
	WayInds     uint64 `json:"way_indirect_hits"`
	WayMiss     uint64 `json:"way_misses"`
	WayCols     uint64 `json:"way_collisions"`
	Drops       uint64 `json:"drops"`
	Marks       uint64 `json:"ecn_mark"`
	AckDrops    uint64 `json:"ack_drops"`
	SparseFlows uint32 `json:"sparse_flows"`
	BulkFlows   uint32 `json:"bulk_flows"`
	UnFlows     uint32 `json:"unresponsive_flows"`
	MaxLen      uint32 `json:"max_pkt_len"`
	Quantum     uint32 `json:"flow_quantum"`
}

func (q *jsonQdisc) report() (Report, error) {
	o := &q.Options
	r := Report{Header: Header{Handle: q.Handle, Dev: q.Dev, Parent: q.Parent, Refcnt: int(q.Refcnt)}}
	c := DefaultConfig()
	switch b := o.Bandwidth.(type) {
	case nil:
	case string:
		if b != "unlimited" {
			return r, fmt.Errorf("bandwidth %q: not a number or unlimited", b)
		}
	case float64:
		if b < 0 || b > math.MaxUint64/8/2 || b != math.Trunc(b) {
			return r, fmt.Errorf("bandwidth %v: not a rate in bytes per second", b)
		}
		c.Rate = BitsPerSecond(b) * 8
	default:
		return r, fmt.Errorf("bandwidth %v: not a number or unlimited", b)
	}
	c.Autorate = o.Autorate == "autorate-ingress"
	// A word that is not known stays in Unknown, and the default in place.
	word := func(names []string, word string, set func(i int)) {
		if i := indexOf(names, word); i >= 0 {
			set(i)
		} else if word != "" {
			r.Unknown = append(r.Unknown, word)
		}
	}
	word(tinModeNames[:], o.Diffserv, func(i int) { c.Tins = TinMode(i) })
	word(flowModeNames[:], o.Flowmode, func(i int) { c.Flows = FlowMode(i) })
	word(jsonAckFilter[:], o.AckFilter, func(i int) { c.AckFilter = AckFilter(i) })
	word(framingNames[:], o.ATM, func(i int) { c.Framing = Framing(i) })
	c.NAT, c.Wash, c.Ingress, c.SplitGSO, c.Raw = o.NAT, o.Wash, o.Ingress, o.SplitGSO, o.Raw
	if o.RTT != 0 {
		c.RTT = time.Duration(o.RTT) * time.Microsecond
		c.Target = max(time.Duration(o.RTT/20)*time.Microsecond, time.Microsecond)
	}
	c.Overhead, c.MPU, c.MemoryLimit = o.Overhead, o.MPU, o.Memlimit
	if o.Fwmark != "" {
		n, err := strconv.ParseUint(o.Fwmark, 0, 32)
		if err != nil {
			return r, fmt.Errorf("fwmark %q: not a mask of 32 bits", o.Fwmark)
		}
		c.Fwmark = uint32(n)
	}

	if len(q.Tins) > MaxTins {
		return r, fmt.Errorf("tins: %d, at most %d", len(q.Tins), MaxTins)
	}
	if q.Capacity > math.MaxUint64/8 {
		return r, fmt.Errorf("capacity_estimate %d: too large", q.Capacity)
	}
	for i, t := range q.Tins {
		if t.Threshold > math.MaxUint64/8 || max(t.Target, t.Interval, t.Peak, t.Avg, t.Base) > math.MaxInt64/1000 {
			return r, fmt.Errorf("tin %d: a rate or time is too large", i)
		}
	}
	st := Stats{
		Config: c, SentBytes: q.Bytes, SentPackets: q.Packets, Drops: q.Drops, Overlimits: q.Overlimits,
		Requeues: q.Requeues, Backlog: q.Backlog, Qlen: q.Qlen, MemoryUsed: q.MemUsed, MemoryLimit: q.MemLimit,
		Capacity: BitsPerSecond(q.Capacity) * 8, MinNetLen: q.MinNet, MaxNetLen: q.MaxNet,
		MinAdjLen: q.MinAdj, MaxAdjLen: q.MaxAdj, AvgNetOff: q.AvgOff, NumTins: len(q.Tins),
	}
	const us = time.Microsecond
	for i, t := range q.Tins {
		st.Tins[i] = TinStats{
			Threshold: BitsPerSecond(t.Threshold) * 8,
			Target:    time.Duration(t.Target) * us, Interval: time.Duration(t.Interval) * us,
			PeakDelay: time.Duration(t.Peak) * us, AvgDelay: time.Duration(t.Avg) * us, BaseDelay: time.Duration(t.Base) * us,
			BacklogBytes: t.Backlog, Packets: t.Packets, Bytes: t.Bytes,
			WayInds: t.WayInds, WayMiss: t.WayMiss, WayCols: t.WayCols,
			Drops: t.Drops, Marks: t.Marks, AckDrops: t.AckDrops,
			SparseFlows: t.SparseFlows, BulkFlows: t.BulkFlows, UnresponsiveFlows: t.UnFlows,
			MaxLen: t.MaxLen, Quantum: t.Quantum,
		}
	}
	r.Stats = st
	return r, nil
}
