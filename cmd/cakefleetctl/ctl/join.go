package ctl

import (
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/cakefleet/cakefleet/controller/subimport"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// barred says why a router is kept out; empty if it is not.
func (a *app) barred(r *pb.Router) string {
	switch v, q := r.GetRevocation(), r.GetQuarantine(); {
	case v != nil:
		text := "revoked " + a.ago(v.GetTime())
		if v.GetOperator() != "" {
			text += " by " + v.GetOperator()
		}
		if v.GetReason() != "" {
			text += ": " + v.GetReason()
		}
		return text + "; what ran before still runs"
	case q != nil:
		return "quarantined " + a.ago(q.GetTime()) + ": two devices have its key; take one away, then cakefleetctl router release " + r.GetId()
	}
	return ""
}

// labelsOf returns labels as they are given.
func labelsOf(labels map[string]string) string {
	var all []string
	for k, v := range labels {
		all = append(all, k+"="+v)
	}
	slices.Sort(all)
	return strings.Join(all, " ")
}

func (a *app) routerPin() *cobra.Command {
	return &cobra.Command{
		Use:   "pin",
		Short: "Print what a router without a token needs to know this fleet: cakefleet-agent --ca-pin",
		Args:  noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			conn, err := a.connect()
			if err != nil {
				return err
			}
			resp, err := call(c.Context(), a, conn.joins.GetAuthority, &pb.GetAuthorityRequest{})
			if err != nil {
				return err
			}
			if a.output == "json" {
				return a.printJSON(resp)
			}
			fmt.Fprintln(a.cfg.Stdout, resp.GetPin())
			if resp.GetWarning() != "" {
				a.note("warning: %s", resp.GetWarning())
			}
			return nil
		},
	}
}

func (a *app) routerPending() *cobra.Command {
	return &cobra.Command{
		Use:   "pending",
		Short: "Show routers that ask to join and wait for approve or reject",
		Long: `Show routers that ask to join and wait for approve or reject.

A router without a join token that was given the fleet's pin (cakefleet-agent
--ca-pin) waits here. What it says of itself is not proven: compare the key with
what cakefleet-agent --print-key says on the router. The list is of the
controller that is asked, and of who has asked it in the last 15 minutes.`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			conn, err := a.connect()
			if err != nil {
				return err
			}
			resp, err := call(c.Context(), a, conn.joins.ListPending, &pb.ListPendingRequest{})
			if err != nil {
				return err
			}
			if a.output == "json" {
				return a.printJSON(resp)
			}
			t := a.table("KEY", "SERIAL", "MODEL", "ADDRESS", "SINCE", "SEEN", "ANNOUNCED")
			for _, p := range resp.GetPending() {
				t.row(p.GetFingerprint()[:min(16, len(p.GetFingerprint()))], p.GetSerial(), p.GetModel(), p.GetAddress(), a.ago(p.GetSince()), a.ago(p.GetLastSeen()), announced(p))
			}
			if n := resp.GetRefused(); n > 0 {
				a.note("%s turned away because the queue was full", count(n, "request"))
			}
			return t.end(a, "nobody waits at this controller")
		},
	}
}

// announced says what is known of a serial.
func announced(p *pb.PendingRouter) string {
	x := p.GetProvisioned()
	switch {
	case x != nil && x.GetFingerprint() != "":
		return "as " + x.GetRouterId() + " with ANOTHER KEY"
	case x != nil && x.GetSubscriber() != "":
		return "as " + x.GetRouterId() + " for " + x.GetSubscriber()
	case x != nil:
		return "as " + x.GetRouterId()
	case p.GetKnownRouterId() != "":
		return "no; serial of router " + p.GetKnownRouterId()
	}
	return "no"
}

