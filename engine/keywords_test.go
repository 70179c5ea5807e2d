package engine

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func parse(t *testing.T, words string) Config {
	t.Helper()
	c, err := ParseKeywords(DefaultConfig(), words)
	if err != nil {
		t.Fatalf("ParseKeywords(%q): %v", words, err)
	}
	return c
}

// What `tc qdisc show` prints after a command with these words.
func TestKeywordsPrintedLikeTC(t *testing.T) {
	const defaults = "diffserv3 triple-isolate nonat nowash no-ack-filter split-gso rtt 100ms raw overhead 0"
	for words, want := range map[string]string{
		"":                                "bandwidth unlimited " + defaults,
		"bandwidth 100mbit":               "bandwidth 100Mbit " + defaults,
		"bandwidth 100mbit diffserv4 nat": "bandwidth 100Mbit diffserv4 triple-isolate nat nowash no-ack-filter split-gso rtt 100ms raw overhead 0",
		"bandwidth 12mbit besteffort dual-srchost wash ingress ack-filter-aggressive no-split-gso rtt 30ms pppoe-ptm mpu 72 memlimit 8mb fwmark 255": "bandwidth 12Mbit besteffort dual-srchost nonat wash ingress ack-filter-aggressive no-split-gso rtt 30ms ptm overhead 30 mpu 72 memlimit 8Mb fwmark 0xff",
		"unlimited autorate-ingress flowblind":              "bandwidth unlimited autorate-ingress diffserv3 flowblind nonat nowash no-ack-filter split-gso rtt 100ms raw overhead 0",
		"bandwidth 831kbit conservative interplanetary":     "bandwidth 831Kbit diffserv3 triple-isolate nonat nowash no-ack-filter split-gso rtt 1e+03s atm overhead 48",
		"bandwidth 1.5gbit cake3 flows ethernet datacentre": "bandwidth 1500Mbit cake3 flows nonat nowash no-ack-filter split-gso rtt 100us noatm overhead 38 mpu 84",
		"bandwidth 100000001bit raw ptm":                    "bandwidth 100Mbit diffserv3 triple-isolate nonat nowash no-ack-filter split-gso rtt 100ms raw ptm overhead 0",
		"overhead -10 rtt 1.5s":                             "bandwidth unlimited diffserv3 triple-isolate nonat nowash no-ack-filter split-gso rtt 1.5s noatm overhead -10",
	} {
		if got := parse(t, words).Keywords(); got != want {
			t.Errorf("%q:\n got %s\nwant %s", words, got, want)
		}
	}
}

// Fault 82: set, show and set again, for every keyword. The shown line gives
// the same Config and the same line.
func TestFault082_EveryKeywordRoundTrips(t *testing.T) {
	for words := range strings.FieldsFuncSeq(KeywordSyntax, func(r rune) bool { return r == '|' || r == ';' }) {
		words = strings.TrimSpace(words)
		for arg, example := range map[string]string{"RATE": "34567kbit", "TIME": "35ms", "SIZE": "9mb", "MASK": "0xff00", "N": "17"} {
			words = strings.Replace(words, " "+arg, " "+example, 1)
		}
		// Also on top of options that are all different from the defaults.
		for _, before := range []string{"", "bandwidth 7mbit diffserv8 hosts nat wash ingress ack-filter no-split-gso rtt 20ms atm overhead 20 mpu 60 memlimit 5mb fwmark 0xf"} {
			base := parse(t, before)
			c, err := ParseKeywords(base, words)
			if err != nil {
				t.Errorf("%q on %q: %v", words, before, err)
				continue
			}
			line := c.Keywords()
			back, err := ParseKeywords(DefaultConfig(), line)
			if err != nil {
				t.Errorf("%q shown as %q: %v", words, line, err)
				continue
			}
			if diff := cmp.Diff(c, back); diff != "" {
				t.Errorf("%q on %q shown as %q (-set +read back):\n%s", words, before, line, diff)
			}
		}
	}
	if got := parse(t, "memlimit 32mb").Keywords(); !strings.Contains(got, " memlimit 32Mb") {
		t.Errorf("memlimit not shown: %s", got)
	}
}

