package ctl

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
	_ "time/tzdata" // times are told as in the schedule's zone

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"

	"github.com/cakefleet/cakefleet/internal/plan"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

func (a *app) scheduleCommand() *cobra.Command {
	return group("schedule", "Change rates and plans by the clock",
		a.scheduleSet(), a.scheduleShow(), a.scheduleList(), a.schedulePause(true), a.schedulePause(false), a.scheduleDelete())
}

// scheduleFlags are what schedule set says.
type scheduleFlags struct {
	plan, subscriber string
	labels           []string
	settings         settingFlags
	toPlan           string
	zone, start, end string
	windows          []string
	priority         int32
	dryRun           bool
}

func (a *app) scheduleSet() *cobra.Command {
	var f scheduleFlags
	c := &cobra.Command{
		Use:   "set ID (--plan NAME | --subscriber ID | --label NAME=VALUE...) (--down RATE | --up RATE | --set FIELD=VALUE | --to-plan NAME)... --zone ZONE (--window 'DAYS FROM-TO' | --start TIME)",
		Short: "Make or replace what changes by the clock",
		Long: `Make or replace what changes by the clock, in recurring windows or from one time on:

  cakefleetctl schedule set evening --plan gold --down 200mbit --window 'mon-fri 18:00-23:00' --zone Europe/Berlin
  cakefleetctl schedule set nights --label site=north --to-plan night --window 'daily 23:00-06:00' --zone Europe/Berlin
  cakefleetctl schedule set faster --plan gold --down 300mbit --start '2027-01-01 02:00' --zone Europe/Berlin
  cakefleetctl schedule set move --subscriber 10001 --to-plan silver --start '2027-01-01 00:00' --zone UTC

Days are mon to sun, ranges and lists of them, daily, weekdays and weekend; those
of a window across midnight are the days on which it begins. Times are what a
clock on a wall of that zone shows. One that is skipped in spring means the
instant at which the clock jumps; of one that comes twice in autumn, a beginning
is the first and an end the second.

What is set is above the plan and billing, and below an operator's override.
With --to-plan the subscriber is on that plan meanwhile. Of several schedules
that set the same field of one router, that of the higher --priority counts,
then that for a subscriber before labels before a plan, then the newer one. What
changes a plan's fields, or a subscriber's plan, from a time on for good becomes
part of them then. Routers change when the controller tells them: one that can't
reach it keeps what it has.`,
		Args:              exactly("ID"),
		ValidArgsFunction: a.complete(scheduleIDs),
		RunE: func(c *cobra.Command, args []string) error {
			return a.setSchedule(c.Context(), args[0], &f)
		},
	}
	s := c.Flags()
	s.StringVar(&f.plan, "plan", "", "for all subscribers of this `plan`")
	s.StringVar(&f.subscriber, "subscriber", "", "for this `subscriber`")
	s.StringArrayVar(&f.labels, "label", nil, "for all subscribers with this label, `name=value`; repeated: with all of them")
	f.settings.add(s)
	s.StringVar(&f.toPlan, "to-plan", "", "`plan` that they have meanwhile")
	s.StringVar(&f.zone, "zone", "", "time `zone`, such as Europe/Berlin or UTC")
	s.StringVar(&f.start, "start", "", "`time` at which it starts, such as '2027-01-01 02:00'")
	s.StringVar(&f.end, "end", "", "`time` at which it ends for good")
	s.StringArrayVar(&f.windows, "window", nil, "recurring `days and times`, such as 'mon-fri 18:00-23:00'; may be repeated")
	s.Int32Var(&f.priority, "priority", 0, "`number`: the higher one counts")
	s.BoolVar(&f.dryRun, "dry-run", false, "only tell what would change, and when")
	must(c.RegisterFlagCompletionFunc("plan", a.completeFlag(planNames)))
	must(c.RegisterFlagCompletionFunc("to-plan", a.completeFlag(planNames)))
	must(c.RegisterFlagCompletionFunc("subscriber", a.completeFlag(subscriberIDs)))
	return c
}

