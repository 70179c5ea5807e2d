package engine

import (
	"fmt"
	"time"
)

// Limits that tc-cake(8) sets on the link-layer compensation, bytes.
const (
	minOverhead = -64
	maxOverhead = 256
	maxMPU      = 256
)

// Validate returns an error that names the first field that makes no sense,
// with its value and what is allowed.
func (c Config) Validate() error {
	switch {
	case c.Rate != 0 && c.Rate < 8:
		return fmt.Errorf("rate %d: must be 0 (unlimited) or at least 8 bits per second", uint64(c.Rate))
	case c.Rate > MaxRate:
		return fmt.Errorf("rate %v: must be at most %v", c.Rate, MaxRate)
	case c.Tins > Cake3:
		return fmt.Errorf("tin mode %d: unknown, the last is %d", c.Tins, Cake3)
	case c.Flows > TripleIsolate:
		return fmt.Errorf("flow mode %d: unknown, the last is %d", c.Flows, TripleIsolate)
	case c.AckFilter > AckFilterAggressive:
		return fmt.Errorf("ack filter %d: unknown, the last is %d", c.AckFilter, AckFilterAggressive)
	case c.Framing > PTM:
		return fmt.Errorf("framing %d: unknown, the last is %d", c.Framing, PTM)
	case c.Overhead < minOverhead || c.Overhead > maxOverhead:
		return fmt.Errorf("overhead %d: must be %d to %d bytes", c.Overhead, minOverhead, maxOverhead)
	case c.MPU > maxMPU:
		return fmt.Errorf("mpu %d: must be 0 to %d bytes", c.MPU, maxMPU)
	case c.MTU < 68:
		return fmt.Errorf("mtu %d: must be at least 68 bytes", c.MTU)
	}
	if err := validateTime("rtt", c.RTT); err != nil {
		return err
	}
	return validateTime("target", c.Target)
}

// validateTime accepts what TCA_CAKE_RTT and TCA_CAKE_TARGET can carry: whole
// microseconds in 32 bits.
func validateTime(name string, d time.Duration) error {
	if d < time.Microsecond || d > (1<<32-1)*time.Microsecond {
		return fmt.Errorf("%s %v: must be 1us to 4294.967295s", name, d)
	}
	if d%time.Microsecond != 0 {
		return fmt.Errorf("%s %v: must be whole microseconds", name, d)
	}
	return nil
}
