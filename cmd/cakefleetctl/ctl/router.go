package ctl

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/wire"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

func (a *app) routerCommand() *cobra.Command {
	return group("router", "Show routers and what each of them runs",
		a.routerList(), a.routerShow(), a.routerLive(), a.routerSet(), a.routerDelete(),
		a.routerPin(), a.routerPending(), a.routerApprove(), a.routerReject(),
		a.routerProvision(), a.routerProvisioned(), a.routerUnprovision(),
		a.routerRevoke(), a.routerReadmit(), a.routerRelease())
}

// syncWords are how operators say the states.
var syncWords = map[pb.SyncState]string{
	pb.SyncState_SYNC_STATE_UNSPECIFIED: "unknown",
	pb.SyncState_SYNC_STATE_NONE:        "unshaped",
	pb.SyncState_SYNC_STATE_IN_SYNC:     "in sync",
	pb.SyncState_SYNC_STATE_PENDING:     "pending",
	pb.SyncState_SYNC_STATE_CLAMPED:     "clamped",
	pb.SyncState_SYNC_STATE_REJECTED:    "rejected",
	pb.SyncState_SYNC_STATE_OFFLINE:     "offline",
	pb.SyncState_SYNC_STATE_AHEAD:       "ahead",
}

func stateOf(r *pb.Router) string {
	switch {
	case r.GetRevocation() != nil:
		return "revoked"
	case r.GetQuarantine() != nil:
		return "quarantined"
	}
	if w, ok := syncWords[r.GetSession().GetSync()]; ok {
		return w
	}
	return r.GetSession().GetSync().String()
}

// why says why a router does not run what it should; empty if it does.
func (a *app) why(r *pb.Router) string {
	if barred := a.barred(r); barred != "" {
		return barred
	}
	rep := r.GetReported()
	switch r.GetSession().GetSync() {
	case pb.SyncState_SYNC_STATE_IN_SYNC:
		return ""
	case pb.SyncState_SYNC_STATE_REJECTED:
		if rep.GetEffective() == nil {
			return "rejected: " + rep.GetError() + "; nothing is shaped"
		}
		return "rejected: " + rep.GetError() + "; what ran before still runs"
	case pb.SyncState_SYNC_STATE_CLAMPED:
		var parts []string
		for _, c := range rep.GetClamps() {
			parts = append(parts, fmt.Sprintf("%s %s instead of %s (%s)", c.GetField(), c.GetEffective(), c.GetDesired(), c.GetReason()))
		}
		if len(parts) == 0 {
			return "clamped: runs with other values than desired"
		}
		return "clamped: " + strings.Join(parts, ", ")
	case pb.SyncState_SYNC_STATE_OFFLINE:
		if s := a.ago(r.GetSession().GetLastSeen()); s != "" {
			return "offline, last seen " + s + "; it catches up when it returns"
		}
		return "offline, not seen since this controller started; it catches up when it returns"
	case pb.SyncState_SYNC_STATE_PENDING:
		for _, c := range rep.GetConditions() {
			if (c.GetType() == "Degraded" || c.GetType() == "InterfaceUp") && c.GetStatus() != wanted(c) {
				return "pending: " + c.GetMessage()
			}
		}
		return "pending: sent and not answered yet"
	case pb.SyncState_SYNC_STATE_AHEAD:
		return fmt.Sprintf("ahead: runs revision %d, which the store does not know as it was restored from an older backup; nothing is sent until cakefleetctl doctor --accept-restore", rep.GetAppliedRevision())
	case pb.SyncState_SYNC_STATE_NONE:
		return "unshaped: " + r.GetDesired().GetReason()
	default:
		return stateOf(r)
	}
}

// wanted returns the status that a condition has when all is well.
func wanted(c *pb.Condition) bool {
	return slices.Contains([]string{"ClockOK", "StateSaved", "InterfaceUp"}, c.GetType())
}

func (a *app) listRouters(ctx context.Context, req *pb.ListRoutersRequest) ([]*pb.Router, error) {
	conn, err := a.connect()
	if err != nil {
		return nil, err
	}
	var all []*pb.Router
	for {
		resp, err := call(ctx, a, conn.routers.ListRouters, req)
		if err != nil {
			return nil, err
		}
		all = append(all, resp.GetRouters()...)
		a.silent(resp.GetSilentControllers())
		if req.PageToken = resp.GetNextPageToken(); req.PageToken == "" {
			return all, nil
		}
	}
}

