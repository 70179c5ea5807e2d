package ctl

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/wire"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

func (a *app) subscriberCommand() *cobra.Command {
	return group("subscriber", "Say who is served with which plan",
		a.subscriberSet(), a.subscriberGet(), a.subscriberList(), a.subscriberDelete(), a.subscriberImport())
}

func (a *app) subscriberSet() *cobra.Command {
	var name string
	var labels []string
	var wait waitFlags
	c := &cobra.Command{
		Use:   "set ID [--plan NAME] [--label KEY=VALUE]...",
		Short: "Make a subscriber or change its plan and labels",
		Long: `Make a subscriber or change its plan and labels. What is not said stays as it
is; --label KEY= removes a label.`,
		Args:              exactly("ID"),
		ValidArgsFunction: a.complete(subscriberIDs),
		RunE: func(c *cobra.Command, args []string) error {
			return a.setSubscriber(c.Context(), args[0], name, labels, wait)
		},
	}
	c.Flags().StringVar(&name, "plan", "", "`plan` that it gets")
	c.Flags().StringArrayVar(&labels, "label", nil, "free `key=value`, such as site=north; may be repeated")
	must(c.RegisterFlagCompletionFunc("plan", a.completeFlag(planNames)))
	wait.add(c.Flags(), false)
	return c
}

func (a *app) setSubscriber(ctx context.Context, id, name string, labels []string, wait waitFlags) error {
	if err := plan.ValidateID("subscriber", id); err != nil {
		return err
	}
	conn, err := a.connect()
	if err != nil {
		return err
	}
	s := plan.Subscriber{ID: id}
	old, err := call(ctx, a, conn.subscribers.GetSubscriber, &pb.GetSubscriberRequest{Id: id})
	isNew := isCode(err, codes.NotFound)
	switch {
	case isNew && name == "":
		return fmt.Errorf("subscriber %s is new: say --plan NAME", id)
	case isNew:
	case err != nil:
		return err
	default:
		s = wire.ToSubscriber(old.GetSubscriber())
	}
	before := s
	before.Labels = maps.Clone(s.Labels)
	if name != "" {
		s.Plan = name
	}
	for _, l := range labels {
		k, v, ok := strings.Cut(l, "=")
		if !ok {
			return fmt.Errorf("--label %q: must be KEY=VALUE", l)
		}
		if s.Labels == nil {
			s.Labels = map[string]string{}
		}
		s.Labels[k] = v
		if v == "" {
			delete(s.Labels, k)
		}
	}
	if err := s.Validate(); err != nil {
		return err
	}
	began := time.Now()
	resp, err := call(ctx, a, conn.subscribers.UpdateSubscriber, &pb.UpdateSubscriberRequest{Subscriber: wire.FromSubscriber(s), AllowMissing: isNew})
	if err != nil {
		return err
	}
	m := resp.GetSubscriber()
	switch {
	case a.output == "json":
		if err := a.printJSON(resp); err != nil {
			return err
		}
	case !resp.GetChanged():
		fmt.Fprintf(a.cfg.Stdout, "subscriber %s: nothing changes, it is so already (revision %d)\n", id, m.GetRevision())
	default:
		did := "changed"
		if isNew {
			did = "made"
		}
		fmt.Fprintf(a.cfg.Stdout, "subscriber %s %s: revision %d, %s affected\n", id, did, m.GetRevision(), count(len(m.GetRouters()), "router"))
		if before.Plan != s.Plan && !isNew {
			fmt.Fprintf(a.cfg.Stdout, "  plan    %s -> %s\n", before.Plan, s.Plan)
		}
		if was, is := labelText(before.Labels), labelText(s.Labels); was != is && !isNew {
			fmt.Fprintf(a.cfg.Stdout, "  labels  %s -> %s\n", orDash(was), orDash(is))
		}
	}
	if !resp.GetChanged() || len(m.GetRouters()) == 0 {
		return nil
	}
	return a.await(ctx, wait, began, target{revision: m.GetRevision(), routers: uint32(len(m.GetRouters())), list: a.theseRouters(m.GetRouters())})
}

func (a *app) subscriberGet() *cobra.Command {
	return &cobra.Command{
		Use:               "get ID",
		Short:             "Show one subscriber",
		Args:              exactly("ID"),
		ValidArgsFunction: a.complete(subscriberIDs),
		RunE: func(c *cobra.Command, args []string) error {
			conn, err := a.connect()
			if err != nil {
				return err
			}
			resp, err := call(c.Context(), a, conn.subscribers.GetSubscriber, &pb.GetSubscriberRequest{Id: args[0]})
			if err != nil {
				return err
			}
			s := resp.GetSubscriber()
			if a.output == "json" {
				return a.printJSON(s)
			}
			t := a.table("subscriber", s.GetId())
			t.row("plan", s.GetPlan())
			t.row("labels", labelText(s.GetLabels()))
			a.layerRows(s.GetLayers(), t.row)
			t.row("routers", strings.Join(s.GetRouters(), ", "))
			t.row("revision", fmt.Sprintf("%d, %s", s.GetRevision(), a.ago(s.GetUpdateTime())))
			return t.end(a, "")
		},
	}
}

