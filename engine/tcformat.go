package engine

import (
	"strconv"
	"time"
)

// Header is what a listing says of the place of a qdisc.
type Header struct {
	Handle string // "8001:"
	Dev    string // "eth0"; empty in a listing of one device
	Parent string // "1:10"; empty at the root
	Refcnt int    // tc leaves out 1, and so does 0
}

// AppendText appends st as `tc -s qdisc show` prints it, to the character. In
// mode cake3 it is the listing of cake3's own tc of April 2015.
func (st *Stats) AppendText(b []byte, hdr Header) []byte {
	old := st.Config.Tins == Cake3
	b = append(b, "qdisc "...)
	b = appendIf(b, old, "cake3 ", "cake ")
	b = append(b, hdr.Handle...)
	b = append(b, ' ')
	if hdr.Dev != "" {
		b = append(b, "dev "...)
		b = append(b, hdr.Dev...)
		b = append(b, ' ')
	}
	if hdr.Parent != "" {
		b = append(b, "parent "...)
		b = append(b, hdr.Parent...)
		b = append(b, ' ')
	} else {
		b = append(b, "root "...)
	}
	if hdr.Refcnt > 1 {
		b = append(b, "refcnt "...)
		b = strconv.AppendInt(b, int64(hdr.Refcnt), 10)
		b = append(b, ' ')
	}
	if old {
		b = st.Config.appendCake3(b)
	} else {
		b = st.Config.appendKeywords(b)
		b = append(b, ' ')
	}

	b = appendCount(append(b, "\n Sent "...), st.SentBytes)
	b = appendCount(append(b, " bytes "...), st.SentPackets)
	b = appendCount(append(b, " pkt (dropped "...), st.Drops)
	b = appendCount(append(b, ", overlimits "...), st.Overlimits)
	b = appendCount(append(b, " requeues "...), st.Requeues)
	b = appendSize(append(b, ") \n backlog "...), st.Backlog)
	b = appendCount(append(b, ' '), uint64(st.Qlen))
	b = appendCount(append(b, "p requeues "...), st.Requeues)
	b = append(b, '\n')
	tins := st.Tins[:min(max(st.NumTins, 0), MaxTins)]
	if old {
		return appendCake3Table(b, tins)
	}

	b = appendSize(append(b, " memory used: "...), st.MemoryUsed)
	b = appendSize(append(b, " of "...), st.MemoryLimit)
	b = appendRate(append(b, "\n capacity estimate: "...), st.Capacity&^7)
	b = appendPadded(append(b, "\n min/max network layer size: "...), 12, uint64(st.MinNetLen))
	b = appendPadded(append(b, " /"...), 8, uint64(st.MaxNetLen))
	b = appendPadded(append(b, "\n min/max overhead-adjusted size: "...), 8, uint64(st.MinAdjLen))
	b = appendPadded(append(b, " /"...), 8, uint64(st.MaxAdjLen))
	b = appendPadded(append(b, "\n average network hdr offset: "...), 12, uint64(st.AvgNetOff))
	b = append(b, "\n\n"...)
	return appendTable(b, tins)
}

// appendTable appends the tins as columns: a label of 10 characters, then per
// tin a blank and 12 characters.
func appendTable(b []byte, tins []TinStats) []byte {
	switch len(tins) {
	case 0:
		return b
	case 3:
		b = append(b, "                   Bulk  Best Effort        Voice\n"...)
	case 4:
		b = append(b, "                   Bulk  Best Effort        Video        Voice\n"...)
	default:
		b = append(b, "          "...)
		for i := range tins {
			b = append(b, "        Tin "...)
			b = append(b, byte('0'+i))
		}
		b = append(b, '\n')
	}
	for i := range tinRows {
		b = append(b, "  "...)
		b = padRight(append(b, tinRows[i].label...), 8-len(tinRows[i].label))
		for j := range tins {
			b = append(b, ' ')
			at := len(b)
			b = padLeft(tinRows[i].append(b, &tins[j]), at, 12)
		}
		b = append(b, '\n')
	}
	return append(b, '\n')
}

// tinRow is one line of the table: how its cells are printed, and read back.
type tinRow struct {
	label string
	kind  cellKind
	field func(t *TinStats) cell
}

type cellKind uint8

const (
	cellCount cellKind = iota
	cellRate
	cellTime
	cellSize
)

// cell points at the field of a row, whatever its type.
type cell struct {
	u64 *uint64
	u32 *uint32
	d   *time.Duration
	r   *BitsPerSecond
}

func (c cell) get() uint64 {
	switch {
	case c.u64 != nil:
		return *c.u64
	case c.u32 != nil:
		return uint64(*c.u32)
	case c.r != nil:
		return uint64(*c.r)
	}
	return uint64(*c.d)
}

