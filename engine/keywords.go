package engine

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

// KeywordSyntax lists every word that ParseKeywords knows.
const KeywordSyntax = "bandwidth RATE | unlimited | autorate-ingress; " +
	"besteffort | precedence | diffserv3 | diffserv4 | diffserv | diffserv8 | cake3; " +
	"flowblind | srchost | dsthost | hosts | flows | dual-srchost | dual-dsthost | triple-isolate; " +
	"nat | nonat; wash | nowash; ingress | egress; " +
	"ack-filter | ack-filter-aggressive | no-ack-filter; split-gso | no-split-gso; " +
	"rtt TIME | datacentre | lan | metro | regional | internet | oceanic | satellite | interplanetary; " +
	"raw | noatm | atm | ptm | overhead N | mpu N | conservative | " +
	"ipoa-vcmux | ipoa-llcsnap | bridged-vcmux | bridged-llcsnap | pppoa-vcmux | pppoa-llc | pppoe-vcmux | pppoe-llcsnap | " +
	"pppoe-ptm | bridged-ptm | docsis | ethernet | ether-vlan | via-ethernet; " +
	"memlimit SIZE; fwmark MASK"

var (
	tinModeNames   = [...]string{"diffserv3", "diffserv4", "diffserv8", "besteffort", "precedence", "cake3"}
	flowModeNames  = [...]string{"flowblind", "srchost", "dsthost", "hosts", "flows", "dual-srchost", "dual-dsthost", "triple-isolate"}
	ackFilterNames = [...]string{"no-ack-filter", "ack-filter", "ack-filter-aggressive"}
	framingNames   = [...]string{"noatm", "atm", "ptm"}
)

// String returns the keyword of the mode.
func (m TinMode) String() string { return nameOf(tinModeNames[:], int(m)) }

// String returns the keyword of the mode.
func (m FlowMode) String() string { return nameOf(flowModeNames[:], int(m)) }

// String returns the keyword of the setting.
func (a AckFilter) String() string { return nameOf(ackFilterNames[:], int(a)) }

// String returns the keyword of the framing.
func (f Framing) String() string { return nameOf(framingNames[:], int(f)) }

func nameOf(names []string, i int) string {
	if i < len(names) {
		return names[i]
	}
	return "unknown(" + strconv.Itoa(i) + ")"
}

func indexOf(names []string, word string) int {
	for i, n := range names {
		if n == word {
			return i
		}
	}
	return -1
}

// rttPreset is a round-trip time with a name. The target is a twentieth.
type rttPreset struct {
	name string
	rtt  time.Duration
}

var rttPresets = [...]rttPreset{
	{"datacentre", 100 * time.Microsecond},
	{"lan", time.Millisecond},
	{"metro", 10 * time.Millisecond},
	{"regional", 30 * time.Millisecond},
	{"internet", 100 * time.Millisecond},
	{"oceanic", 300 * time.Millisecond},
	{"satellite", time.Second},
	{"interplanetary", 1000 * time.Second},
}

// linkPreset is a link layer with a name: what it adds to the overhead, its
// minimum size, and its framing. Negative MPU and framing mean "as it is".
type linkPreset struct {
	name     string
	overhead int
	mpu      int
	framing  int
}

var linkPresets = [...]linkPreset{
	{"ipoa-vcmux", 8, -1, int(ATM)},
	{"ipoa-llcsnap", 16, -1, int(ATM)},
	{"bridged-vcmux", 24, -1, int(ATM)},
	{"bridged-llcsnap", 32, -1, int(ATM)},
	{"pppoa-vcmux", 10, -1, int(ATM)},
	{"pppoa-llc", 14, -1, int(ATM)},
	{"pppoe-vcmux", 32, -1, int(ATM)},
	{"pppoe-llcsnap", 40, -1, int(ATM)},
	{"pppoe-ptm", 30, -1, int(PTM)},
	{"bridged-ptm", 22, -1, int(PTM)},
	{"docsis", 18, 64, int(NoATM)},
	{"ethernet", 38, 84, -1},
	{"ether-vlan", 4, -1, -1},
}

// ParseKeywords changes base by the words of tc-cake(8) and returns the
// result; what no word names stays as it is, as with `tc qdisc change`. Words
// apply from left to right, the last one wins, and these have side effects:
//
//   - bandwidth and unlimited end autorate-ingress; name it after them.
//   - overhead keywords add up within one call, starting at 0, and end raw;
//     raw starts over, and wins over what follows it.
//   - rtt sets the target, too, to a twentieth.
//
// Beyond tc, "bandwidth unlimited" and "fwmark" are read as they are printed,
// and zero turns off mpu, memlimit and fwmark. An error names the word, its
// position, what is allowed, and the word that was probably meant; the
// returned Config is base then.
func ParseKeywords(base Config, words string) (Config, error) {
	p := keywordParser{c: base, words: strings.Fields(words)}
	for p.at < len(p.words) {
		if err := p.word(); err != nil {
			return base, err
		}
	}
	p.finish()
	return p.c, nil
}