func (a *app) subscriberList() *cobra.Command {
	var name string
	c := &cobra.Command{
		Use:   "list [--plan NAME]",
		Short: "Show all subscribers",
		Args:  noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			conn, err := a.connect()
			if err != nil {
				return err
			}
			// Page by page: a fleet may have a million.
			all := func(yield func(*pb.Subscriber, error) bool) {
				for req := (&pb.ListSubscribersRequest{Plan: name, PageSize: 5000}); ; {
					resp, err := call(c.Context(), a, conn.subscribers.ListSubscribers, req)
					if err != nil {
						yield(nil, err)
						return
					}
					for _, s := range resp.GetSubscribers() {
						if !yield(s, nil) {
							return
						}
					}
					if req.PageToken = resp.GetNextPageToken(); req.PageToken == "" {
						return
					}
				}
			}
			if a.output == "json" {
				return printJSONList(a, "subscribers", all)
			}
			t := a.table("SUBSCRIBER", "PLAN", "ROUTERS", "LABELS", "CHANGED")
			n := 0
			for s, err := range all {
				if err != nil {
					return err
				}
				n++
				t.row(s.GetId(), s.GetPlan(), strings.Join(s.GetRouters(), ","), labelText(s.GetLabels()), a.ago(s.GetUpdateTime()))
			}
			if err := a.planExists(c.Context(), name, n); err != nil {
				return err
			}
			return t.end(a, "no subscribers: make one with cakefleetctl subscriber set ID --plan NAME, or import a CSV file")
		},
	}
	c.Flags().StringVar(&name, "plan", "", "only those of this `plan`")
	must(c.RegisterFlagCompletionFunc("plan", a.completeFlag(planNames)))
	return c
}

func (a *app) subscriberDelete() *cobra.Command {
	return &cobra.Command{
		Use:               "delete ID",
		Short:             "Remove a subscriber that no router serves",
		Args:              exactly("ID"),
		ValidArgsFunction: a.complete(subscriberIDs),
		RunE: func(c *cobra.Command, args []string) error {
			conn, err := a.connect()
			if err != nil {
				return err
			}
			resp, err := call(c.Context(), a, conn.subscribers.DeleteSubscriber, &pb.DeleteSubscriberRequest{Id: args[0]})
			if isCode(err, codes.FailedPrecondition) {
				return failure{errors.Join(err, errors.New("free its routers first: cakefleetctl router set ID --subscriber ''"))}
			}
			if err != nil {
				return err
			}
			if a.output == "json" {
				return a.printJSON(resp)
			}
			fmt.Fprintf(a.cfg.Stdout, "subscriber %s deleted\n", args[0])
			return nil
		},
	}
}

func (a *app) subscriberImport() *cobra.Command {
	options := &pb.ImportSubscribersRequest{}
	c := &cobra.Command{
		Use:   "import FILE [--dry-run] [--remove-missing] [--keep-going] [--allow-mass-change]",
		Short: "Make the subscribers like a CSV or JSON file, or tell what would change",
		Long: `Make the subscribers like a file, all at once: routers see them as they were or
as the file says, whatever happens meanwhile. - is standard input.

In a table the first line names the columns, of which id and plan are needed and
every other one is a label:

  id,plan,site
  10001,gold,north

JSON is a list:

  [{"id": "10001", "plan": "gold", "labels": {"site": "north"}}]

A bad line leaves everything as it was and every bad line is listed; with
--keep-going the good ones are stored. A file that changes or removes more than
20 % of the subscribers is held back unless --allow-mass-change says that it is
meant.`,
		Args: exactly("FILE"),
		RunE: func(c *cobra.Command, args []string) error {
			if options.GetMassChangePercent() < 1 || options.GetMassChangePercent() > 100 {
				return fmt.Errorf("--mass-change %d: must be 1 to 100 per cent", options.GetMassChangePercent())
			}
			return a.importSubscribers(c.Context(), c.InOrStdin(), args[0], options)
		},
	}
	f := c.Flags()
	f.BoolVar(&options.DryRun, "dry-run", false, "only tell what would change")
	f.BoolVar(&options.RemoveMissing, "remove-missing", false, "remove subscribers that the file does not have")
	f.BoolVar(&options.KeepGoing, "keep-going", false, "store good lines although others are bad")
	f.BoolVar(&options.AllowMassChange, "allow-mass-change", false, "store it however many subscribers it changes or removes")
	f.Uint32Var(&options.MassChangePercent, "mass-change", 20, "share of the subscribers, in `per cent`, above which the file is held back")
	return c
}