// set stores v, or the largest number that fits.
func (c cell) set(v uint64) {
	switch {
	case c.u64 != nil:
		*c.u64 = v
	case c.u32 != nil:
		*c.u32 = uint32(min(v, 1<<32-1))
	case c.r != nil:
		*c.r = BitsPerSecond(v)
	default:
		*c.d = time.Duration(min(v, 1<<63-1))
	}
}

func (r *tinRow) append(b []byte, t *TinStats) []byte {
	v := r.field(t).get()
	switch r.kind {
	case cellRate:
		return appendRate(b, BitsPerSecond(v)&^7)
	case cellTime:
		return appendTime(b, time.Duration(v))
	case cellSize:
		return appendSize(b, v)
	default:
		return strconv.AppendUint(b, v, 10)
	}
}

// tinRows are the lines of the table in tc's order.
var tinRows = [...]tinRow{
	{"thresh", cellRate, func(t *TinStats) cell { return cell{r: &t.Threshold} }},
	{"target", cellTime, func(t *TinStats) cell { return cell{d: &t.Target} }},
	{"interval", cellTime, func(t *TinStats) cell { return cell{d: &t.Interval} }},
	{"pk_delay", cellTime, func(t *TinStats) cell { return cell{d: &t.PeakDelay} }},
	{"av_delay", cellTime, func(t *TinStats) cell { return cell{d: &t.AvgDelay} }},
	{"sp_delay", cellTime, func(t *TinStats) cell { return cell{d: &t.BaseDelay} }},
	{"backlog", cellSize, func(t *TinStats) cell { return cell{u64: &t.BacklogBytes} }},
	{"pkts", cellCount, func(t *TinStats) cell { return cell{u64: &t.Packets} }},
	{"bytes", cellCount, func(t *TinStats) cell { return cell{u64: &t.Bytes} }},
	{"way_inds", cellCount, func(t *TinStats) cell { return cell{u64: &t.WayInds} }},
	{"way_miss", cellCount, func(t *TinStats) cell { return cell{u64: &t.WayMiss} }},
	{"way_cols", cellCount, func(t *TinStats) cell { return cell{u64: &t.WayCols} }},
	{"drops", cellCount, func(t *TinStats) cell { return cell{u64: &t.Drops} }},
	{"marks", cellCount, func(t *TinStats) cell { return cell{u64: &t.Marks} }},
	{"ack_drop", cellCount, func(t *TinStats) cell { return cell{u64: &t.AckDrops} }},
	{"sp_flows", cellCount, func(t *TinStats) cell { return cell{u32: &t.SparseFlows} }},
	{"bk_flows", cellCount, func(t *TinStats) cell { return cell{u32: &t.BulkFlows} }},
	{"un_flows", cellCount, func(t *TinStats) cell { return cell{u32: &t.UnresponsiveFlows} }},
	{"max_len", cellCount, func(t *TinStats) cell { return cell{u32: &t.MaxLen} }},
	{"quantum", cellCount, func(t *TinStats) cell { return cell{u32: &t.Quantum} }},
}

// cake3Rows are the lines of the 2015 table: its label and the label of the
// same row today.
var cake3Rows = [...]struct{ label, today string }{
	{"  rate  ", "thresh"},
	{"  target", "target"},
	{"interval", "interval"},
	{"Pk delay", "pk_delay"},
	{"Av delay", "av_delay"},
	{"Sp delay", "sp_delay"},
	{"  pkts  ", "pkts"},
	{"way inds", "way_inds"},
	{"way miss", "way_miss"},
	{"way cols", "way_cols"},
	{"  bytes ", "bytes"},
	{"  drops ", "drops"},
	{"  marks ", "marks"},
}

func findRow(label string) *tinRow {
	for i := range tinRows {
		if tinRows[i].label == label {
			return &tinRows[i]
		}
	}
	return nil
}

// appendCake3 appends the few options that there were in April 2015.
func (c *Config) appendCake3(b []byte) []byte {
	if r := c.Rate &^ 7; r != 0 {
		b = appendRate(append(b, "bandwidth "...), r)
	} else {
		b = append(b, "unlimited"...)
	}
	b = append(b, " diffserv4 "...) // the only class layout that is still alive as cake3
	b = append(b, c.Flows.String()...)
	return appendIf(b, c.Framing == ATM, " atm", "")
}

