package engine_test

import (
	"math"
	"runtime"
	"testing"

	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/engine/enginetest"
)

// sample is the mean and the spread of one figure over the runs.
type sample struct{ n, sum, squares float64 }

func (s *sample) add(x float64) {
	s.n++
	s.sum += x
	s.squares += x * x
}

func (s *sample) mean() float64 { return s.sum / s.n }

// variance is that of the mean.
func (s *sample) variance() float64 {
	m := s.mean()
	return max(s.squares/s.n-m*m, 0) / (s.n - 1)
}

// TestStepwiseAgrees: granting quanta at once and leaving decaying flows alone
// changes no share, no drop rate and no mark rate by more than chance does. Each
// figure is compared over several seeds, both ways.
func TestStepwiseAgrees(t *testing.T) {
	seeds, n := 10, 150_000
	if testing.Short() || runtime.GOARCH != "amd64" && runtime.GOARCH != "arm64" {
		seeds, n = 4, 20_000
	}
	for _, name := range []string{"W1", "W1u", "W2", "W2s", "W3", "W4"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w, err := enginetest.WorkloadByName(name)
			if err != nil {
				t.Fatal(err)
			}
			var figures [2]map[string]*sample
			for way := range figures {
				figures[way] = map[string]*sample{}
				for seed := range seeds {
					o := engine.Options{Seed: uint64(seed + 1), Stepwise: way == 1}
					for k, x := range workloadFigures(t, w, o, n) {
						if figures[way][k] == nil {
							figures[way][k] = &sample{}
						}
						figures[way][k].add(x)
					}
				}
			}
			for k, a := range figures[0] {
				b := figures[1][k]
				diff := math.Abs(a.mean() - b.mean())
				if limit := 4*math.Sqrt(a.variance()+b.variance()) + 0.005*b.mean() + 1; diff > limit {
					t.Errorf("%s: %.1f, step by step %.1f; chance makes %.1f", k, a.mean(), b.mean(), limit)
				}
			}
		})
	}
}

// workloadFigures are what one run has to show: by tin the packets that were
// delivered, dropped, marked, and how evenly the flows were served.
func workloadFigures(t *testing.T, w enginetest.Workload, o engine.Options, n int) map[string]float64 {
	t.Helper()
	s, err := engine.New(0, w.Config, o)
	if err != nil {
		t.Fatal(err)
	}
	type queue struct {
		tin  uint8
		flow uint16
	}
	bytes := map[queue]float64{}
	watch := enginetest.Watch{Delivered: func(_ engine.Time, d engine.Delivery) {
		bytes[queue{d.Tin, d.Flow}] += float64(d.Len)
	}}
	// Where the first round of all flows falls is no chance, but the same for
	// all seeds, and not the same both ways: what comes of it is not counted.
	d := enginetest.NewDriver(s, w, watch)
	var begin, st engine.Stats
	s.Stats(d.Run(n/4), &begin)
	clear(bytes)
	s.Stats(d.Run(n), &st)
	figures := map[string]float64{"queued": float64(st.Qlen)}
	for i := range st.NumTins {
		tin := &st.Tins[i]
		name := "tin " + string(rune('0'+tin.Index)) + " "
		figures[name+"drops"] = float64(tin.Drops - begin.Tins[i].Drops)
		figures[name+"marks"] = float64(tin.Marks - begin.Tins[i].Marks)
		figures[name+"ack drops"] = float64(tin.AckDrops - begin.Tins[i].AckDrops)
		var flows, sum, squares float64
		for q, b := range bytes {
			if q.tin == tin.Index {
				flows++
				sum += b
				squares += b * b
			}
		}
		figures[name+"bytes"] = sum
		if sum != 0 {
			// Jain's index of the flows, in thousandths.
			figures[name+"evenness"] = 1000 * sum * sum / (flows * squares)
		}
	}
	return figures
}
