package backoff

import (
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
	if longest < 36*time.Second || longest > 40*time.Second {
		t.Errorf("the second attempt is after at most %v, want 40 s", longest)
	}
	b.Spread = 24 * time.Hour
	for range 1000 {
		if wait := b.Next(); wait > maxSpread {
			t.Fatalf("a controller was believed that asked for %v", wait)
		}
	}
}
