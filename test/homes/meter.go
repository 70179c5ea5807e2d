package homes

import (
	"time"

	"github.com/cakefleet/cakefleet/test/traffic"
)

// Small packets are acknowledgements and probes: with all options an
// acknowledgement over IPv6 has 100 bytes.
const (
	smallBytes    = 100
	ethernetBytes = 14 // what a shaper counts of a packet beside its IP layer
)

// Meter measures homes from one moment to another.
type Meter struct {
	homes    []*Home
	from, to time.Time
	before   [][2]float64 // bytes in small packets, down and up, by home
	after    [][2]float64
}

// NewMeter begins.
func NewMeter(hs ...*Home) (*Meter, error) {
	m := &Meter{homes: hs, from: time.Now()}
	var err error
	m.before, err = m.read()
	return m, err
}

// End ends.
func (m *Meter) End() (err error) {
	m.to = time.Now()
	m.after, err = m.read()
	return err
}

func (m *Meter) read() ([][2]float64, error) {
	all := make([][2]float64, len(m.homes))
	for i, h := range m.homes {
		for k, link := range []string{lan, WAN} {
			packets, bytes, err := h.Router.Small(link)
			if err != nil {
				return nil, err
			}
			all[i][k] = float64(bytes + packets*ethernetBytes)
		}
	}
	return all, nil
}

// Result is what a home got.
type Result struct {
	Down, Up Direction
	Latency  traffic.Latency
}

// Direction is what a home got in one direction.
type Direction struct {
	Goodput float64 // payload of bulk flows that arrived, bits/s
	Beside  float64 // acknowledgements of the other direction and probes, bits/s on the wire
}

// Share returns how much of a rate the payload got, after what went beside
// it: at 115/12 Mbit/s the acknowledgements of the download alone are a sixth
// of the upload, whatever shapes it.
func (d Direction) Share(rate float64) float64 { return d.Goodput / (rate - d.Beside) }

// Result returns what the home with this index among the meter's got of flows
// and probes.
func (m *Meter) Result(i int, rec *traffic.Record, down, up, pings []string) Result {
	beside := func(k int) float64 { return (m.after[i][k] - m.before[i][k]) * 8 / m.to.Sub(m.from).Seconds() }
	return Result{
		Down:    Direction{rec.Goodput(m.from, m.to, down...), beside(0)},
		Up:      Direction{rec.Goodput(m.from, m.to, up...), beside(1)},
		Latency: rec.Latency(m.from, m.to, pings...),
	}
}
