// Package wire maps the native words of internal/plan and engine to and from
// the protocol, both directions, and does nothing else. What comes from the
// wire is checked for shape here (unknown enum values, numbers that don't fit)
// and for sense by Validate of the native type.
package wire

import (
	"fmt"
	"math"
	"time"

	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// FromLink returns the message of l; nil for nil.
func FromLink(l *plan.Link) *pb.Link {
	if l == nil {
		return nil
	}
	return &pb.Link{Down: FromShaping(l.Down), Up: FromShaping(l.Up)}
}

// ToLink returns the link of m; nil for nil. The error names the field.
func ToLink(m *pb.Link) (*plan.Link, error) {
	if m == nil {
		return nil, nil
	}
	down, err := ToShaping(m.GetDown())
	if err != nil {
		return nil, fmt.Errorf("down: %w", err)
	}
	up, err := ToShaping(m.GetUp())
	if err != nil {
		return nil, fmt.Errorf("up: %w", err)
	}
	return &plan.Link{Down: down, Up: up}, nil
}

// FromShaping returns the message of c. The protocol's enums are the native
// ones plus 1, as 0 means unspecified there.
func FromShaping(c engine.Config) *pb.Shaping {
	return &pb.Shaping{
		RateBps:         uint64(c.Rate),
		Tins:            pb.TinMode(c.Tins) + 1,
		Flows:           pb.FlowMode(c.Flows) + 1,
		AckFilter:       pb.AckFilter(c.AckFilter) + 1,
		Framing:         pb.Framing(c.Framing) + 1,
		Nat:             c.NAT,
		Wash:            c.Wash,
		Ingress:         c.Ingress,
		AutorateIngress: c.Autorate,
		SplitGso:        c.SplitGSO,
		Raw:             c.Raw,
		Overhead:        int32(c.Overhead),
		Mpu:             uint32(c.MPU),
		Mtu:             uint32(c.MTU),
		RttUs:           uint32(c.RTT / time.Microsecond),
		TargetUs:        uint32(c.Target / time.Microsecond),
		MemoryLimit:     c.MemoryLimit,
		Fwmark:          c.Fwmark,
	}
}

// ToShaping returns the configuration of m. The error names the field that is
// missing, unknown to this version or out of its type's range.
func ToShaping(m *pb.Shaping) (engine.Config, error) {
	var c engine.Config
	switch {
	case m == nil:
		return c, fmt.Errorf("shaping is missing")
	case m.Tins <= 0 || m.Tins > pb.TinMode_TIN_MODE_CAKE3:
		return c, fmt.Errorf("tins: value %d is unknown", m.Tins)
	case m.Flows <= 0 || m.Flows > pb.FlowMode_FLOW_MODE_TRIPLE_ISOLATE:
		return c, fmt.Errorf("flows: value %d is unknown", m.Flows)
	case m.AckFilter <= 0 || m.AckFilter > pb.AckFilter_ACK_FILTER_AGGRESSIVE:
		return c, fmt.Errorf("ack_filter: value %d is unknown", m.AckFilter)
	case m.Framing <= 0 || m.Framing > pb.Framing_FRAMING_PTM:
		return c, fmt.Errorf("framing: value %d is unknown", m.Framing)
	case m.Overhead < math.MinInt16 || m.Overhead > math.MaxInt16:
		return c, fmt.Errorf("overhead: value %d is out of range", m.Overhead)
	case m.Mpu > math.MaxUint16:
		return c, fmt.Errorf("mpu: value %d is out of range", m.Mpu)
	case m.Mtu > math.MaxUint16:
		return c, fmt.Errorf("mtu: value %d is out of range", m.Mtu)
	}
	return engine.Config{
		Rate:        engine.BitsPerSecond(m.RateBps),
		Tins:        engine.TinMode(m.Tins - 1),
		Flows:       engine.FlowMode(m.Flows - 1),
		AckFilter:   engine.AckFilter(m.AckFilter - 1),
		Framing:     engine.Framing(m.Framing - 1),
		NAT:         m.Nat,
		Wash:        m.Wash,
		Ingress:     m.Ingress,
		Autorate:    m.AutorateIngress,
		SplitGSO:    m.SplitGso,
		Raw:         m.Raw,
		Overhead:    int16(m.Overhead),
		MPU:         uint16(m.Mpu),
		MTU:         uint16(m.Mtu),
		RTT:         time.Duration(m.RttUs) * time.Microsecond,
		Target:      time.Duration(m.TargetUs) * time.Microsecond,
		MemoryLimit: m.MemoryLimit,
		Fwmark:      m.Fwmark,
	}, nil
}
