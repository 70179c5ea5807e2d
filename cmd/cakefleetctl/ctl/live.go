package ctl

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/wire"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// liveEvery is how often a screen is drawn; reports come more rarely.
const liveEvery = time.Second

// What a terminal does with these is the same everywhere.
const (
	clearScreen = "\x1b[H\x1b[2J"
	hideCursor  = "\x1b[?25l"
	showCursor  = "\x1b[?25h"
)

func (a *app) routerLive() *cobra.Command {
	var once bool
	c := &cobra.Command{
		Use:   "live ROUTER",
		Short: "Watch one router: both directions and every tin, until Ctrl-C",
		Long: `Watch one router: both directions and every tin, until Ctrl-C. What is drawn over
time are the last 15 minutes. Where standard output is no terminal one screen is
printed.`,
		Args:              exactly("ROUTER"),
		ValidArgsFunction: a.complete(routerIDs),
		RunE: func(c *cobra.Command, args []string) error {
			return a.live(c.Context(), args[0], once || a.output == "json" || !isTerminal(a.cfg.Stdout))
		},
	}
	c.Flags().BoolVar(&once, "once", false, "print one screen and end")
	return c
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

func (a *app) live(ctx context.Context, id string, once bool) error {
	conn, err := a.connect()
	if err != nil {
		return err
	}
	if !once {
		fmt.Fprint(a.cfg.Stdout, hideCursor)
		defer fmt.Fprint(a.cfg.Stdout, showCursor)
	}
	for {
		stats, err := call(ctx, a, conn.telemetry.GetRouterStats, &pb.GetRouterStatsRequest{RouterId: id})
		if err != nil {
			return quiet(ctx, err)
		}
		samples, err := call(ctx, a, conn.telemetry.ListRouterSamples, &pb.ListRouterSamplesRequest{RouterId: id})
		if err != nil {
			return quiet(ctx, err)
		}
		if a.output == "json" {
			return a.printJSON(samples)
		}
		var screen bytes.Buffer
		for _, id := range stats.GetSilentControllers() {
			fmt.Fprintf(&screen, "controller %s does not answer: what is shown may be old\n", id)
		}
		if err := a.drawLive(&screen, id, stats, samples.GetSamples()); err != nil {
			return err
		}
		if once {
			_, err := screen.WriteTo(a.cfg.Stdout)
			return wrapFailure(err)
		}
		// In one write, so that it doesn't flicker.
		if _, err := a.cfg.Stdout.Write(append([]byte(clearScreen), screen.Bytes()...)); err != nil {
			return failure{err}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(liveEvery):
		}
	}
}

func wrapFailure(err error) error {
	if err == nil {
		return nil
	}
	return failure{err}
}

// quiet returns nil where an end was asked for.
func quiet(ctx context.Context, err error) error {
	if errors.Is(ctx.Err(), context.Canceled) {
		return nil
	}
	return err
}

func (a *app) drawLive(w io.Writer, id string, stats *pb.GetRouterStatsResponse, samples []*pb.RouterSample) error {
	report, err := wire.ToReport(stats.GetReport())
	if err != nil {
		return failure{fmt.Errorf("report of %s: %w", id, err)}
	}
	state := "connected"
	if !stats.GetConnected() {
		state = "NOT CONNECTED"
	}
	fmt.Fprintf(w, "%s  %s  reported %s, agent up %s\n", id, state, a.ago(stats.GetReceivedTime()), rough(report.Uptime))
	for _, d := range []struct {
		name  string
		stats *engine.Stats
		tins  []*pb.TinStats
		of    func(*pb.RouterSample) *pb.DirectionSample
	}{
		{"DOWN", report.Down, stats.GetReport().GetDown().GetTins(), (*pb.RouterSample).GetDown},
		{"UP", report.Up, stats.GetReport().GetUp().GetTins(), (*pb.RouterSample).GetUp},
	} {
		if d.stats == nil {
			fmt.Fprintf(w, "\n%-4s not shaped\n", d.name)
			continue
		}
		drawDirection(w, d.name, d.stats, samples, d.of)
		for i, tin := range d.tins[:min(len(d.tins), d.stats.NumTins)] {
			drawTin(w, cmp.Or(tin.GetName(), fmt.Sprintf("tin %d", i)), &d.stats.Tins[i])
		}
	}
	return nil
}

// lineWidth is how many characters a line over time has.
const lineWidth = 60

func drawDirection(w io.Writer, name string, s *engine.Stats, samples []*pb.RouterSample, of func(*pb.RouterSample) *pb.DirectionSample) {
	var loads, waits []float64
	var now *pb.DirectionSample
	for _, sample := range samples {
		d := of(sample)
		load, wait := math.NaN(), math.NaN()
		if d != nil {
			now = d
			load = float64(d.GetLoadBps())
			if d.GetSojournP99() != nil {
				wait = d.GetSojournP99().AsDuration().Seconds()
			}
		}
		loads, waits = append(loads, load), append(waits, wait)
	}
	fmt.Fprintf(w, "\n%-4s %s of %s  [%-20s]  p50 %s  p99 %s  queued %s\n", name, rate(now.GetLoadBps()), exact(s.Config.Rate), bar(used(now.GetLoadBps(), uint64(s.Config.Rate)), 20),
		orDash(maybeDelay(now.GetSojournP50())), orDash(maybeDelay(now.GetSojournP99())), size(s.Backlog))
	fmt.Fprintf(w, "     rate  %s\n     p99   %s\n", sparkline(loads, lineWidth), sparkline(waits, lineWidth))
	fmt.Fprintf(w, "     %-14s %10s %10s %10s %10s %10s %8s %8s\n", "tin", "packets", "bytes", "drops", "marks", "queued", "p50", "p99")
}

func drawTin(w io.Writer, name string, t *engine.TinStats) {
	p50, p99 := "-", "-"
	if t.Sojourn.Total() > 0 {
		p50, p99 = delay(t.Sojourn.Quantile(1, 2)), delay(t.Sojourn.Quantile(99, 100))
	}
	fmt.Fprintf(w, "     %-14s %10d %10s %10d %10d %10s %8s %8s\n", name, t.Packets, size(t.Bytes), t.Drops, t.Marks, size(t.BacklogBytes), p50, p99)
}

func used(load, of uint64) float64 {
	if of == 0 {
		return 0
	}
	return min(float64(load)/float64(of), 1)
}