func (a *app) routerApprove() *cobra.Command {
	var router, subscriber string
	var labels []string
	var replace bool
	c := &cobra.Command{
		Use:   "approve KEY [--router ID] [--subscriber ID] [--label KEY=VALUE]... [--replace]",
		Short: "Let a router that waits join; KEY is its fingerprint or the first 8 digits or more",
		Long: `Let a router that waits join. KEY is its fingerprint, or the first 8 digits or
more of it. If its serial is announced, id, subscriber and labels are known.

With --replace the device takes the place of the router of that id, whose key
opens nothing then: for a router that was exchanged or has lost its flash.`,
		Args: exactly("KEY"),
		RunE: func(c *cobra.Command, args []string) error {
			labelled, err := parseLabels(labels)
			if err != nil {
				return err
			}
			conn, err := a.connect()
			if err != nil {
				return err
			}
			resp, err := call(c.Context(), a, conn.joins.Approve, &pb.ApproveRequest{
				Fingerprint: args[0], RouterId: router, Subscriber: subscriber, Labels: labelled, Replace: replace,
			})
			if err != nil {
				return err
			}
			if a.output == "json" {
				return a.printJSON(resp)
			}
			serves := "nobody yet"
			if resp.GetSubscriber() != "" {
				serves = resp.GetSubscriber()
			}
			fmt.Fprintf(a.cfg.Stdout, "router %s approved, serves %s; it comes when it asks next, within a minute\n", resp.GetRouterId(), serves)
			return nil
		},
	}
	c.Flags().StringVar(&router, "router", "", "`id` that the router gets")
	c.Flags().StringVar(&subscriber, "subscriber", "", "`subscriber` that it will serve")
	c.Flags().StringArrayVar(&labels, "label", nil, "free `key=value` of the router, such as batch=7; may be repeated")
	c.Flags().BoolVar(&replace, "replace", false, "take the place of a router that has another key")
	must(c.RegisterFlagCompletionFunc("subscriber", a.completeFlag(subscriberIDs)))
	return c
}

func (a *app) routerReject() *cobra.Command {
	var reason string
	c := &cobra.Command{
		Use:   "reject KEY [--reason TEXT]",
		Short: "Refuse a router that waits, for good; router readmit --key takes it back",
		Args:  exactly("KEY"),
		RunE: func(c *cobra.Command, args []string) error {
			conn, err := a.connect()
			if err != nil {
				return err
			}
			resp, err := call(c.Context(), a, conn.joins.Reject, &pb.RejectRequest{Fingerprint: args[0], Reason: reason})
			if err != nil {
				return err
			}
			if a.output == "json" {
				return a.printJSON(resp)
			}
			fmt.Fprintf(a.cfg.Stdout, "key %s rejected\n", resp.GetFingerprint())
			return nil
		},
	}
	c.Flags().StringVar(&reason, "reason", "", "`why`; the router is told")
	return c
}