type keywordParser struct {
	c     Config
	words []string
	at    int // index of the word after the one being read

	recorded bool // what a kernel had: not bound by tc's limits

	overhead         int // the sum so far
	overheadSet, raw bool
}

// finish applies what is known at the last word only.
func (p *keywordParser) finish() {
	if p.overheadSet {
		p.c.Overhead = int16(p.overhead)
		p.c.Raw = p.raw
	}
}

// word reads one word with its argument.
func (p *keywordParser) word() error {
	w := p.words[p.at]
	p.at++
	c := &p.c
	switch w {
	case "bandwidth":
		arg, err := p.arg("a rate", "115mbit")
		if err != nil {
			return err
		}
		r, err := ParseRate(arg)
		if err != nil && p.recorded {
			r, err = parseTableRate(arg)
		}
		if err != nil {
			return p.argError("bandwidth", err)
		}
		c.Rate, c.Autorate = r, false
	case "unlimited":
		c.Rate, c.Autorate = 0, false
	case "autorate-ingress":
		c.Autorate = true
	case "diffserv": // the old name
		c.Tins = Diffserv4
	case "nat", "nonat":
		c.NAT = w == "nat"
	case "wash", "nowash":
		c.Wash = w == "wash"
	case "ingress", "egress":
		c.Ingress = w == "ingress"
	case "split-gso", "no-split-gso":
		c.SplitGSO = w == "split-gso"
	case "rtt":
		return p.rtt()
	case "raw":
		c.Framing, c.MPU = NoATM, 0
		p.overhead, p.overheadSet, p.raw = 0, true, true
	case "conservative": // a whole cell on top: safe for any link
		c.Framing = ATM
		p.overhead, p.overheadSet = 48, true
	case "via-ethernet": // kept for old scripts: this is automatic now
	case "overhead":
		n, err := p.integer(w, minOverhead, maxOverhead)
		if err != nil {
			return err
		}
		p.overhead, p.overheadSet = n, true
	case "mpu":
		n, err := p.integer(w, 0, maxMPU)
		if err != nil {
			return err
		}
		c.MPU = uint16(n)
	case "memlimit":
		arg, err := p.arg("a size", "4mb")
		if err != nil {
			return err
		}
		n, err := parseSize(arg)
		if err == nil && n > 1<<32 { // tc rounds the largest limit up when it prints it
			err = fmt.Errorf("too large, at most 4294967295b")
		}
		if err != nil {
			return p.argError(w, err)
		}
		c.MemoryLimit = uint32(min(n, math.MaxUint32))
	case "fwmark":
		arg, err := p.arg("a mask", "0xff")
		if err != nil {
			return err
		}
		n, err := strconv.ParseUint(arg, 0, 32)
		if err != nil {
			return p.argError(w, fmt.Errorf("not a mask of 32 bits, say for example 0xff"))
		}
		c.Fwmark = uint32(n)
	default:
		return p.named(w)
	}
	return nil
}

// named reads the words that come from tables.
func (p *keywordParser) named(w string) error {
	c := &p.c
	if i := indexOf(tinModeNames[:], w); i >= 0 {
		c.Tins = TinMode(i)
		return nil
	}
	if i := indexOf(flowModeNames[:], w); i >= 0 {
		c.Flows = FlowMode(i)
		return nil
	}
	if i := indexOf(ackFilterNames[:], w); i >= 0 {
		c.AckFilter = AckFilter(i)
		return nil
	}
	if i := indexOf(framingNames[:], w); i >= 0 {
		c.Framing = Framing(i)
		return nil
	}
	for _, r := range rttPresets {
		if r.name == w {
			c.RTT, c.Target = r.rtt, r.rtt/20
			return nil
		}
	}
	for _, l := range linkPresets {
		if l.name != w {
			continue
		}
		p.overhead += l.overhead
		p.overheadSet = true
		if l.mpu >= 0 {
			c.MPU = uint16(l.mpu)
		}
		if l.framing >= 0 {
			c.Framing = Framing(l.framing)
		}
		if p.overhead > maxOverhead {
			return fmt.Errorf("word %d %q: overhead adds up to %d, allowed are %d to %d", p.at, w, p.overhead, minOverhead, maxOverhead)
		}
		return nil
	}
	if near := nearestKeyword(w); near != "" {
		return fmt.Errorf("word %d %q: unknown, did you mean %q? allowed are: %s", p.at, w, near, KeywordSyntax)
	}
	return fmt.Errorf("word %d %q: unknown, allowed are: %s", p.at, w, KeywordSyntax)
}