// silent tells which controllers did not answer the one that was asked.
func (a *app) silent(ids []string) {
	for _, id := range ids {
		a.note("controller %s does not answer: routers that are connected to it look as if they were offline", id)
	}
}

func (a *app) routerList() *cobra.Command {
	var plan, state string
	c := &cobra.Command{
		Use:   "list [--plan NAME] [--state STATE]",
		Short: "Show all routers",
		Args:  noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			req := &pb.ListRoutersRequest{Plan: plan}
			if state != "" {
				known := false
				for s, w := range syncWords {
					if w == strings.ReplaceAll(state, "-", " ") {
						req.Sync, known = s, true
					}
				}
				if !known || req.Sync == pb.SyncState_SYNC_STATE_UNSPECIFIED {
					return fmt.Errorf("--state %q: must be in-sync, pending, clamped, rejected, offline, ahead or unshaped", state)
				}
			}
			all, err := a.listRouters(c.Context(), req)
			if err != nil {
				return err
			}
			if err := a.planExists(c.Context(), plan, len(all)); err != nil {
				return err
			}
			if a.output == "json" {
				return a.printJSON(&pb.ListRoutersResponse{Routers: all})
			}
			t := a.table("ROUTER", "SUBSCRIBER", "PLAN", "STATE", "DOWN", "UP", "SESSION", "SEEN", "MODEL")
			for _, r := range all {
				down, up := effectiveRates(r)
				session := "down"
				if r.GetSession().GetConnected() {
					session = "up"
				}
				if since := r.GetSession().GetSince(); since != nil {
					session += " " + span(a.ago(since))
				}
				t.row(r.GetId(), r.GetSubscriber(), r.GetPlan(), stateOf(r), down, up, session, a.ago(r.GetSession().GetLastSeen()), r.GetSession().GetModel())
			}
			return t.end(a, "no routers: make a join token with cakefleetctl token create --router ID")
		},
	}
	c.Flags().StringVar(&plan, "plan", "", "only those whose subscriber has this `plan`")
	c.Flags().StringVar(&state, "state", "", "only those in this `state`: in-sync, pending, clamped, rejected, offline, ahead, unshaped")
	must(c.RegisterFlagCompletionFunc("plan", a.completeFlag(planNames)))
	must(c.RegisterFlagCompletionFunc("state", cobra.FixedCompletions([]string{"in-sync", "pending", "clamped", "rejected", "offline", "ahead", "unshaped"}, cobra.ShellCompDirectiveNoFileComp)))
	return c
}

// planExists returns an error if nothing was found for a plan because there is
// none of that name.
func (a *app) planExists(ctx context.Context, name string, found int) error {
	if name == "" || found > 0 {
		return nil
	}
	conn, err := a.connect()
	if err != nil {
		return err
	}
	_, err = call(ctx, a, conn.plans.GetPlan, &pb.GetPlanRequest{Name: name})
	if isCode(err, codes.NotFound) {
		return failure{fmt.Errorf("%w: see cakefleetctl plan list", err)}
	}
	return err
}

// effectiveRates returns what was read back from a router's data plane.
func effectiveRates(r *pb.Router) (down, up string) {
	if l := linkOf(r.GetReported().GetEffective()); l != nil {
		return rateOf(l.Down), rateOf(l.Up)
	}
	return "", ""
}

// linkOf returns the link of a message; nil if there is none or this version
// can't read it.
func linkOf(m *pb.Link) *plan.Link {
	l, err := wire.ToLink(m)
	if err != nil {
		return nil
	}
	return l
}

func (a *app) routerShow() *cobra.Command {
	return &cobra.Command{
		Use:               "show ID",
		Short:             "Show what one router should run, says it runs and really runs",
		Args:              exactly("ID"),
		ValidArgsFunction: a.complete(routerIDs),
		RunE: func(c *cobra.Command, args []string) error {
			conn, err := a.connect()
			if err != nil {
				return err
			}
			resp, err := call(c.Context(), a, conn.routers.GetRouter, &pb.GetRouterRequest{Id: args[0]})
			if err != nil {
				return err
			}
			a.silent(resp.GetSilentControllers())
			if a.output == "json" {
				return a.printJSON(resp.GetRouter())
			}
			return a.showRouter(resp.GetRouter(), a.lastChange(c.Context(), resp.GetRouter()))
		},
	}
}

