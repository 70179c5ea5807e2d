package plan

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/cakefleet/cakefleet/engine"
)

// Owner says whose word a field of a desired state is. A later one takes
// precedence over an earlier one, field by field.
type Owner uint8

// The owners, lowest first.
const (
	OwnerPlan    Owner = iota
	OwnerRollout       // a plan, or fields above it, that not all routers have yet
	OwnerBilling
	OwnerSchedule
	OwnerOverride
	OwnerBoost
	OwnerSuspension
)

// String returns the word that operators see.
func (o Owner) String() string {
	return [...]string{"plan", "rollout", "billing", "schedule", "override", "boost", "suspension"}[o]
}

// A field is one value of a link. There are perDirection of them for down, and
// then as many for up.
type field struct {
	name  string
	get   func(*engine.Config) string
	set   func(*engine.Config, string) error
	carry func(to, from *engine.Config)
}

// NumFields is how many fields a link has.
const (
	NumFields    = 2 * perDirection
	perDirection = 18
)

// Rates are the fields down.rate and up.rate.
const (
	DownRate = 0
	UpRate   = perDirection
)

var fields = [perDirection]field{
	{
		"rate", func(c *engine.Config) string { return c.Rate.String() },
		func(c *engine.Config, s string) (err error) { c.Rate, err = engine.ParseRate(s); return err },
		func(to, from *engine.Config) { to.Rate = from.Rate },
	},
	wordField("tins", func(c *engine.Config) *engine.TinMode { return &c.Tins }, engine.Cake3),
	wordField("flows", func(c *engine.Config) *engine.FlowMode { return &c.Flows }, engine.TripleIsolate),
	wordField("ack-filter", func(c *engine.Config) *engine.AckFilter { return &c.AckFilter }, engine.AckFilterAggressive),
	wordField("framing", func(c *engine.Config) *engine.Framing { return &c.Framing }, engine.PTM),
	flagField("nat", func(c *engine.Config) *bool { return &c.NAT }),
	flagField("wash", func(c *engine.Config) *bool { return &c.Wash }),
	flagField("ingress", func(c *engine.Config) *bool { return &c.Ingress }),
	flagField("autorate-ingress", func(c *engine.Config) *bool { return &c.Autorate }),
	flagField("split-gso", func(c *engine.Config) *bool { return &c.SplitGSO }),
	flagField("raw", func(c *engine.Config) *bool { return &c.Raw }),
	numberField("overhead", func(c *engine.Config) *int16 { return &c.Overhead }, 16),
	numberField("mpu", func(c *engine.Config) *uint16 { return &c.MPU }, 16),
	numberField("mtu", func(c *engine.Config) *uint16 { return &c.MTU }, 16),
	timeField("rtt", func(c *engine.Config) *time.Duration { return &c.RTT }),
	timeField("target", func(c *engine.Config) *time.Duration { return &c.Target }),
	numberField("memory-limit", func(c *engine.Config) *uint32 { return &c.MemoryLimit }, 32),
	numberField("fwmark", func(c *engine.Config) *uint32 { return &c.Fwmark }, 32),
}

func wordField[T interface {
	~uint8
	fmt.Stringer
}](name string, at func(*engine.Config) *T, last T,
) field {
	return field{
		name, func(c *engine.Config) string { return (*at(c)).String() },
		func(c *engine.Config, s string) error {
			var words []string
			for v := T(0); v <= last; v++ {
				if v.String() == s {
					*at(c) = v
					return nil
				}
				words = append(words, v.String())
			}
			return fmt.Errorf("%q is unknown, allowed are %s", s, strings.Join(words, ", "))
		},
		func(to, from *engine.Config) { *at(to) = *at(from) },
	}
}

func flagField(name string, at func(*engine.Config) *bool) field {
	return field{
		name, func(c *engine.Config) string { return strconv.FormatBool(*at(c)) },
		func(c *engine.Config, s string) error {
			if s != "true" && s != "false" {
				return fmt.Errorf("%q: must be true or false", s)
			}
			*at(c) = s == "true"
			return nil
		},
		func(to, from *engine.Config) { *at(to) = *at(from) },
	}
}

func numberField[T ~int16 | ~uint16 | ~uint32](name string, at func(*engine.Config) *T, bits int) field {
	return field{
		name, func(c *engine.Config) string { return strconv.FormatInt(int64(*at(c)), 10) },
		func(c *engine.Config, s string) error {
			n, err := strconv.ParseInt(s, 0, 64)
			if err != nil || int64(T(n)) != n {
				return fmt.Errorf("%q: must be a number of %d bits", s, bits)
			}
			*at(c) = T(n)
			return nil
		},
		func(to, from *engine.Config) { *at(to) = *at(from) },
	}
}

func timeField(name string, at func(*engine.Config) *time.Duration) field {
	return field{
		name, func(c *engine.Config) string { return (*at(c)).String() },
		func(c *engine.Config, s string) error {
			d, err := time.ParseDuration(s)
			if err != nil {
				return fmt.Errorf("%q: must be a time such as 50ms", s)
			}
			*at(c) = d
			return nil
		},
		func(to, from *engine.Config) { *at(to) = *at(from) },
	}
}

// FieldName returns the name of a field, such as "down.rate".
func FieldName(i int) string {
	if i < perDirection {
		return "down." + fields[i].name
	}
	return "up." + fields[i-perDirection].name
}

// FieldText returns the value of a field of a link, such as "115Mbit".
func FieldText(l *Link, i int) string {
	if i < perDirection {
		return fields[i].get(&l.Down)
	}
	return fields[i-perDirection].get(&l.Up)
}