func TestKeywordEffects(t *testing.T) {
	d := DefaultConfig()
	with := func(change func(c *Config)) Config {
		c := d
		change(&c)
		return c
	}
	over := func(overhead int16, mpu uint16, f Framing) Config {
		return with(func(c *Config) { c.Overhead, c.MPU, c.Framing, c.Raw = overhead, mpu, f, false })
	}
	rtt := func(target, rtt time.Duration) Config {
		return with(func(c *Config) { c.Target, c.RTT = target*time.Microsecond, rtt*time.Microsecond })
	}
	for words, want := range map[string]Config{
		// cake.md 1.11, one by one
		"conservative": over(48, 0, ATM), "ipoa-vcmux": over(8, 0, ATM), "ipoa-llcsnap": over(16, 0, ATM),
		"bridged-vcmux": over(24, 0, ATM), "bridged-llcsnap": over(32, 0, ATM), "pppoa-vcmux": over(10, 0, ATM),
		"pppoa-llc": over(14, 0, ATM), "pppoe-vcmux": over(32, 0, ATM), "pppoe-llcsnap": over(40, 0, ATM),
		"pppoe-ptm": over(30, 0, PTM), "bridged-ptm": over(22, 0, PTM), "docsis": over(18, 64, NoATM),
		"ethernet": over(38, 84, NoATM), "atm ethernet": over(38, 84, ATM), "ether-vlan": over(4, 0, NoATM),
		"docsis ether-vlan ether-vlan": over(26, 64, NoATM), "overhead 44 mpu 84": over(44, 84, NoATM),
		"pppoe-ptm ether-vlan via-ethernet": over(34, 0, PTM), "overhead 0": over(0, 0, NoATM),
		"docsis raw": d, "raw docsis": with(func(c *Config) { c.Overhead, c.MPU = 18, 64 }),
		// cake.md 1.11, times
		"datacentre": rtt(5, 100), "lan": rtt(50, 1000), "metro": rtt(500, 10000), "regional": rtt(1500, 30000),
		"internet": rtt(5000, 100000), "oceanic": rtt(15000, 300000), "satellite": rtt(50000, 1000000),
		"interplanetary": rtt(50000000, 1000000000), "rtt 19us": rtt(1, 19), "rtt 50": rtt(2, 50), "rtt 1e+03s": rtt(50000000, 1000000000),
		// the rest
		"diffserv":                           with(func(c *Config) { c.Tins = Diffserv4 }),
		"autorate-ingress":                   with(func(c *Config) { c.Autorate = true }),
		"autorate-ingress unlimited":         d,
		"bandwidth 5mbit autorate-ingress":   with(func(c *Config) { c.Rate, c.Autorate = 5e6, true }),
		"autorate-ingress bandwidth 5mbit":   with(func(c *Config) { c.Rate = 5e6 }),
		"bandwidth 5mbit unlimited":          d,
		"bandwidth unlimited":                d,
		"bandwidth 2mbps":                    with(func(c *Config) { c.Rate = 16e6 }),
		"memlimit 4096Mb":                    with(func(c *Config) { c.MemoryLimit = 1<<32 - 1 }), // as 2^32-1 is shown
		"memlimit 1.5k":                      with(func(c *Config) { c.MemoryLimit = 1536 }),
		"memlimit 100000":                    with(func(c *Config) { c.MemoryLimit = 100000 }),
		"fwmark 0xFF000000":                  with(func(c *Config) { c.Fwmark = 0xff000000 }),
		"fwmark 0xff fwmark 0":               d,
		" nat\tnonat\n wash  nowash ":        d,
		"ingress egress":                     d,
		"ack-filter no-ack-filter":           d,
		"no-split-gso split-gso precedence ": with(func(c *Config) { c.Tins = Precedence }),
	} {
		if diff := cmp.Diff(want, parse(t, words)); diff != "" {
			t.Errorf("%q (-want +got):\n%s", words, diff)
		}
	}
}

// Words that are not given leave the base alone, as with `tc qdisc change`.
func TestKeywordsKeepBase(t *testing.T) {
	base := parse(t, "bandwidth 7mbit autorate-ingress diffserv8 hosts nat wash ingress ack-filter no-split-gso rtt 20ms pppoe-vcmux mpu 60 memlimit 5mb fwmark 0xf")
	got, err := ParseKeywords(base, "diffserv3") // fault 81: diffserv3 is 0 on the wire
	want := base
	want.Tins = Diffserv3
	if err != nil || got != want {
		t.Errorf("got %+v, %v, want %+v", got, err, want)
	}
	got, err = ParseKeywords(base, "ether-vlan") // adds up within a command only
	if err != nil || got.Overhead != 4 {
		t.Errorf("ether-vlan alone: overhead %d, %v, want 4", got.Overhead, err)
	}
	got, err = ParseKeywords(base, "nonat bogus")
	if err == nil || got != base {
		t.Errorf("after an error: got %+v, %v, want the base", got, err)
	}
}