// appendCake3Table appends the classes as columns: a label of 8 characters,
// then 12 characters per class. Times have one decimal.
func appendCake3Table(b []byte, tins []TinStats) []byte {
	if len(tins) == 0 {
		return b
	}
	b = append(b, "        "...)
	for i := range tins {
		b = appendIf(b, i == 0, "   Class ", "     Class ")
		b = append(b, byte('0'+i))
	}
	b = append(b, '\n')
	for _, r := range cake3Rows {
		row := findRow(r.today)
		b = append(b, r.label...)
		for j := range tins {
			at := len(b)
			if row.kind == cellTime {
				b = appendTime1(b, time.Duration(row.field(&tins[j]).get()))
			} else {
				b = row.append(b, &tins[j])
			}
			b = padLeft(b, at, 12)
		}
		b = append(b, '\n')
	}
	return b
}

// AppendJSON appends st as an object of `tc -j -s qdisc show`, which prints a
// list of them. Mode cake3, for which there never was JSON, has that word as
// its kind and diffserv mode.
func (st *Stats) AppendJSON(b []byte, hdr Header) []byte {
	c := &st.Config
	b = appendIf(b, c.Tins == Cake3, `{"kind":"cake3","handle":`, `{"kind":"cake","handle":`)
	b = appendJSONString(b, hdr.Handle)
	if hdr.Dev != "" {
		b = appendJSONString(append(b, `,"dev":`...), hdr.Dev)
	}
	if hdr.Parent != "" {
		b = appendJSONString(append(b, `,"parent":`...), hdr.Parent)
	} else {
		b = append(b, `,"root":true`...)
	}
	if hdr.Refcnt > 1 {
		b = appendCount(append(b, `,"refcnt":`...), uint64(hdr.Refcnt))
	}
	b = append(b, `,"options":{"bandwidth":`...)
	if r := c.Rate / 8; r != 0 {
		b = appendCount(b, uint64(r))
	} else {
		b = append(b, `"unlimited"`...)
	}
	b = appendIf(b, c.Autorate, `,"autorate":"autorate-ingress"`, "")
	b = append(append(b, `,"diffserv":"`...), c.Tins.String()...)
	b = append(append(b, `","flowmode":"`...), c.Flows.String()...)
	b = strconv.AppendBool(append(b, `","nat":`...), c.NAT)
	b = strconv.AppendBool(append(b, `,"wash":`...), c.Wash)
	b = strconv.AppendBool(append(b, `,"ingress":`...), c.Ingress)
	b = append(append(b, `,"ack-filter":"`...), jsonAckFilter[min(int(c.AckFilter), len(jsonAckFilter)-1)]...)
	b = strconv.AppendBool(append(b, `","split_gso":`...), c.SplitGSO)
	b = appendCount(append(b, `,"rtt":`...), micros(c.RTT))
	b = strconv.AppendBool(append(b, `,"raw":`...), c.Raw)
	if c.Framing != NoATM || !c.Raw {
		b = append(append(b, `,"atm":"`...), c.Framing.String()...)
		b = append(b, '"')
	}
	b = strconv.AppendInt(append(b, `,"overhead":`...), int64(c.Overhead), 10)
	if c.MPU != 0 {
		b = appendCount(append(b, `,"mpu":`...), uint64(c.MPU))
	}
	if c.MemoryLimit != 0 {
		b = appendCount(append(b, `,"memlimit":`...), uint64(c.MemoryLimit))
	}
	b = appendIf(b, c.Fwmark == 0, `,"fwmark":"`, `,"fwmark":"0x`) // printf's %#x has no prefix for 0
	b = strconv.AppendUint(b, uint64(c.Fwmark), 16)

	b = appendCount(append(b, `"},"bytes":`...), st.SentBytes)
	b = appendCount(append(b, `,"packets":`...), st.SentPackets)
	b = appendCount(append(b, `,"drops":`...), st.Drops)
	b = appendCount(append(b, `,"overlimits":`...), st.Overlimits)
	b = appendCount(append(b, `,"requeues":`...), st.Requeues)
	b = appendCount(append(b, `,"backlog":`...), st.Backlog)
	b = appendCount(append(b, `,"qlen":`...), uint64(st.Qlen))
	b = appendCount(append(b, `,"memory_used":`...), st.MemoryUsed)
	b = appendCount(append(b, `,"memory_limit":`...), st.MemoryLimit)
	b = appendCount(append(b, `,"capacity_estimate":`...), uint64(st.Capacity/8))
	b = appendCount(append(b, `,"min_network_size":`...), uint64(st.MinNetLen))
	b = appendCount(append(b, `,"max_network_size":`...), uint64(st.MaxNetLen))
	b = appendCount(append(b, `,"min_adj_size":`...), uint64(st.MinAdjLen))
	b = appendCount(append(b, `,"max_adj_size":`...), uint64(st.MaxAdjLen))
	b = appendCount(append(b, `,"avg_hdr_offset":`...), uint64(st.AvgNetOff))

	b = append(b, `,"tins":[`...)
	for i := range min(max(st.NumTins, 0), MaxTins) {
		t := &st.Tins[i]
		b = appendIf(b, i == 0, `{"threshold_rate":`, `,{"threshold_rate":`)
		b = appendCount(b, uint64(t.Threshold/8))
		b = appendCount(append(b, `,"sent_bytes":`...), t.Bytes)
		b = appendCount(append(b, `,"backlog_bytes":`...), t.BacklogBytes)
		b = appendCount(append(b, `,"target_us":`...), micros(t.Target))
		b = appendCount(append(b, `,"interval_us":`...), micros(t.Interval))
		b = appendCount(append(b, `,"peak_delay_us":`...), micros(t.PeakDelay))
		b = appendCount(append(b, `,"avg_delay_us":`...), micros(t.AvgDelay))
		b = appendCount(append(b, `,"base_delay_us":`...), micros(t.BaseDelay))
		b = appendCount(append(b, `,"sent_packets":`...), t.Packets)
		b = appendCount(append(b, `,"way_indirect_hits":`...), t.WayInds)
		b = appendCount(append(b, `,"way_misses":`...), t.WayMiss)
		b = appendCount(append(b, `,"way_collisions":`...), t.WayCols)
		b = appendCount(append(b, `,"drops":`...), t.Drops)
		b = appendCount(append(b, `,"ecn_mark":`...), t.Marks)
		b = appendCount(append(b, `,"ack_drops":`...), t.AckDrops)
		b = appendCount(append(b, `,"sparse_flows":`...), uint64(t.SparseFlows))
		b = appendCount(append(b, `,"bulk_flows":`...), uint64(t.BulkFlows))
		b = appendCount(append(b, `,"unresponsive_flows":`...), uint64(t.UnresponsiveFlows))
		b = appendCount(append(b, `,"max_pkt_len":`...), uint64(t.MaxLen))
		b = appendCount(append(b, `,"flow_quantum":`...), uint64(t.Quantum))
		b = append(b, '}')
	}
	return append(b, "]}"...)
}