func (a *app) showRouter(r *pb.Router, lastChange string) error {
	s, rep, des := r.GetSession(), r.GetReported(), r.GetDesired()
	t := a.table("router", r.GetId())
	subscriber := "nobody"
	if r.GetSubscriber() != "" {
		subscriber = r.GetSubscriber()
		if r.GetPlan() != "" {
			subscriber += ", plan " + r.GetPlan()
		}
	}
	t.row("serves", subscriber)
	if l := labelsOf(r.GetLabels()); l != "" {
		t.row("labels", l)
	}
	if r.GetSerial() != "" {
		t.row("serial", r.GetSerial())
	}
	if r.GetFingerprint() != "" {
		t.row("key", r.GetFingerprint())
	}
	state := stateOf(r)
	if why := a.why(r); why != "" {
		state = why
	}
	t.row("state", state)
	for _, d := range r.GetQuarantine().GetDevices() {
		t.row("device", fmt.Sprintf("%s, boot %s, %s", d.GetAddress(), d.GetBootId(), d.GetModel()))
	}
	for _, f := range des.GetFields() {
		t.row(f.GetField(), strings.TrimSpace(fmt.Sprintf("%s, by %s %s", f.GetValue(), f.GetOwner(), f.GetSchedule()+f.GetRollout())))
	}
	if c := des.GetChanges(); c != nil {
		t.row("changes", c.AsTime().Format(time.RFC3339)+" by itself")
	}
	t.row("last change", lastChange)
	t.row("session", a.sessionLine(s))
	if s.GetAgentVersion() != "" || s.GetModel() != "" {
		t.row("agent", fmt.Sprintf("%s on %s, data plane %s, boot %s", s.GetAgentVersion(), s.GetModel(), s.GetDataplane(), s.GetBootId()))
	}
	for _, c := range rep.GetConditions() {
		if c.GetStatus() == wanted(c) {
			continue
		}
		t.row("condition", strings.TrimSuffix(fmt.Sprintf("%s is %t: %s", c.GetType(), c.GetStatus(), c.GetMessage()), ": "))
	}
	if err := t.end(a, ""); err != nil {
		return err
	}
	fmt.Fprintln(a.cfg.Stdout)

	t = a.table(" ", "DESIRED", "APPLIED", "EFFECTIVE")
	t.row("revision", revision(des.GetRevision()), revision(rep.GetAppliedRevision()), "")
	if link := des.GetEffectiveHash(); link == "" || link == des.GetHash() {
		t.row("hash", short(des.GetHash()), short(rep.GetAppliedHash()), short(rep.GetEffectiveHash()))
	} else { // its end is part of what is desired, and not of what a data plane runs
		t.row("hash", short(des.GetHash()), short(rep.GetAppliedHash()), "")
		t.row("link hash", short(link), "", short(rep.GetEffectiveHash()))
	}
	t.row("since", a.ago(des.GetSince()), a.ago(rep.GetReceivedTime()), "")
	want, runs := linkOf(des.GetLink()), linkOf(rep.GetEffective())
	// The router keeps no more of what it applied than its hash: an equal hash
	// is an equal link.
	applied := (*plan.Link)(nil)
	if rep.GetAppliedHash() == des.GetHash() {
		applied = want
	}
	for _, d := range []struct {
		name string
		of   func(*plan.Link) engine.Config
	}{
		{"down", func(l *plan.Link) engine.Config { return l.Down }},
		{"up", func(l *plan.Link) engine.Config { return l.Up }},
	} {
		cells := func(f func(engine.Config) string) []string {
			var out []string
			for _, l := range []*plan.Link{want, applied, runs} {
				cell := ""
				if l != nil {
					cell = f(d.of(l))
				}
				out = append(out, cell)
			}
			return out
		}
		t.row(append([]string{d.name}, cells(rateOf)...)...)
		opts := cells(options)
		for i := 1; i < len(opts); i++ {
			if opts[i] == opts[0] && opts[0] != "" {
				opts[i] = "same"
			}
		}
		t.row(append([]string{d.name + " options"}, opts...)...)
	}
	return t.end(a, "")
}

func (a *app) sessionLine(s *pb.SessionState) string {
	switch {
	case s.GetConnected():
		return fmt.Sprintf("connected for %s from %s, last heard %s", span(a.ago(s.GetSince())), s.GetPeer(), a.ago(s.GetLastSeen()))
	case s.GetLastSeen() != nil:
		return fmt.Sprintf("away for %s, last heard %s", span(a.ago(s.GetSince())), a.ago(s.GetLastSeen()))
	default:
		return "not connected since this controller started"
	}
}