// FieldChange is one field in which two links differ.
type FieldChange struct {
	Field         string // such as "down.rate"
	Before, After string // such as "115Mbit"
}

// String returns the change for people.
func (c FieldChange) String() string { return c.Field + " " + c.Before + " -> " + c.After }

// Diff returns the fields in which two links differ, in the order of fields.
func Diff(before, after Link) (changes []FieldChange) {
	for i := range NumFields {
		if b, a := FieldText(&before, i), FieldText(&after, i); b != a {
			changes = append(changes, FieldChange{FieldName(i), b, a})
		}
	}
	return changes
}

// Settings are values for some fields of a link.
type Settings struct {
	Fields uint64 // bit i: field i is set
	Link   Link   // the values; fields that are not set are zero
}

// ParseSettings reads values by field name, such as "down.rate" "300mbit". The
// error names the field.
func ParseSettings(words map[string]string) (Settings, error) {
	var s Settings
	for _, name := range slices.Sorted(maps.Keys(words)) {
		if err := s.Parse(name, words[name]); err != nil {
			return Settings{}, err
		}
	}
	return s, nil
}

// Parse sets one field. The error names it.
func (s *Settings) Parse(name, value string) error {
	direction, rest, _ := strings.Cut(name, ".")
	i := slices.IndexFunc(fields[:], func(f field) bool { return f.name == rest })
	if i < 0 || direction != "down" && direction != "up" {
		return fmt.Errorf("field %q is unknown, allowed are down or up with one of %s", name, fieldNames())
	}
	c := &s.Link.Down
	bit := i
	if direction == "up" {
		c, bit = &s.Link.Up, i+perDirection
	}
	if err := fields[i].set(c, value); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	s.Fields |= 1 << bit
	return nil
}

func fieldNames() string {
	var b strings.Builder
	for _, f := range fields {
		b.WriteString(" ." + f.name)
	}
	return b.String()[1:]
}

// Words is the inverse of ParseSettings; nil if nothing is set.
func (s Settings) Words() map[string]string {
	if s.Fields == 0 {
		return nil
	}
	words := map[string]string{}
	for i := range NumFields {
		if s.Has(i) {
			words[FieldName(i)] = FieldText(&s.Link, i)
		}
	}
	return words
}

// Has returns whether a field is set.
func (s *Settings) Has(i int) bool { return s.Fields&(1<<i) != 0 }

// Over puts the values that are set in place of those of a link.
func (s *Settings) Over(l *Link) {
	for rest, i := s.Fields, 0; rest != 0; rest, i = rest>>1, i+1 {
		switch {
		case rest&1 == 0:
		case i < perDirection:
			fields[i].carry(&l.Down, &s.Link.Down)
		default:
			fields[i-perDirection].carry(&l.Up, &s.Link.Up)
		}
	}
}

// With returns s with the values of o in place of its own where they are set.
func (s Settings) With(o Settings) Settings {
	o.Over(&s.Link)
	s.Fields |= o.Fields
	return s
}

// Without returns s without fields.
func (s Settings) Without(mask uint64) Settings {
	keep := Settings{Fields: s.Fields &^ mask}
	masked := Settings{Fields: keep.Fields, Link: s.Link}
	masked.Over(&keep.Link)
	return keep
}

// Mask returns the bit of a field; the error says that there is none of that
// name.
func Mask(name string) (uint64, error) {
	for i := range NumFields {
		if FieldName(i) == name {
			return 1 << i, nil
		}
	}
	return 0, fmt.Errorf("field %q is unknown, allowed are down or up with one of %s", name, fieldNames())
}

// RatesOf returns the rates of a link as settings.
func RatesOf(l Link) Settings {
	s := Settings{Fields: 1<<DownRate | 1<<UpRate}
	s.Link.Down.Rate, s.Link.Up.Rate = l.Down.Rate, l.Up.Rate
	return s
}

// String returns the values for people, such as "down.rate 300Mbit".
func (s Settings) String() string {
	var parts []string
	for i := range NumFields {
		if s.Has(i) {
			parts = append(parts, FieldName(i)+" "+FieldText(&s.Link, i))
		}
	}
	return strings.Join(parts, ", ")
}

// Validate checks what can be checked without the rest of the link.
func (s *Settings) Validate() error {
	l := Link{Down: engine.DefaultConfig(), Up: engine.DefaultConfig()}
	s.Over(&l)
	return l.Validate()
}

// Boost sets fields until a time.
type Boost struct {
	Settings Settings
	Until    time.Time
}

// Layers are what a subscriber has besides its plan. A zero value is absent.
// Suspensions are names of plans whose rates apply; that of an operator takes
// precedence over that of billing.
type Layers struct {
	Billing           Settings
	BillingSuspension string
	Override          Settings
	Boost             Boost
	Suspension        string
}

// Suspended returns the plan whose rates apply instead; empty if none.
func (l *Layers) Suspended() string {
	if l == nil {
		return ""
	}
	return cmp.Or(l.Suspension, l.BillingSuspension)
}

// Validate returns an error that names the layer and the field.
func (l *Layers) Validate() error {
	if l == nil {
		return nil
	}
	for _, s := range []struct {
		name string
		set  *Settings
	}{{"billing", &l.Billing}, {"override", &l.Override}, {"boost", &l.Boost.Settings}} {
		if err := s.set.Validate(); err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
	}
	for _, policy := range []string{l.Suspension, l.BillingSuspension} {
		if policy != "" {
			if err := ValidateName("plan", policy); err != nil {
				return fmt.Errorf("suspension: %w", err)
			}
		}
	}
	if (l.Boost.Settings.Fields == 0) != l.Boost.Until.IsZero() {
		return fmt.Errorf("boost: values and a time to end go together")
	}
	return nil
}