var jsonAckFilter = [...]string{"disabled", "enabled", "aggressive"}

func micros(d time.Duration) uint64 { return uint64(max(d, 0)) / 1000 }

func appendCount(b []byte, n uint64) []byte { return strconv.AppendUint(b, n, 10) }

// appendPadded appends n, right-aligned to width.
func appendPadded(b []byte, width int, n uint64) []byte {
	at := len(b)
	return padLeft(strconv.AppendUint(b, n, 10), at, width)
}

// padLeft moves what was appended behind at to the right end of a field.
func padLeft(b []byte, at, width int) []byte {
	n := len(b) - at
	pad := width - n
	if pad <= 0 {
		return b
	}
	b = padRight(b, pad)
	copy(b[at+pad:], b[at:at+n])
	for i := range pad {
		b[at+i] = ' '
	}
	return b
}

func padRight(b []byte, n int) []byte {
	for range n {
		b = append(b, ' ')
	}
	return b
}

// appendTime1 appends a time as tc did in 2015: one decimal from 1 ms on.
func appendTime1(b []byte, d time.Duration) []byte {
	us := micros(d)
	switch {
	case us >= 1_000_000:
		return append(appendF1(b, us, 6), 's')
	case us >= 1000:
		return append(appendF1(b, us, 3), "ms"...)
	}
	return append(appendCount(b, us), "us"...)
}

// appendF1 appends v / 10^places as printf("%.1f") does.
func appendF1(b []byte, v uint64, places int) []byte {
	unit := uint64(1) // of the digit that stays
	for range places - 1 {
		unit *= 10
	}
	q, r := v/unit, v%unit
	switch half := unit / 2; {
	case r > half:
		q++
	case r == half:
		if side := doubleSide(v, places); side > 0 || side == 0 && q&1 == 1 {
			q++
		}
	}
	b = appendCount(b, q/10)
	return append(b, '.', byte('0'+q%10))
}

// appendJSONString appends s in quotes. Names of devices may hold anything but
// a slash and white space.
func appendJSONString(b []byte, s string) []byte {
	const hex = "0123456789abcdef"
	b = append(b, '"')
	for i := range len(s) {
		switch ch := s[i]; {
		case ch == '"' || ch == '\\':
			b = append(b, '\\', ch)
		case ch < 0x20:
			b = append(b, '\\', 'u', '0', '0', hex[ch>>4], hex[ch&15])
		default:
			b = append(b, ch)
		}
	}
	return append(b, '"')
}