// message returns what the flags say. An error is one of the command line.
func (f *scheduleFlags) message(id string) (*pb.Schedule, error) {
	if err := plan.ValidateName("schedule", id); err != nil {
		return nil, err
	}
	words, err := f.settings.words()
	if err != nil {
		return nil, err
	}
	labels, err := parseLabels(f.labels)
	if err != nil {
		return nil, err
	}
	targets := 0
	for _, is := range []bool{f.plan != "", f.subscriber != "", len(labels) > 0} {
		if is {
			targets++
		}
	}
	switch {
	case targets != 1:
		return nil, errors.New("say whom it is for: one of --plan, --subscriber and --label")
	case len(words) == 0 && f.toPlan == "":
		return nil, errors.New("say what to change: --down, --up, --set or --to-plan")
	case len(words) > 0 && f.toPlan != "":
		return nil, errors.New("--to-plan and values to set don't go together: make two schedules")
	case f.zone == "":
		return nil, errors.New("say in which time zone: --zone, such as Europe/Berlin")
	case len(f.windows) == 0 && f.start == "":
		return nil, errors.New("say when: --window 'mon-fri 18:00-23:00' or --start '2027-01-01 02:00'")
	}
	return &pb.Schedule{
		Id: id, Target: &pb.ScheduleTarget{Plan: f.plan, Subscriber: f.subscriber, Labels: labels}, Set: words, ToPlan: f.toPlan,
		Zone: f.zone, Start: f.start, End: f.end, Windows: f.windows, Priority: f.priority,
	}, nil
}

// parseLabels reads the NAME=VALUE of --label.
func parseLabels(texts []string) (map[string]string, error) {
	labels := map[string]string{}
	for _, text := range texts {
		name, value, ok := strings.Cut(text, "=")
		if !ok {
			return nil, fmt.Errorf("--label %q: must be NAME=VALUE", text)
		}
		if err := plan.ValidateLabel(name, value); err != nil {
			return nil, fmt.Errorf("--label: %w", err)
		}
		labels[name] = value
	}
	return labels, nil
}

func (a *app) setSchedule(ctx context.Context, id string, f *scheduleFlags) error {
	m, err := f.message(id)
	if err != nil {
		return err
	}
	conn, err := a.connect()
	if err != nil {
		return err
	}
	_, err = call(ctx, a, conn.schedules.GetSchedule, &pb.GetScheduleRequest{Id: id})
	isNew := isCode(err, codes.NotFound)
	if err != nil && !isNew {
		return err
	}
	if isNew {
		resp, err := call(ctx, a, conn.schedules.CreateSchedule, &pb.CreateScheduleRequest{Schedule: m, ValidateOnly: f.dryRun})
		if err != nil {
			return err
		}
		if a.output == "json" {
			return a.printJSON(resp)
		}
		return a.tellSchedule(resp.GetSchedule(), resp.GetConflicts(), resp.GetAffectedRouters(), "made", "would be made", f.dryRun)
	}
	resp, err := call(ctx, a, conn.schedules.UpdateSchedule, &pb.UpdateScheduleRequest{Schedule: m, ValidateOnly: f.dryRun})
	switch {
	case err != nil:
		return err
	case a.output == "json":
		return a.printJSON(resp)
	case !resp.GetChanged():
		fmt.Fprintf(a.cfg.Stdout, "schedule %s: nothing changes, it is so already (revision %d)\n", id, resp.GetSchedule().GetRevision())
		return nil
	}
	return a.tellSchedule(resp.GetSchedule(), resp.GetConflicts(), resp.GetAffectedRouters(), "changed", "would change", f.dryRun)
}

// tellSchedule prints what became, or would become, of a schedule.
func (a *app) tellSchedule(s *pb.Schedule, conflicts []*pb.ScheduleConflict, now uint32, did, would string, dryRun bool) error {
	out := a.cfg.Stdout
	end := "; nothing is stored"
	if dryRun {
		did = would
	} else {
		end = fmt.Sprintf(": revision %d", s.GetRevision())
	}
	fmt.Fprintf(out, "schedule %s %s, for %s of %s, %d of them at once%s\n", s.GetId(), did, count(s.GetRouters(), "router"), targetText(s.GetTarget()), now, end)
	next := s.GetUpcoming()
	if len(next) == 0 {
		fmt.Fprintln(out, "  never in force: its time is over")
	}
	for i, span := range next {
		if i == 3 {
			break
		}
		fmt.Fprintf(out, "  %s\n", spanText(span, s.GetZone()))
	}
	for _, c := range conflicts {
		fmt.Fprintf(out, "  %s\n", conflictText(c, s.GetZone()))
	}
	return nil
}

