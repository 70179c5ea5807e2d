package cakevec

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/cakefleet/cakefleet/engine"
)

// Summary is what a replay went through.
type Summary struct {
	Name                        string
	Events                      int
	Delivered, Dropped, Cleared int
	Snapshots                   int
}

// String prints the summary in half a line.
func (s Summary) String() string {
	return fmt.Sprintf("%d events: %d delivered, %d dropped, %d cleared; %d snapshots",
		s.Events, s.Delivered, s.Dropped, s.Cleared, s.Snapshots)
}

// A Mismatch is the first difference between a recording and the engine.
type Mismatch struct {
	Line  int    // of the file
	Event int    // number of the E, Q or R block, from 0
	What  string // the record
	Want  string
	Got   string
}

// Error names the event, what was expected and what came.
func (m *Mismatch) Error() string {
	return fmt.Sprintf("line %d, event %d, %s: recorded %s, engine %s", m.Line, m.Event, m.What, m.Want, m.Got)
}

// File replays the file at path, which the error does not repeat.
func File(path string) (Summary, error) {
	f, err := os.Open(path)
	if err != nil {
		if e := (*os.PathError)(nil); errors.As(err, &e) {
			err = e.Err
		}
		return Summary{}, err
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	switch {
	case errors.Is(err, io.EOF):
		return Summary{}, errors.New("empty file")
	case err != nil:
		return Summary{}, fmt.Errorf("not a gzip file: %w", err)
	}
	defer z.Close()
	return Replay(z)
}

// Replay replays an uncompressed recording. The error is a *Mismatch where the
// engine decided differently; where the recording itself is broken, it says at
// which line, and after how many events.
func Replay(r io.Reader) (Summary, error) {
	p := player{cfg: map[string]string{}}
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		p.line++
		if err := p.record(lines.Text()); err != nil && lines.Err() == nil {
			return p.sum, err
		} else if err != nil {
			break // half a line, where reading broke off
		}
	}
	if err := lines.Err(); err != nil {
		return p.sum, p.errorf("then %v", err)
	}
	if err := p.endBlock(); err != nil {
		return p.sum, err
	}
	if !p.final {
		return p.sum, p.errorf("ends without its final counters")
	}
	return p.sum, nil
}

// player holds one replay.
type player struct {
	line  int
	sum   Summary
	final bool              // the last counters have come
	cfg   map[string]string // C and R lines
	s     *engine.Scheduler
	now   engine.Time
	ids   uint32          // next packet id
	split map[uint32]bool // ids of super-packets that were split

	block  string     // the E, Q or R line being replayed
	got    []byte     // what the engine decided, in the form of the lines to come
	room   [4096]byte // where got is written
	fields []string
	pkt    engine.Packet
	hdr    []byte
	in     engine.Internals
}

func (p *player) errorf(format string, a ...any) error {
	return fmt.Errorf("line %d, after %d events: %s", p.line, p.sum.Events, fmt.Sprintf(format, a...))
}

func (p *player) differs(what, want, got string) error {
	return &Mismatch{Line: p.line, Event: p.sum.Events - 1, What: what, Want: want, Got: got}
}

func (p *player) record(text string) error {
	if text == "" {
		return p.errorf("empty")
	}
	switch text[0] {
	case 'W', 'X', 'P', 'D', 'N':
		return p.expect(text)
	}
	w := split(p.fields[:0], text)
	p.fields = w
	if w[0] == "C" {
		if len(w) != 3 {
			return p.errorf("C line of %d fields", len(w))
		}
		p.cfg[w[1]] = w[2]
		return nil
	}
	if p.s == nil {
		if err := p.start(); err != nil {
			return err
		}
	}
	switch w[0] {
	case "E", "Q", "R":
		if err := p.endBlock(); err != nil {
			return err
		}
		p.block = text
		return p.event(w)
	case "S", "I", "T", "U", "F":
		if err := p.endBlock(); err != nil {
			return err
		}
		return p.counters(w)
	}
	return p.errorf("unknown record %q", w[0])
}