func (a *app) routerProvision() *cobra.Command {
	var x pb.ProvisionedRouter
	var file string
	var labels []string
	c := &cobra.Command{
		Use:   "provision SERIAL [--router ID] [--subscriber ID] [--label KEY=VALUE]... [--fingerprint KEY] | provision --file FILE",
		Short: "Announce routers by their serial numbers before they are there",
		Long: `Announce routers by their serial numbers before they are there.

With the fingerprint of its key, which cakefleet-agent --print-key prints where
routers are prepared, a router joins by itself. Without one it waits in router
pending with what is announced, and approve KEY is all there is to do: a serial
is printed on the box and easy to guess, so that it proves nothing.

FILE is CSV with a line of column names: serial, router, subscriber and
fingerprint, of which serial is needed; every other column is a label. - is
standard input. Lines that are wrong are listed and the others are taken.`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			if (len(args) == 1) == (file != "") {
				return errors.New("router provision: either SERIAL or --file FILE is needed")
			}
			var lines []provisionLine
			var wrong []string
			var err error
			if file != "" {
				if c.Flags().NFlag() > 1 && (x.RouterId != "" || x.Subscriber != "" || x.Fingerprint != "" || len(labels) > 0) {
					return errors.New("--file: the file says who is who; the other flags are for one serial")
				}
				lines, wrong, err = readProvision(file, "serial")
				if err != nil {
					return failure{err}
				}
			} else {
				x.Serial = args[0]
				if x.Labels, err = parseLabels(labels); err != nil {
					return err
				}
				lines = []provisionLine{{router: &x}}
			}
			return a.provision(c, lines, wrong)
		},
	}
	c.Flags().StringVar(&file, "file", "", "`file` with many, - for standard input")
	c.Flags().StringVar(&x.RouterId, "router", "", "`id` that the router gets; the serial in lower case if left out")
	c.Flags().StringVar(&x.Subscriber, "subscriber", "", "`subscriber` that it will serve")
	c.Flags().StringVar(&x.Fingerprint, "fingerprint", "", "`key` that joins at once, as cakefleet-agent --print-key says")
	c.Flags().StringArrayVar(&labels, "label", nil, "free `key=value` of the router, such as batch=7; may be repeated")
	must(c.RegisterFlagCompletionFunc("subscriber", a.completeFlag(subscriberIDs)))
	return c
}

// provisionLine is a router with where it is in the file.
type provisionLine struct {
	line   int // 0: it is not from a file
	router *pb.ProvisionedRouter
}

// provisionBatch is how many routers go in one request.
const provisionBatch = 200

// provision announces routers; wrong are lines that could not be read.
func (a *app) provision(c *cobra.Command, lines []provisionLine, wrong []string) error {
	conn, err := a.connect()
	if err != nil {
		return err
	}
	all := &pb.ProvisionResponse{}
	taken := 0
	for batch := range slices.Chunk(lines, provisionBatch) {
		req := &pb.ProvisionRequest{}
		for _, l := range batch {
			req.Routers = append(req.Routers, l.router)
		}
		resp, err := call(c.Context(), a, conn.joins.Provision, req)
		if err != nil {
			if taken > 0 {
				a.note("%s announced before this; doing it again does no harm", count(taken, "router"))
			}
			return err
		}
		for i, text := range resp.GetErrors() {
			switch {
			case text == "":
				taken++
			case batch[i].line == 0:
				wrong = append(wrong, text)
			default:
				wrong = append(wrong, fmt.Sprintf("line %d: %s", batch[i].line, text))
			}
		}
		all.Errors = append(all.Errors, resp.GetErrors()...)
	}
	if a.output == "json" {
		if err := a.printJSON(all); err != nil {
			return err
		}
	} else {
		fmt.Fprintf(a.cfg.Stdout, "%s announced\n", count(taken, "router"))
	}
	for _, text := range wrong {
		a.note("%s", text)
	}
	if len(wrong) > 0 {
		return failure{fmt.Errorf("%s not announced", count(len(wrong), "router"))}
	}
	return nil
}

// maxProvisionFile bounds a file, bytes.
const maxProvisionFile = 64 << 20

// readProvision reads a file of routers that the column by names.
func readProvision(path, by string) (lines []provisionLine, wrong []string, err error) {
	f := os.Stdin
	if path != "-" {
		if f, err = os.Open(path); err != nil {
			return nil, nil, err
		}
		defer func() { _ = f.Close() }() // it was only read
	}
	raw, err := io.ReadAll(io.LimitReader(f, maxProvisionFile+1))
	if err != nil {
		return nil, nil, err
	}
	if len(raw) > maxProvisionFile {
		return nil, nil, fmt.Errorf("%s: more than %d bytes", path, maxProvisionFile)
	}
	text, err := subimport.Text(raw)
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", path, err)
	}
	lines, wrong, err = parseProvision(text, by)
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", path, err)
	}
	return lines, wrong, nil
}