func conflictText(c *pb.ScheduleConflict, zone string) string {
	which := "this one counts"
	if c.GetOtherCounts() {
		which = "that one counts"
	}
	fields := strings.Join(c.GetFields(), ", ")
	if len(c.GetFields()) > 3 {
		fields = count(len(c.GetFields()), "field")
	}
	return fmt.Sprintf("schedule %s sets %s of %s too, first at %s: %s", c.GetId(), fields, count(c.GetRouters(), "router"), clockIn(c.GetTime().AsTime(), zone), which)
}

func targetText(t *pb.ScheduleTarget) string {
	switch {
	case t.GetPlan() != "":
		return "plan " + t.GetPlan()
	case t.GetSubscriber() != "":
		return "subscriber " + t.GetSubscriber()
	default:
		return labelText(t.GetLabels())
	}
}

// clockIn returns an instant as a clock in a zone shows it.
func clockIn(t time.Time, zone string) string {
	loc, err := time.LoadLocation(zone)
	if err != nil {
		loc = time.UTC // a newer controller knows zones that we don't
	}
	return t.In(loc).Format("Mon 2006-01-02 15:04 MST")
}

func spanText(s *pb.ScheduleSpan, zone string) string {
	begin, end := "from the first day on", "for good"
	if s.GetBegin() != nil {
		begin = clockIn(s.GetBegin().AsTime(), zone)
	}
	if s.GetEnd() != nil {
		end = "to " + clockIn(s.GetEnd().AsTime(), zone)
	}
	return begin + " " + end
}

func whatText(s *pb.Schedule) string {
	if s.GetToPlan() != "" {
		return "plan " + s.GetToPlan()
	}
	var parts []string
	for _, k := range slices.Sorted(maps.Keys(s.GetSet())) {
		parts = append(parts, k+" "+s.GetSet()[k])
	}
	return strings.Join(parts, ", ")
}

func whenText(s *pb.Schedule) string {
	parts := slices.Clone(s.GetWindows())
	if s.GetStart() != "" {
		parts = append(parts, "from "+s.GetStart())
	}
	if s.GetEnd() != "" {
		parts = append(parts, "until "+s.GetEnd())
	}
	return strings.Join(parts, ", ") + " " + s.GetZone()
}

// stateText returns how a schedule stands to now.
func (a *app) stateText(s *pb.Schedule) string {
	switch next := s.GetUpcoming(); {
	case s.GetPaused():
		return "paused"
	case s.GetSettled():
		return "became part of " + targetText(s.GetTarget())
	case len(next) == 0:
		return "over"
	case s.GetActive() && next[0].GetEnd() != nil:
		return "in force until " + clockIn(next[0].GetEnd().AsTime(), s.GetZone())
	case s.GetActive():
		return "in force"
	default:
		return "next " + clockIn(next[0].GetBegin().AsTime(), s.GetZone())
	}
}

func (a *app) scheduleShow() *cobra.Command {
	var n uint32
	c := &cobra.Command{
		Use:               "show ID",
		Short:             "Show one schedule, its next times, and what else sets the same",
		Args:              exactly("ID"),
		ValidArgsFunction: a.complete(scheduleIDs),
		RunE: func(c *cobra.Command, args []string) error {
			conn, err := a.connect()
			if err != nil {
				return err
			}
			resp, err := call(c.Context(), a, conn.schedules.GetSchedule, &pb.GetScheduleRequest{Id: args[0], Upcoming: n})
			if err != nil {
				return err
			}
			if a.output == "json" {
				return a.printJSON(resp)
			}
			s := resp.GetSchedule()
			t := a.table("schedule", s.GetId())
			t.row("for", targetText(s.GetTarget())+", "+count(s.GetRouters(), "router"))
			t.row("sets", whatText(s))
			t.row("when", whenText(s))
			if s.GetPriority() != 0 {
				t.row("priority", fmt.Sprint(s.GetPriority()))
			}
			t.row("state", a.stateText(s))
			for i, span := range s.GetUpcoming() {
				name := ""
				if i == 0 {
					name = "times"
				}
				t.row(name, spanText(span, s.GetZone()))
			}
			for _, x := range resp.GetConflicts() {
				t.row("conflict", conflictText(x, s.GetZone()))
			}
			t.row("revision", fmt.Sprintf("%d, %s by %s", s.GetRevision(), a.ago(s.GetUpdateTime()), orDash(s.GetAuthor())))
			return t.end(a, "")
		},
	}
	c.Flags().Uint32Var(&n, "times", 10, "how `many` of the next times to show")
	return c
}