func TestKeywordErrors(t *testing.T) {
	for words, want := range map[string][]string{
		"bandwidth 10mbit diffserv5":    {`word 3 "diffserv5"`, `did you mean "diffserv`, "triple-isolate"},
		"tripel-isolate":                {`word 1 "tripel-isolate"`, `did you mean "triple-isolate"?`},
		"nat NOWASH":                    {`word 2 "NOWASH"`, `did you mean "nowash"?`},
		"datacenter":                    {`did you mean "datacentre"?`},
		"qwertyuiop":                    {`word 1 "qwertyuiop": unknown, allowed are: bandwidth RATE`},
		"nat bandwidth":                 {`word 2 "bandwidth"`, "a rate must follow"},
		"bandwidth nat":                 {`word 2 "nat" after bandwidth`, "not a number"},
		"bandwidth 0":                   {`after bandwidth`, "unlimited"},
		"rtt 0":                         {`after rtt`, "at least 1us"},
		"rtt 2h":                        {`after rtt`, "unit"},
		"rtt 5000s":                     {`after rtt`, "4294s"},
		"rtt -1ms":                      {`after rtt`, "negative"},
		"rtt":                           {"a time must follow"},
		"memlimit 5gb":                  {`after memlimit`, "4294967295b"},
		"memlimit x":                    {`after memlimit`, "not a number"},
		"fwmark 0x1ffffffff":            {`after fwmark`, "32 bits"},
		"overhead 1.5":                  {`word 2 "1.5" after overhead`, "-64 to 256"},
		"overhead 250 ethernet":         {`word 3 "ethernet"`, "288", "-64 to 256"},
		"overhead":                      {"a number from -64 to 256 must follow"},
		strings.Repeat("longword", 100): {"unknown, allowed are"},
	} {
		_, err := ParseKeywords(DefaultConfig(), words)
		for _, w := range want {
			if err == nil || !strings.Contains(err.Error(), w) {
				t.Errorf("%q: error %v, want %q in it", words, err, w)
			}
		}
	}
}

// Fault 6: pppoe-ptm once meant 27 and bridged-ptm 19.
func TestFault006_PTMKeywords(t *testing.T) {
	if c := parse(t, "pppoe-ptm"); c.Overhead != 30 || c.Framing != PTM {
		t.Errorf("pppoe-ptm: overhead %d %v, want 30 ptm", c.Overhead, c.Framing)
	}
	if c := parse(t, "bridged-ptm"); c.Overhead != 22 || c.Framing != PTM {
		t.Errorf("bridged-ptm: overhead %d %v, want 22 ptm", c.Overhead, c.Framing)
	}
}

// Fault 7: via-ethernet is understood and changes nothing.
func TestFault007_ViaEthernet(t *testing.T) {
	for _, words := range []string{"", "pppoe-ptm", "overhead 27 mpu 64 atm", "raw"} {
		if diff := cmp.Diff(parse(t, words), parse(t, words+" via-ethernet")); diff != "" {
			t.Errorf("%q: via-ethernet changed it:\n%s", words, diff)
		}
	}
}

// Fault 11: the limits of overhead and mpu.
func TestFault011_OverheadLimits(t *testing.T) {
	for words, ok := range map[string]bool{
		"overhead -64": true, "overhead 256": true, "mpu 256": true, "mpu 0": true,
		"overhead -65": false, "overhead 257": false, "mpu 257": false, "mpu -1": false,
	} {
		if _, err := ParseKeywords(DefaultConfig(), words); (err == nil) != ok {
			t.Errorf("%q: error %v, want accepted = %v", words, err, ok)
		}
	}
}

// The list that errors and usage texts show is complete: each of its words is
// understood, and no word that is understood is missing.
func TestKeywordSyntaxIsComplete(t *testing.T) {
	listed := map[string]bool{}
	for _, w := range strings.FieldsFunc(KeywordSyntax, func(r rune) bool { return strings.ContainsRune(" |;", r) }) {
		listed[w] = true
	}
	var all []string
	for _, names := range [][]string{tinModeNames[:], flowModeNames[:], ackFilterNames[:], framingNames[:]} {
		all = append(all, names...)
	}
	for _, p := range rttPresets {
		all = append(all, p.name)
	}
	for _, p := range linkPresets {
		all = append(all, p.name)
	}
	for _, w := range all {
		if !listed[w] {
			t.Errorf("%q is missing in KeywordSyntax", w)
		}
	}
}

func FuzzKeywords(f *testing.F) {
	f.Add("bandwidth 100mbit diffserv4 nat")
	f.Add("bandwidth 831kbit besteffort atm overhead 48 rtt 1e+03s memlimit 4Mb fwmark 0xff")
	f.Add("raw docsis ether-vlan ether-vlan mpu 64 bandwidth 1.5e-3gbit autorate-ingress")
	f.Add("overhead -64 mpu 256 rtt 999999us memlimit 4294967295")
	f.Fuzz(func(t *testing.T, words string) {
		c, err := ParseKeywords(DefaultConfig(), words)
		if err != nil {
			return
		}
		// Printing rounds, at most twice: tc shows 999999us as 1e+03ms, and that as 1s.
		var lines [3]string
		for i := range lines {
			lines[i] = c.Keywords()
			if c, err = ParseKeywords(DefaultConfig(), lines[i]); err != nil {
				t.Fatalf("%q shown as %q: %v", words, lines[i], err)
			}
		}
		if lines[1] != lines[2] {
			t.Fatalf("%q does not settle: %q", words, lines)
		}
	})
}