func (p *keywordParser) rtt() error {
	arg, err := p.arg("a time", "100ms")
	if err != nil {
		return err
	}
	d, err := parseTime(arg)
	if err == nil && d == 0 {
		err = fmt.Errorf("too short, at least 1us")
	}
	if err != nil {
		return p.argError("rtt", err)
	}
	p.c.RTT = d
	p.c.Target = max(time.Duration(d.Microseconds()/20)*time.Microsecond, time.Microsecond)
	return nil
}

func (p *keywordParser) integer(keyword string, lo, hi int) (int, error) {
	if p.recorded {
		hi = math.MaxInt16
		if lo < 0 {
			lo = math.MinInt16
		}
	}
	arg, err := p.arg(fmt.Sprintf("a number from %d to %d", lo, hi), "18")
	if err != nil {
		return 0, err
	}
	n, err := strconv.Atoi(arg)
	if err != nil || n < lo || n > hi {
		return 0, p.argError(keyword, fmt.Errorf("allowed are %d to %d", lo, hi))
	}
	return n, nil
}

// arg returns the word after the current one.
func (p *keywordParser) arg(what, example string) (string, error) {
	if p.at == len(p.words) {
		return "", fmt.Errorf("word %d %q: %s must follow, for example %s", p.at, p.words[p.at-1], what, example)
	}
	p.at++
	return p.words[p.at-1], nil
}

func (p *keywordParser) argError(keyword string, err error) error {
	return fmt.Errorf("word %d %q after %s: %w", p.at, p.words[p.at-1], keyword, err)
}

// nearestKeyword returns the word that w is probably a misspelling of, or "".
func nearestKeyword(w string) string {
	best, bestDist := "", min(len(w), 24)/3+1
	lower := strings.ToLower(w)
	for _, f := range strings.FieldsFunc(KeywordSyntax, func(r rune) bool { return r == ' ' || r == ';' || r == '|' }) {
		if strings.ToLower(f) != f { // RATE, N and such stand for arguments
			continue
		}
		if d := editDistance(lower, f); d < bestDist || d == bestDist && best == "" {
			best, bestDist = f, d
		}
	}
	return best
}

// editDistance counts the insertions, deletions, substitutions and swaps of
// neighbours that make b of a. Words longer than any keyword are far away.
func editDistance(a, b string) int {
	const longest = 32
	if len(a) > longest || len(b) > longest {
		return longest
	}
	var d [longest + 1][longest + 1]int
	for i := range len(a) + 1 {
		d[i][0] = i
	}
	for j := range len(b) + 1 {
		d[0][j] = j
	}
	for i := 1; i <= len(a); i++ {
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			d[i][j] = min(d[i-1][j]+1, d[i][j-1]+1, d[i-1][j-1]+cost)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				d[i][j] = min(d[i][j], d[i-2][j-2]+1)
			}
		}
	}
	return d[len(a)][len(b)]
}

// Keywords returns the options as `tc qdisc show` prints them. ParseKeywords
// reads the line back. As with tc, what it rounds is lost: rates and times to
// a few digits, a target that is not a twentieth of the rtt, the MTU.
func (c Config) Keywords() string {
	return string(c.appendKeywords(make([]byte, 0, 192)))
}

func (c *Config) appendKeywords(b []byte) []byte {
	b = append(b, "bandwidth "...)
	if r := c.Rate &^ 7; r != 0 { // the kernel keeps whole bytes per second
		b = appendRate(b, r)
	} else {
		b = append(b, "unlimited"...)
	}
	b = appendIf(b, c.Autorate, " autorate-ingress", "")
	b = append(b, ' ')
	b = append(b, c.Tins.String()...)
	b = append(b, ' ')
	b = append(b, c.Flows.String()...)
	b = appendIf(b, c.NAT, " nat", " nonat")
	b = appendIf(b, c.Wash, " wash", " nowash")
	b = appendIf(b, c.Ingress, " ingress", "")
	b = append(b, ' ')
	b = append(b, c.AckFilter.String()...)
	b = appendIf(b, c.SplitGSO, " split-gso", " no-split-gso")
	b = append(b, " rtt "...)
	b = appendTime(b, c.RTT)
	b = appendIf(b, c.Raw, " raw", "")
	if c.Framing != NoATM || !c.Raw {
		b = append(b, ' ')
		b = append(b, c.Framing.String()...)
	}
	b = append(b, " overhead "...)
	b = strconv.AppendInt(b, int64(c.Overhead), 10)
	if c.MPU != 0 {
		b = append(b, " mpu "...)
		b = strconv.AppendUint(b, uint64(c.MPU), 10)
	}
	if c.MemoryLimit != 0 {
		b = append(b, " memlimit "...)
		b = appendSize(b, uint64(c.MemoryLimit))
	}
	if c.Fwmark != 0 {
		b = append(b, " fwmark 0x"...)
		b = strconv.AppendUint(b, uint64(c.Fwmark), 16)
	}
	return b
}

func appendIf(b []byte, cond bool, yes, no string) []byte {
	if cond {
		return append(b, yes...)
	}
	return append(b, no...)
}