// parseProvision reads CSV. wrong says of lines what is wrong with them.
func parseProvision(text, by string) (lines []provisionLine, wrong []string, err error) {
	head, _, _ := strings.Cut(text, "\n")
	r := csv.NewReader(strings.NewReader(text))
	if !strings.Contains(head, ",") && strings.Contains(head, ";") {
		r.Comma = ';'
	}
	r.FieldsPerRecord = -1
	names, err := r.Read()
	if errors.Is(err, io.EOF) {
		return nil, nil, errors.New("is empty")
	}
	if err != nil {
		return nil, nil, err
	}
	for i := range names {
		names[i] = strings.ToLower(strings.TrimSpace(names[i]))
		switch {
		case names[i] == "":
			return nil, nil, fmt.Errorf("line 1: column %d has no name", i+1)
		case slices.Contains(names[:i], names[i]):
			return nil, nil, fmt.Errorf("line 1: two columns are named %s", names[i])
		}
	}
	if !slices.Contains(names, by) {
		return nil, nil, fmt.Errorf("line 1: no column is named %s; the columns are %s", by, strings.Join(names, ", "))
	}
	seen := map[string]int{}
	for {
		fields, err := r.Read()
		if errors.Is(err, io.EOF) {
			return lines, wrong, nil
		}
		if err != nil {
			return nil, nil, err // what follows can't be told apart
		}
		line, _ := r.FieldPos(0)
		if len(fields) != len(names) {
			wrong = append(wrong, fmt.Sprintf("line %d: %d fields, not %d", line, len(fields), len(names)))
			continue
		}
		x := provisioned(names, fields)
		id := x.Serial
		if by == "router" {
			id = x.RouterId
		}
		if before := seen[id]; before != 0 {
			wrong = append(wrong, fmt.Sprintf("line %d: %s %s is in line %d too", line, by, id, before))
			continue
		}
		seen[id] = line
		lines = append(lines, provisionLine{line, x})
	}
}

func provisioned(names, fields []string) *pb.ProvisionedRouter {
	x := &pb.ProvisionedRouter{Labels: map[string]string{}}
	for i, name := range names {
		v := strings.TrimSpace(fields[i])
		switch name {
		case "serial":
			x.Serial = v
		case "router":
			x.RouterId = v
		case "subscriber":
			x.Subscriber = v
		case "fingerprint":
			x.Fingerprint = v
		default:
			if v != "" {
				x.Labels[name] = v
			}
		}
	}
	return x
}

func (a *app) routerProvisioned() *cobra.Command {
	return &cobra.Command{
		Use:   "provisioned",
		Short: "Show the routers that are announced and have not joined yet",
		Args:  noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			conn, err := a.connect()
			if err != nil {
				return err
			}
			var all []*pb.ProvisionedRouter
			for req := (&pb.ListProvisionedRequest{}); ; {
				resp, err := call(c.Context(), a, conn.joins.ListProvisioned, req)
				if err != nil {
					return err
				}
				all = append(all, resp.GetRouters()...)
				if req.PageToken = resp.GetNextPageToken(); req.PageToken == "" {
					break
				}
			}
			if a.output == "json" {
				return a.printJSON(&pb.ListProvisionedResponse{Routers: all})
			}
			t := a.table("SERIAL", "ROUTER", "SUBSCRIBER", "LABELS", "JOINS")
			for _, x := range all {
				how := "when approved"
				if x.GetFingerprint() != "" {
					how = "with key " + x.GetFingerprint()[:min(16, len(x.GetFingerprint()))]
				}
				t.row(x.GetSerial(), x.GetRouterId(), x.GetSubscriber(), labelsOf(x.GetLabels()), how)
			}
			return t.end(a, "no routers are announced")
		},
	}
}

