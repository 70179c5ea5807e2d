package backoff

import (
	"container/heap"
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
)

func seeded(t *testing.T) *rand.Rand {
	t.Helper()
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	return rand.New(rand.NewPCG(seed, 1))
}

// After a power cut a fleet must not come at one moment, and a controller that
// accepts and closes must not be hammered.
func TestFirstAttemptsSpread(t *testing.T) {
	random := seeded(t)
	var sum, last time.Duration
	const n = 2000
	for range n {
		b := Backoff{Random: random}
		d := b.Next()
		if d < 0 || d > FirstWait {
			t.Fatalf("first wait %v", d)
		}
		sum, last = sum+d, max(last, d)
	}
	if mean := sum / n; mean < FirstWait*4/10 || mean > FirstWait*6/10 || last < FirstWait*9/10 {
		t.Errorf("mean %v, longest %v: not spread over %v", mean, last, FirstWait)
	}
	b := Backoff{Random: random}
	var highest time.Duration
	for range 1000 {
		highest = max(highest, b.Next())
	}
	if highest > CapWait || highest < CapWait*9/10 {
		t.Errorf("longest wait %v, want nearly %v", highest, CapWait)
	}
	b.attempts = 1
	for range 100 {
		b.attempts = 1
		if d := b.Next(); d > BaseWait {
			t.Errorf("after a good session: %v", d)
		}
	}
}

func TestRetryAfter(t *testing.T) {
	refusal := func(d time.Duration) error {
		s, err := status.New(codes.ResourceExhausted, "too many").WithDetails(
			&errdetails.ErrorInfo{Reason: "ADMISSION"}, &errdetails.RetryInfo{RetryDelay: durationpb.New(d)})
		if err != nil {
			t.Fatal(err)
		}
		return s.Err()
	}
	for in, want := range map[time.Duration]time.Duration{
		90*time.Second + 5*time.Millisecond: 90*time.Second + 5*time.Millisecond,
		0:                                   0,
		time.Millisecond:                    time.Millisecond,
		48 * time.Hour:                      time.Hour,
		-time.Second:                        time.Hour,
	} {
		if got := RetryAfter(refusal(in)); got != want {
			t.Errorf("%v: got %v, want %v", in, got, want)
		}
	}
	if got := RetryAfter(errors.New("refused")); got != 0 {
		t.Errorf("plain error: %v", got)
	}
}

// Those whom a controller told the same come back one after another, and never
// before.
func TestAfterRefusal(t *testing.T) {
	s, err := status.New(codes.ResourceExhausted, "too many").WithDetails(&errdetails.RetryInfo{RetryDelay: durationpb.New(100 * time.Second)})
	if err != nil {
		t.Fatal(err)
	}
	b := Backoff{Random: seeded(t)}
	first, last := time.Hour, time.Duration(0)
	for range 1000 {
		wait := b.After(0, s.Err())
		first, last = min(first, wait), max(last, wait)
	}
	if first < 100*time.Second || last > 110*time.Second || last-first < 9*time.Second {
		t.Errorf("waits from %v to %v, want them spread over 100 s to 110 s", first, last)
	}
	if wait := b.After(time.Minute, errors.New("reset")); wait > BaseWait {
		t.Errorf("after a good session: %v", wait)
	}
}

// A lost connection is opened again at once; if that fails, the attempts are
// spread over the time that the controller named.
func TestSpread(t *testing.T) {
	b := Backoff{Random: seeded(t), Spread: 40 * time.Second}
	var longest time.Duration
	for range 1000 {
		if wait := b.After(time.Minute, errors.New("reset")); wait > BaseWait {
			t.Fatalf("the first attempt is after %v", wait)
		}
		longest = max(longest, b.After(0, errors.New("reset")))
	}
	if longest < 30*time.Second || longest > 32*time.Second {
		t.Errorf("the second attempt is after at most %v, want 32 s", longest)
	}
	longest = 0
	for range 1000 {
		b.After(time.Minute, errors.New("reset"))
		b.After(0, errors.New("reset"))
		longest = max(longest, b.After(0, errors.New("reset")))
	}
	if longest < 7*time.Second || longest > 8*time.Second {
		t.Errorf("the third attempt is after at most %v, want 8 s", longest)
	}
	b.Spread = 24 * time.Hour
	for range 1000 {
		if wait := b.Next(); wait > maxSpread {
			t.Fatalf("a controller was believed that asked for %v", wait)
		}
	}
}

// attempt is when a router tries.
type attempt struct {
	at     float64 // s
	router int
}

type attempts []attempt

func (a attempts) Len() int           { return len(a) }
func (a attempts) Less(i, j int) bool { return a[i].at < a[j].at }
func (a attempts) Swap(i, j int)      { a[i], a[j] = a[j], a[i] }
func (a *attempts) Push(x any)        { *a = append(*a, x.(attempt)) }
func (a *attempts) Pop() any {
	last := (*a)[len(*a)-1]
	*a = (*a)[:len(*a)-1]
	return last
}

// A fleet that has lost its controller is back in little more than the time that
// the controller needs to let it in, even if it was told a time that is a quarter
// too long or too short. The controller is as package door's is: a room that
// holds some seconds' worth, who finds it full is refused.
func TestFleetReturns(t *testing.T) {
	const rate, room = 100.0, 1200.0
	random := seeded(t)
	for _, n := range []int{3000, 15000} {
		for _, told := range []float64{0.75, 1, 1.25} {
			drain := float64(n) / rate
			routers := make([]Backoff, n)
			var queue attempts
			lost := errors.New("reset")
			for i := range routers {
				routers[i] = Backoff{Random: random, Spread: time.Duration(told * drain * float64(time.Second))}
				queue = append(queue, attempt{routers[i].After(time.Hour, lost).Seconds(), i})
			}
			heap.Init(&queue)
			waiting, last, refused := 0.0, 0.0, 0
			for len(queue) > 0 {
				a := heap.Pop(&queue).(attempt)
				waiting = max(0, waiting-(a.at-last)*rate)
				last = a.at
				if waiting < room {
					waiting++
					continue
				}
				refused++
				heap.Push(&queue, attempt{a.at + routers[a.router].After(0, lost).Seconds(), a.router})
			}
			took := (last + waiting/rate) / drain
			each := float64(refused) / float64(n)
			t.Logf("%d routers, told %.2f of the time that is needed: back after %.2f of it, %.1f refusals each", n, told, took, each)
			if took > 1.15 || each > 5 {
				t.Errorf("%d routers, told %.2f of the time that is needed: back after %.2f of it, %.1f refusals each; want 1.15 and 5 at most", n, told, took, each)
			}
		}
	}
}
