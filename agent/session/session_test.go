package session

import (
	"context"
	"errors"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/cakefleet/cakefleet/internal/backoff"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func seeded(t *testing.T) *rand.Rand {
	t.Helper()
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	return rand.New(rand.NewPCG(seed, 1))
}

// fleet.md 53: the controller is away for two days; the agent tries on at the
// capped interval and is there within it afterwards.
func TestFleet053_RetriesForEver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New(Config{Jitter: seeded(t)})
		tries := 0
		back := time.Now().Add(48 * time.Hour)
		ctx, cancel := context.WithCancel(t.Context())
		var there time.Time
		s.open = func(context.Context) (time.Duration, error) {
			tries++
			if time.Now().Before(back) {
				return 0, errors.New("connection refused")
			}
			there = time.Now()
			cancel()
			return 0, nil
		}
		if err := s.Run(ctx); err != nil {
			t.Error(err)
		}
		// Full jitter up to a minute: one try in 30 s on average.
		if want := 48 * 120; tries < want*9/10 || tries > want*11/10 {
			t.Errorf("%d tries in 48 hours, want about %d", tries, want)
		}
		if late := there.Sub(back); late > backoff.CapWait {
			t.Errorf("it came back after %v", late)
		}
	})
}

func TestShortSessionsKeepBackingOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New(Config{Jitter: seeded(t)})
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		tries := 0
		s.open = func(context.Context) (time.Duration, error) { tries++; return time.Second, errors.New("go away") }
		if err := s.Run(ctx); err != nil {
			t.Error(err)
		}
		if tries > 200 {
			t.Errorf("%d sessions in an hour", tries)
		}
	})
}

func TestControllerAsksToStayAway(t *testing.T) {
	refusal, err := status.New(codes.ResourceExhausted, "too many").WithDetails(&errdetails.RetryInfo{RetryDelay: durationpb.New(2 * time.Minute)})
	if err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		s := New(Config{Jitter: seeded(t)})
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		tries := 0
		s.open = func(context.Context) (time.Duration, error) { tries++; return 0, refusal.Err() }
		if err := s.Run(ctx); err != nil || tries != 1 {
			t.Errorf("%d tries within a minute, %v", tries, err)
		}
	})
}

// A handshake that taught the time is tried again at once.
func TestRetryAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New(Config{Jitter: seeded(t)})
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var times []time.Time
		s.open = func(context.Context) (time.Duration, error) {
			times = append(times, time.Now())
			if len(times) == 1 {
				s.retry.Store(true)
			} else {
				cancel()
			}
			return 0, errors.New("not yet valid")
		}
		_ = s.Run(ctx)
		if len(times) != 2 || !times[0].Equal(times[1]) {
			t.Errorf("tries at %v", times)
		}
	})
}