func (a *app) routerUnprovision() *cobra.Command {
	return &cobra.Command{
		Use:   "unprovision SERIAL",
		Short: "Take an announcement back",
		Args:  exactly("SERIAL"),
		RunE: func(c *cobra.Command, args []string) error {
			conn, err := a.connect()
			if err != nil {
				return err
			}
			resp, err := call(c.Context(), a, conn.joins.Unprovision, &pb.UnprovisionRequest{Serial: args[0]})
			if err != nil {
				return err
			}
			if a.output == "json" {
				return a.printJSON(resp)
			}
			fmt.Fprintf(a.cfg.Stdout, "serial %s is not announced any more\n", args[0])
			return nil
		},
	}
}

func (a *app) routerRevoke() *cobra.Command {
	var reason string
	c := &cobra.Command{
		Use:   "revoke ID [--reason TEXT]",
		Short: "Refuse a router's key from now on and end its session; it goes on shaping as it does",
		Long: `Refuse a router's key from now on and end its session, at every controller.
The customer stays shaped with what ran last. The key is refused also after the
router was deleted, and its join tokens end.

  cakefleetctl router readmit ID          the same device may come back as it is
  cakefleetctl token create --router ID   another device, or this one with a new key`,
		Args:              exactly("ID"),
		ValidArgsFunction: a.complete(routerIDs),
		RunE: func(c *cobra.Command, args []string) error {
			conn, err := a.connect()
			if err != nil {
				return err
			}
			resp, err := call(c.Context(), a, conn.routers.RevokeRouter, &pb.RevokeRouterRequest{Id: args[0], Reason: reason})
			if err != nil {
				return err
			}
			if a.output == "json" {
				return a.printJSON(resp.GetRouter())
			}
			fmt.Fprintf(a.cfg.Stdout, "router %s revoked; it stays shaped as it is\n", args[0])
			return nil
		},
	}
	c.Flags().StringVar(&reason, "reason", "", "`why`; the router is told")
	return c
}

func (a *app) routerReadmit() *cobra.Command {
	var key string
	c := &cobra.Command{
		Use:               "readmit ID | readmit --key FINGERPRINT",
		Short:             "Take a revocation or a rejection back; the router returns within a minute or two",
		Args:              cobra.MaximumNArgs(1),
		ValidArgsFunction: a.complete(routerIDs),
		RunE: func(c *cobra.Command, args []string) error {
			if (len(args) == 1) == (key != "") {
				return errors.New("router readmit: either ID or --key FINGERPRINT is needed")
			}
			req := &pb.ReadmitRouterRequest{Fingerprint: key}
			what := "key " + key
			if key == "" {
				req.Id, what = args[0], "router "+args[0]
			}
			conn, err := a.connect()
			if err != nil {
				return err
			}
			resp, err := call(c.Context(), a, conn.routers.ReadmitRouter, req)
			if err != nil {
				return err
			}
			if a.output == "json" {
				return a.printJSON(resp)
			}
			fmt.Fprintf(a.cfg.Stdout, "%s readmitted\n", what)
			return nil
		},
	}
	c.Flags().StringVar(&key, "key", "", "`fingerprint` of a key of which no router is left")
	return c
}

func (a *app) routerRelease() *cobra.Command {
	return &cobra.Command{
		Use:   "release ID",
		Short: "End the quarantine of a router of which there were two",
		Long: `End the quarantine of a router of which there were two. Before that, take one
of the two away, or give the right one a key of its own: with a new join token
(token create --router ID) the router gets one, and the other is refused.
While both live, the quarantine begins again.`,
		Args:              exactly("ID"),
		ValidArgsFunction: a.complete(routerIDs),
		RunE: func(c *cobra.Command, args []string) error {
			conn, err := a.connect()
			if err != nil {
				return err
			}
			resp, err := call(c.Context(), a, conn.routers.ReleaseRouter, &pb.ReleaseRouterRequest{Id: args[0]})
			if err != nil {
				return err
			}
			if a.output == "json" {
				return a.printJSON(resp.GetRouter())
			}
			fmt.Fprintf(a.cfg.Stdout, "router %s released\n", args[0])
			return nil
		},
	}
}
