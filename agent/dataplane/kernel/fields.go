package kernel

import (
	"fmt"
	"strconv"

	"github.com/cakefleet/cakefleet/engine"
)

// fields are the settings that can be read back, as reports name them.
var fields = []struct {
	name  string
	value func(c engine.Config) string
}{
	{"rate", func(c engine.Config) string { return c.Rate.String() }},
	{"tins", func(c engine.Config) string { return c.Tins.String() }},
	{"flows", func(c engine.Config) string { return c.Flows.String() }},
	{"ack_filter", func(c engine.Config) string { return c.AckFilter.String() }},
	{"framing", func(c engine.Config) string { return c.Framing.String() }},
	{"nat", func(c engine.Config) string { return strconv.FormatBool(c.NAT) }},
	{"wash", func(c engine.Config) string { return strconv.FormatBool(c.Wash) }},
	{"ingress", func(c engine.Config) string { return strconv.FormatBool(c.Ingress) }},
	{"autorate", func(c engine.Config) string { return strconv.FormatBool(c.Autorate) }},
	{"split_gso", func(c engine.Config) string { return strconv.FormatBool(c.SplitGSO) }},
	{"raw", func(c engine.Config) string { return strconv.FormatBool(c.Raw) }},
	{"overhead", func(c engine.Config) string { return strconv.Itoa(int(c.Overhead)) }},
	{"mpu", func(c engine.Config) string { return strconv.Itoa(int(c.MPU)) }},
	{"rtt", func(c engine.Config) string { return c.RTT.String() }},
	{"target", func(c engine.Config) string { return c.Target.String() }},
	{"memory_limit", func(c engine.Config) string { return strconv.FormatUint(uint64(c.MemoryLimit), 10) }},
	{"fwmark", func(c engine.Config) string { return fmt.Sprintf("%#x", c.Fwmark) }},
}