// lastChange says which input of the desired state is the newest. It asks the
// controller; what it can't learn it leaves out.
func (a *app) lastChange(ctx context.Context, r *pb.Router) string {
	des := r.GetDesired()
	what := ""
	switch newest := des.GetRevision(); {
	case newest == 0:
		return ""
	case newest == r.GetRevision():
		what = "router " + r.GetId()
	default:
		if p, err := call(ctx, a, a.conn.plans.GetPlan, &pb.GetPlanRequest{Name: r.GetPlan()}); err == nil && p.GetPlan().GetRevision() == newest {
			what = "plan " + r.GetPlan()
		} else if s, err := call(ctx, a, a.conn.subscribers.GetSubscriber, &pb.GetSubscriberRequest{Id: r.GetSubscriber()}); err == nil && s.GetSubscriber().GetRevision() == newest {
			what = "subscriber " + r.GetSubscriber()
		}
	}
	line := fmt.Sprintf("revision %d", des.GetRevision())
	if what != "" {
		line = what + ", " + line
	}
	if when := a.ago(des.GetSince()); when != "" {
		line += ", " + when
	}
	return line
}

func (a *app) routerSet() *cobra.Command {
	var subscriber string
	var wait waitFlags
	c := &cobra.Command{
		Use:               "set ID --subscriber ID",
		Short:             "Say whom a router serves; an empty subscriber is nobody",
		Args:              exactly("ID"),
		ValidArgsFunction: a.complete(routerIDs),
		RunE: func(c *cobra.Command, args []string) error {
			conn, err := a.connect()
			if err != nil {
				return err
			}
			old, err := call(c.Context(), a, conn.routers.GetRouter, &pb.GetRouterRequest{Id: args[0]})
			if err != nil {
				return err
			}
			began := time.Now()
			resp, err := call(c.Context(), a, conn.routers.UpdateRouter, &pb.UpdateRouterRequest{
				Router: &pb.Router{Id: args[0], Subscriber: subscriber, Revision: old.GetRouter().GetRevision()},
			})
			if err != nil {
				return err
			}
			r := resp.GetRouter()
			if a.output == "json" {
				if err := a.printJSON(r); err != nil {
					return err
				}
			} else {
				serves := "serves nobody now"
				if subscriber != "" {
					serves = "serves " + subscriber + " now"
				}
				fmt.Fprintf(a.cfg.Stdout, "router %s %s: revision %d\n", r.GetId(), serves, r.GetRevision())
			}
			return a.await(c.Context(), wait, began, target{revision: r.GetRevision(), routers: 1, list: a.theseRouters(args)})
		},
	}
	c.Flags().StringVar(&subscriber, "subscriber", "", "`subscriber` that it serves")
	must(c.Flags().SetAnnotation("subscriber", mayBeEmpty, nil))
	must(c.MarkFlagRequired("subscriber"))
	must(c.RegisterFlagCompletionFunc("subscriber", a.completeFlag(subscriberIDs)))
	wait.add(c.Flags(), false)
	return c
}

func (a *app) routerDelete() *cobra.Command {
	return &cobra.Command{
		Use:               "delete ID",
		Short:             "Remove a router; its certificate is refused from then on",
		Args:              exactly("ID"),
		ValidArgsFunction: a.complete(routerIDs),
		RunE: func(c *cobra.Command, args []string) error {
			conn, err := a.connect()
			if err != nil {
				return err
			}
			resp, err := call(c.Context(), a, conn.routers.DeleteRouter, &pb.DeleteRouterRequest{Id: args[0]})
			if err != nil {
				return err
			}
			if a.output == "json" {
				return a.printJSON(resp)
			}
			fmt.Fprintf(a.cfg.Stdout, "router %s deleted; to bring it back, make it a join token\n", args[0])
			return nil
		},
	}
}

// revision returns a revision; empty for none.
func revision(n int64) string {
	if n == 0 {
		return ""
	}
	return strconv.FormatInt(n, 10)
}

// short returns enough of a hash to compare by eye.
func short(hash string) string { return hash[:min(len(hash), 8)] }

// when returns a time in full, for what is in the future.
func when(m *timestamppb.Timestamp) string {
	if m == nil {
		return ""
	}
	return m.AsTime().UTC().Format("2006-01-02 15:04 UTC")
}