// split appends the fields of a line, which one space separates, to w.
func split(w []string, text string) []string {
	for {
		field, rest, more := strings.Cut(text, " ")
		w = append(w, field)
		if !more {
			return w
		}
		text = rest
	}
}

// expect compares one line of a block with the engine's next decision.
func (p *player) expect(want string) error {
	got, rest, ok := bytes.Cut(p.got, []byte{'\n'})
	if !ok {
		return p.differs(p.block, want, "nothing more")
	}
	if string(got) != want {
		return p.differs(p.block, want, string(got))
	}
	p.got = rest
	return nil
}

func (p *player) endBlock() error {
	if got, _, ok := bytes.Cut(p.got, []byte{'\n'}); ok {
		return p.differs(p.block, "nothing more", string(got))
	}
	p.got, p.block = p.room[:0], ""
	return nil
}

// decided adds the line "kind n n ..." to the engine's decisions.
func (p *player) decided(kind byte, numbers ...int64) {
	p.got = append(p.got, kind)
	for _, n := range numbers {
		p.got = strconv.AppendInt(append(p.got, ' '), n, 10)
	}
	p.got = append(p.got, '\n')
}

// limits are the keys of C and R lines that are numbers, and what those may be.
var limits = map[string]struct{ low, high int64 }{
	"t0": {math.MinInt64, math.MaxInt64}, "lcg_seed": {0, math.MaxUint32}, "handle": {0, math.MaxUint32},
	"psched_mtu": {0, math.MaxUint16}, "headers": {0, 1}, "rate_bps": {0, math.MaxInt64 / 8},
	"diffserv": {0, int64(engine.Precedence)}, "flow_mode": {0, int64(engine.TripleIsolate)},
	"rtt_us": {0, math.MaxUint32}, "target_us": {0, math.MaxUint32}, "memlimit": {0, math.MaxUint32},
	"autorate": {0, 1}, "ingress": {0, 1}, "wash": {0, 1}, "split_gso": {0, 1}, "nat": {0, 1},
	"ack_filter": {0, int64(engine.AckFilterAggressive)}, "overhead": {math.MinInt16, math.MaxInt16}, "raw": {0, 1},
	"mpu": {0, math.MaxUint16}, "atm": {0, int64(engine.PTM)}, "fwmark": {0, math.MaxUint32},
}

// number reads the value of key k.
func (p *player) number(k string) (uint64, error) {
	l, ok := limits[k]
	if !ok {
		return 0, p.errorf("unknown key %q", k)
	}
	v, err := strconv.ParseInt(p.cfg[k], 10, 64)
	if err != nil || v < l.low || v > l.high {
		return 0, p.errorf("%s %q: not a number from %d to %d", k, p.cfg[k], l.low, l.high)
	}
	return uint64(v), nil
}

// config makes an engine configuration of the keys; the rate is not touched
// where the recording does not name it.
func (p *player) config(c engine.Config, changed map[string]bool) (engine.Config, error) {
	for k := range changed {
		if k == "format" || k == "name" || k == "kernel" {
			continue
		}
		v, err := p.number(k)
		if err != nil {
			return c, err
		}
		switch k {
		case "rate_bps":
			c.Rate = engine.BitsPerSecond(v * 8)
		case "diffserv":
			c.Tins = engine.TinMode(v)
		case "flow_mode":
			c.Flows = engine.FlowMode(v)
		case "rtt_us":
			c.RTT = time.Duration(max(v, 1)) * time.Microsecond
		case "target_us":
			c.Target = time.Duration(max(v, 1)) * time.Microsecond
		case "memlimit":
			c.MemoryLimit = uint32(v)
		case "autorate":
			c.Autorate = v != 0
		case "ingress":
			c.Ingress = v != 0
		case "wash":
			c.Wash = v != 0
		case "split_gso":
			c.SplitGSO = v != 0
		case "nat":
			c.NAT = v != 0
		case "ack_filter":
			c.AckFilter = engine.AckFilter(v)
		case "overhead":
			c.Overhead = int16(v)
		case "mpu":
			c.MPU = uint16(v)
		case "atm":
			c.Framing = engine.Framing(v)
		case "fwmark":
			c.Fwmark = uint32(v)
		case "psched_mtu":
			c.MTU = uint16(v)
		}
	}
	return c, nil
}