func (a *app) scheduleList() *cobra.Command {
	return &cobra.Command{
		Use:   "list",
		Short: "Show all schedules",
		Args:  noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			conn, err := a.connect()
			if err != nil {
				return err
			}
			var all []*pb.Schedule
			for req := (&pb.ListSchedulesRequest{}); ; {
				resp, err := call(c.Context(), a, conn.schedules.ListSchedules, req)
				if err != nil {
					return err
				}
				all = append(all, resp.GetSchedules()...)
				if req.PageToken = resp.GetNextPageToken(); req.PageToken == "" {
					break
				}
			}
			if a.output == "json" {
				return a.printJSON(&pb.ListSchedulesResponse{Schedules: all})
			}
			t := a.table("SCHEDULE", "FOR", "ROUTERS", "SETS", "WHEN", "STATE")
			for _, s := range all {
				t.row(s.GetId(), targetText(s.GetTarget()), u32(s.GetRouters()), whatText(s), whenText(s), a.stateText(s))
			}
			return t.end(a, "no schedules: make one with cakefleetctl schedule set ID, see its --help")
		},
	}
}

func (a *app) schedulePause(pause bool) *cobra.Command {
	use, short := "resume", "Let a paused schedule go on"
	if pause {
		use, short = "pause", "End what a schedule does, and keep it"
	}
	return &cobra.Command{
		Use:               use + " ID",
		Short:             short,
		Args:              exactly("ID"),
		ValidArgsFunction: a.complete(scheduleIDs),
		RunE: func(c *cobra.Command, args []string) error {
			conn, err := a.connect()
			if err != nil {
				return err
			}
			got, err := call(c.Context(), a, conn.schedules.GetSchedule, &pb.GetScheduleRequest{Id: args[0]})
			if err != nil {
				return err
			}
			s := got.GetSchedule()
			s.Paused = pause
			resp, err := call(c.Context(), a, conn.schedules.UpdateSchedule, &pb.UpdateScheduleRequest{Schedule: s})
			if err != nil {
				return err
			}
			if a.output == "json" {
				return a.printJSON(resp)
			}
			fmt.Fprintf(a.cfg.Stdout, "schedule %s: %s, %s changed at once\n", args[0], a.stateText(resp.GetSchedule()), count(resp.GetAffectedRouters(), "router"))
			return nil
		},
	}
}

func (a *app) scheduleDelete() *cobra.Command {
	return &cobra.Command{
		Use:               "delete ID",
		Short:             "Remove a schedule, which ends what it does",
		Args:              exactly("ID"),
		ValidArgsFunction: a.complete(scheduleIDs),
		RunE: func(c *cobra.Command, args []string) error {
			conn, err := a.connect()
			if err != nil {
				return err
			}
			resp, err := call(c.Context(), a, conn.schedules.DeleteSchedule, &pb.DeleteScheduleRequest{Id: args[0]})
			if err != nil {
				return err
			}
			if a.output == "json" {
				return a.printJSON(resp)
			}
			fmt.Fprintf(a.cfg.Stdout, "schedule %s deleted, %s changed at once\n", args[0], count(resp.GetAffectedRouters(), "router"))
			return nil
		},
	}
}

func scheduleIDs(ctx context.Context, a *app) ([]string, error) {
	conn, err := a.connect()
	if err != nil {
		return nil, err
	}
	resp, err := conn.schedules.ListSchedules(ctx, &pb.ListSchedulesRequest{})
	var ids []string
	for _, s := range resp.GetSchedules() {
		ids = append(ids, s.GetId())
	}
	return ids, err
}
