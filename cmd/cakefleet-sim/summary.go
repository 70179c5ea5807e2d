package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"google.golang.org/grpc/status"
)

// summary is what is printed in the end.
type summary struct {
	Routers       int      `json:"routers"`
	Offline       int      `json:"offline"` // of them, by --offline
	Seconds       float64  `json:"seconds"`
	Sessions      int64    `json:"sessions"` // most at once
	Began         int64    `json:"sessions_began"`
	AllSeconds    float64  `json:"seconds_until_all_connected"` // 0: never
	Pushes        int64    `json:"pushes"`
	Acks          int64    `json:"acks"`
	Clamped       int64    `json:"clamped"` // of the acks
	Refused       int64    `json:"refused"`
	LagP50Seconds float64  `json:"lag_p50_seconds"`
	LagP99Seconds float64  `json:"lag_p99_seconds"`
	LagMaxSeconds float64  `json:"lag_max_seconds"`
	Reports       int64    `json:"reports"`
	Dropped       uint64   `json:"dropped_messages"` // as the controller did not read
	Ended         []ending `json:"ended"`            // sessions and attempts, the most frequent reason first
}

func (p *player) summary() *summary {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := &summary{
		Routers: len(p.routers), Offline: p.away(), Seconds: time.Since(p.started).Seconds(), Sessions: p.most, Began: p.began.Load(), AllSeconds: p.all.Seconds(),
		Pushes: p.pushes.Load(), Acks: p.acks.Load(), Clamped: p.clamped.Load(), Refused: p.refused.Load(), Reports: p.reports.Load(),
		LagP50Seconds: min(p.lag.Quantile(50, 100), p.slowest).Seconds(), LagP99Seconds: min(p.lag.Quantile(99, 100), p.slowest).Seconds(), LagMaxSeconds: p.slowest.Seconds(),
		Ended: p.endings(),
	}
	for _, r := range p.routers {
		s.Dropped += r.agent.Blocked()
	}
	return s
}

// why returns the most frequent reason.
func (s *summary) why() string {
	if len(s.Ended) == 0 {
		return "none was refused until the end came"
	}
	return s.Ended[0].Why
}

func (s *summary) table(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	ms := func(seconds float64) string { return fmt.Sprintf("%.1f ms", seconds*1e3) }
	connected := "never all at once"
	if s.AllSeconds > 0 {
		connected = fmt.Sprintf("all after %.1f s", s.AllSeconds)
	}
	each := func(n int64) string { return fmt.Sprintf("%d, %.1f/s", n, float64(n)/max(s.Seconds, 1e-9)) }
	for _, row := range [][2]string{
		{"routers", fmt.Sprintf("%d, %d of them offline", s.Routers, s.Offline)},
		{"played for", fmt.Sprintf("%.1f s", s.Seconds)},
		{"sessions", fmt.Sprintf("%d at once, %d begun; %s", s.Sessions, s.Began, connected)},
		{"pushes", each(s.Pushes)},
		{"acks", fmt.Sprintf("%s; %d of them clamped", each(s.Acks), s.Clamped)},
		{"refused", fmt.Sprint(s.Refused)},
		{"lag", fmt.Sprintf("p50 %s, p99 %s, most %s", ms(s.LagP50Seconds), ms(s.LagP99Seconds), ms(s.LagMaxSeconds))},
		{"reports", each(s.Reports)},
		{"dropped messages", fmt.Sprint(s.Dropped)},
	} {
		fmt.Fprintf(t, "%s\t%s\n", row[0], row[1])
	}
	for _, e := range s.Ended {
		fmt.Fprintf(t, "ended %d times\t%s\n", e.Count, e.Why)
	}
	return t.Flush()
}

// reasonOf returns why a session ended, without what differs from router to
// router.
func reasonOf(err error) string {
	switch {
	case err == nil:
		return "the controller ended it"
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded):
		return "no answer in time"
	case errors.Is(err, io.EOF), errors.Is(err, net.ErrClosed), errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		return "the connection was closed"
	case errors.Is(err, syscall.ECONNREFUSED):
		return "connection refused: no controller listens there"
	case errors.Is(err, syscall.EMFILE):
		return "too many open files: raise the limit (ulimit -n)"
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		return "no port or address is left to connect from: see --source"
	}
	if s, ok := status.FromError(err); ok {
		return strings.ToLower(s.Code().String()) + ": " + firstWords(s.Message())
	}
	return firstWords(err.Error())
}

// firstWords bounds a text, and leaves out waits, which differ.
func firstWords(text string) string {
	text, _, _ = strings.Cut(text, ": try again in")
	if r := []rune(text); len(r) > 160 {
		return string(r[:160]) + "..."
	}
	return text
}

// bootID is a random one, as the kernel makes it.
func bootID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}