func (p *player) start() error {
	if p.cfg["format"] != "cakevec-1" {
		return p.errorf("format %q: not cakevec-1", p.cfg["format"])
	}
	keys := map[string]bool{}
	for k := range p.cfg {
		keys[k] = true
	}
	c, err := p.config(engine.DefaultConfig(), keys)
	if err != nil {
		return err
	}
	c.Raw = p.cfg["raw"] == "1"
	t0, err := p.number("t0")
	if err != nil {
		return err
	}
	seed, err := p.number("lcg_seed")
	if err != nil {
		return err
	}
	handle, err := p.number("handle")
	if err != nil {
		return err
	}
	p.sum.Name = p.cfg["name"]
	p.split = map[uint32]bool{}
	p.now = engine.Time(t0)
	p.s, err = engine.New(p.now, c, engine.Options{
		Seed: seed, Handle: uint32(handle), Compat: engine.CompatKernel, Stepwise: true,
	})
	if err != nil {
		return p.errorf("%v", err)
	}
	return nil
}

func (p *player) event(w []string) error {
	if len(w) < 2 {
		return p.errorf("%s line without a time", w[0])
	}
	dt, err := strconv.ParseInt(w[1], 10, 64)
	if err != nil || dt < 0 {
		return p.errorf("time %q: not a number of 0 or more", w[1])
	}
	p.now += engine.Time(dt)
	p.sum.Events++
	switch w[0] {
	case "E":
		return p.enqueue(w)
	case "Q":
		p.dequeue()
		return nil
	}
	return p.change(w[2:])
}

func (p *player) enqueue(w []string) error {
	if len(w) < 10 {
		return p.errorf("E line of %d fields", len(w))
	}
	var bad error
	dec := func(s string) uint32 {
		v, err := strconv.ParseUint(s, 10, 32)
		if err != nil {
			bad = p.errorf("number %q", s)
		}
		return uint32(v)
	}
	hexa := func(s string) uint32 {
		v, err := strconv.ParseUint(s, 16, 32)
		if err != nil {
			bad = p.errorf("hex number %q", s)
		}
		return uint32(v)
	}
	k := &p.pkt
	*k = engine.Packet{
		Handle: p.ids, Len: dec(w[2]), Truesize: dec(w[3]), Proto: uint16(hexa(w[4])), NetOff: uint16(dec(w[5])),
		FlowHash: hexa(w[7]), SrcHash: hexa(w[8]), DstHash: hexa(w[9]),
	}
	if w[6] != "-" {
		k.TOS, k.HasTOS = uint8(hexa(w[6])), true
	}
	header := uint32(40)
	if k.Proto == 0x800 {
		header = 20
	}
	k.Writable = k.HasTOS && k.Len >= uint32(k.NetOff)+header
	for _, f := range w[10:] {
		key, v, _ := strings.Cut(f, "=")
		switch key {
		case "m":
			k.Mark = hexa(v)
		case "p":
			k.Priority = hexa(v)
		case "g":
			g := strings.Split(v, ",")
			if len(g) != 4 {
				return p.errorf("GSO field %q", v)
			}
			k.Segs, k.GSOSize, k.HeaderLen = uint16(dec(g[0])), uint16(dec(g[1])), uint16(dec(g[2]))
			k.Len += (uint32(k.Segs) - 1) * uint32(k.HeaderLen)
		case "h":
			if v == "-" {
				break
			}
			var err error
			if p.hdr, err = hex.AppendDecode(p.hdr[:0], []byte(v)); err != nil {
				return p.errorf("header: %v", err)
			}
			k.Header = p.hdr
		default:
			return p.errorf("unknown field %q", f)
		}
	}
	if bad != nil {
		return bad
	}
	p.ids++
	if k.Segs > 1 && p.s.Config().SplitGSO {
		p.split[k.Handle] = true
		p.ids += uint32(k.Segs)
	}

	idle := p.s.Len() == 0
	next, failsafe := p.s.Clocks()
	e := p.s.Enqueue(p.now, k)
	if idle && next > p.now && failsafe > p.now {
		p.decided('W', int64(min(next, failsafe)-p.now))
	}
	p.drops()
	code := int64(0)
	if e.Congested {
		code = 2
	}
	p.decided('P', int64(e.Tin), int64(e.Flow), code)
	return nil
}