func (a *app) importSubscribers(ctx context.Context, stdin io.Reader, path string, options *pb.ImportSubscribersRequest) error {
	in := stdin
	if path != "-" {
		f, err := os.Open(path)
		if err != nil {
			return failure{fmt.Errorf("import: %w", err)}
		}
		defer func() { _ = f.Close() }() // it was only read
		in = f
	}
	conn, err := a.connect()
	if err != nil {
		return err
	}
	stream, err := conn.subscribers.ImportSubscribers(ctx)
	if err != nil {
		return a.explain(err)
	}
	for first := true; ; first = false {
		chunk := make([]byte, 64<<10) // a message owns its bytes until it is sent
		n, err := io.ReadFull(in, chunk)
		ended := errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
		if err != nil && !ended {
			return failure{fmt.Errorf("import %s: %w", path, err)}
		}
		if n > 0 || first {
			// The end of the stream is told by CloseAndRecv, with its reason.
			m := &pb.ImportSubscribersRequest{}
			if first {
				proto.Merge(m, options)
			}
			m.Chunk = chunk[:n]
			if stream.Send(m) != nil {
				break
			}
		}
		if ended {
			break
		}
	}
	resp, err := stream.CloseAndRecv()
	if err != nil {
		return a.explain(err)
	}
	if a.output == "json" {
		if err := a.printJSON(resp); err != nil {
			return err
		}
	} else {
		a.tellImport(path, resp, options.GetDryRun())
	}
	if len(resp.GetErrors()) > 0 || resp.GetHeld() != "" {
		return failure{}
	}
	return nil
}

func (a *app) tellImport(path string, resp *pb.ImportSubscribersResponse, dryRun bool) {
	out := a.cfg.Stdout
	if bad := resp.GetErrors(); len(bad) > 0 {
		for _, e := range bad {
			where := path
			if e.GetLine() > 0 { // 0: the file as a whole
				where += fmt.Sprintf(":%d", e.GetLine())
			}
			if e.GetRecord() > 0 {
				where += fmt.Sprintf(" (record %d)", e.GetRecord())
			}
			if e.GetColumn() != "" {
				where += ": " + e.GetColumn()
			}
			fmt.Fprintf(out, "%s: %s\n", where, e.GetMessage())
		}
		if resp.GetAdded()+resp.GetChanged()+resp.GetRemoved()+resp.GetUnchanged() == 0 {
			fmt.Fprintf(out, "%s; nothing is stored\n", count(len(bad), "bad line"))
			return
		}
		fmt.Fprintf(out, "%s left out\n", count(len(bad), "bad line"))
	}
	signs := map[pb.ImportChange_Kind]string{pb.ImportChange_KIND_ADDED: "+", pb.ImportChange_KIND_CHANGED: "~", pb.ImportChange_KIND_REMOVED: "-"}
	for _, c := range resp.GetChanges() {
		switch c.GetKind() {
		case pb.ImportChange_KIND_CHANGED:
			fmt.Fprintf(out, "%s %s  %s -> %s\n", signs[c.GetKind()], c.GetId(), c.GetBefore(), c.GetAfter())
		default:
			fmt.Fprintf(out, "%s %s  %s\n", signs[c.GetKind()], c.GetId(), c.GetBefore()+c.GetAfter())
		}
	}
	total := resp.GetAdded() + resp.GetChanged() + resp.GetRemoved()
	if hidden := int(total) - len(resp.GetChanges()); hidden > 0 {
		fmt.Fprintf(out, "and %s\n", count(hidden, "more change"))
	}
	end := "stored"
	switch {
	case resp.GetHeld() != "":
		end = "HELD, nothing is stored: " + resp.GetHeld() + "; if it is meant, say --allow-mass-change"
	case dryRun:
		end = "nothing is stored (dry run)"
	case total == 0:
		end = "nothing to store"
	case !resp.GetApplied():
		end = "NOT stored"
	}
	fmt.Fprintf(out, "%d added, %d changed, %d removed, %d unchanged: %s\n", resp.GetAdded(), resp.GetChanged(), resp.GetRemoved(), resp.GetUnchanged(), end)
}

func labelText(labels map[string]string) string {
	var parts []string
	for _, k := range slices.Sorted(maps.Keys(labels)) {
		parts = append(parts, k+"="+labels[k])
	}
	return strings.Join(parts, ",")
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}