func (p *player) drops() {
	for _, d := range p.s.Drops() {
		p.got = strconv.AppendUint(append(p.got, "X "...), uint64(p.id(d.Handle, d.Seg)), 10)
		p.got = append(append(append(p.got, ' '), d.Reason.String()...), '\n')
		if d.Reason == engine.DropCleared {
			p.sum.Cleared++
		} else {
			p.sum.Dropped++
		}
	}
}

// id returns the recording's number of a packet or segment.
func (p *player) id(handle uint32, seg uint16) uint32 {
	if p.split[handle] {
		return handle + 1 + uint32(seg)
	}
	return handle
}

func (p *player) dequeue() {
	d, ok := p.s.Dequeue(p.now)
	p.drops()
	next, failsafe := p.s.Clocks()
	if !ok {
		if p.s.Len() > 0 && next > p.now && failsafe > p.now {
			p.decided('W', int64(min(next, failsafe)-p.now))
		}
		p.decided('N')
		return
	}
	p.sum.Delivered++
	if p.s.Len() > 0 {
		if next > p.now {
			p.decided('W', int64(min(next, failsafe)-p.now))
		}
	} else {
		p.s.Internals(&p.in)
		for i := range p.tins() {
			if t := &p.in.Tins[i]; t.Decaying > 0 {
				p.decided('W', int64(t.Target))
				break
			}
		}
	}
	p.got = strconv.AppendUint(append(p.got, "D "...), uint64(p.id(d.Handle, d.Seg)), 10)
	ce := byte('0')
	if d.CE {
		ce = '1'
	}
	p.got = append(p.got, ' ', ce, ' ')
	if d.HasTOS {
		p.got = append(p.got, "0123456789abcdef"[d.TOS>>4], "0123456789abcdef"[d.TOS&15])
	} else {
		p.got = append(p.got, '-')
	}
	p.got = strconv.AppendUint(append(p.got, ' '), uint64(d.Tin), 10)
	p.got = append(strconv.AppendUint(append(p.got, ' '), uint64(d.Flow), 10), '\n')
}

func (p *player) tins() int {
	switch p.s.Config().Tins {
	case engine.BestEffort:
		return 1
	case engine.Diffserv3:
		return 3
	case engine.Diffserv4:
		return 4
	default:
		return 8
	}
}

func (p *player) change(fields []string) error {
	if len(fields) == 1 && fields[0] == "reset=1" {
		p.s.Reset(p.now)
		p.drops()
		return nil
	}
	changed := map[string]bool{}
	c := p.s.Config()
	for _, f := range fields {
		k, v, _ := strings.Cut(f, "=")
		p.cfg[k] = v
		changed[k] = true
	}
	c, err := p.config(c, changed)
	if err != nil {
		return err
	}
	if changed["overhead"] {
		c.Raw = false
	}
	if changed["raw"] {
		c.Raw = true
	}
	if changed["overhead"] || changed["raw"] {
		// Named means that the extremes of the lengths start again, changed
		// or not.
		other := c
		other.Overhead ^= 1
		if err := p.s.Reconfigure(p.now, other); err != nil {
			return p.errorf("%v", err)
		}
	}
	if err := p.s.Reconfigure(p.now, c); err != nil {
		return p.errorf("%v", err)
	}
	p.drops()
	return nil
}
