package ctl

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/timestamppb"

	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

func (a *app) auditCommand() *cobra.Command {
	return group("audit", "See who changed what", a.auditList())
}

func (a *app) auditList() *cobra.Command {
	var who, what, since string
	var most int
	c := &cobra.Command{
		Use:   "list [--who OPERATOR] [--what KIND[/ID]] [--since 24h] [--most 100]",
		Short: "Show who changed what, newest first",
		Long: `Show who changed what, newest first.

  cakefleetctl audit list --what plan/gold
  cakefleetctl audit list --who alice --since 2026-11-30T08:00:00Z

What the first column names, cakefleetctl undo takes back.`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if most < 1 {
				return fmt.Errorf("--most %d: must be 1 or more", most)
			}
			req := &pb.ListAuditEntriesRequest{Who: who, What: what}
			if since != "" {
				at, err := a.past(since)
				if err != nil {
					return err
				}
				req.Since = timestamppb.New(at)
			}
			conn, err := a.connect()
			if err != nil {
				return err
			}
			var all []*pb.AuditEntry
			more := false
			for len(all) < most {
				req.PageSize = uint32(min(most-len(all), 1000))
				resp, err := call(c.Context(), a, conn.audit.ListAuditEntries, req)
				if err != nil {
					return err
				}
				all = append(all, resp.GetEntries()...)
				req.PageToken = resp.GetNextPageToken()
				if more = req.PageToken != ""; !more {
					break
				}
			}
			if a.output == "json" {
				return a.printJSON(&pb.ListAuditEntriesResponse{Entries: all, NextPageToken: req.GetPageToken()})
			}
			t := a.table("CHANGE", "WHEN", "WHO", "FROM", "CALL", "WHAT")
			for _, e := range all {
				t.row(strconv.FormatInt(e.GetId(), 10), when(e.GetTime()), e.GetWho(), e.GetAddress(), e.GetCall(), auditText(e))
			}
			if err := t.end(a, "no changes"); err != nil {
				return err
			}
			if more {
				a.note("there are older ones: say --most %d", 10*most)
			}
			return nil
		},
	}
	c.Flags().StringVar(&who, "who", "", "only what this `operator` changed")
	c.Flags().StringVar(&what, "what", "", "only what changed a `kind` of thing, such as plan, or one, such as plan/gold")
	c.Flags().StringVar(&since, "since", "", "not older than this: a `time` such as 2026-11-30T08:00:00Z, or how long ago, such as 24h")
	c.Flags().IntVar(&most, "most", 100, "at most this `number` of changes")
	return c
}

// past returns a time that is given as such or as how long ago it is.
func (a *app) past(text string) (time.Time, error) {
	if d, err := time.ParseDuration(text); err == nil && d >= 0 {
		return a.now().Add(-d), nil
	}
	for _, layout := range []string{time.RFC3339, "2006-01-02T15:04", "2006-01-02"} {
		if at, err := time.ParseInLocation(layout, text, time.Local); err == nil {
			return at, nil
		}
	}
	return time.Time{}, fmt.Errorf("--since %q: must be a time such as 2026-11-30T08:00:00Z or 2026-11-30, or how long ago, such as 24h", text)
}

// auditText says what an entry changed.
func auditText(e *pb.AuditEntry) string {
	if len(e.GetChanges()) == 0 {
		return fmt.Sprintf("%d added, %d changed, %d removed", e.GetAdded(), e.GetChanged(), e.GetRemoved())
	}
	const most = 3
	var said []string
	for i, c := range e.GetChanges() {
		if i == most {
			said = append(said, fmt.Sprintf("and %d more", len(e.GetChanges())-most))
			break
		}
		said = append(said, changeText(c))
	}
	return strings.Join(said, "; ")
}

func changeText(c *pb.AuditChange) string {
	text := c.GetKind() + " " + c.GetId()
	switch {
	case c.GetOld() == "":
		return text + " added"
	case c.GetNew() == "":
		return text + " removed"
	}
	const most = 4
	var fields []string
	for i, f := range c.GetFields() {
		if i == most {
			fields = append(fields, fmt.Sprintf("and %d more", len(c.GetFields())-most))
			break
		}
		fields = append(fields, fmt.Sprintf("%s %s -> %s", f.GetField(), shortValue(f.GetOld()), shortValue(f.GetNew())))
	}
	if len(fields) == 0 {
		return text + " stored again"
	}
	return text + ": " + strings.Join(fields, ", ")
}

// shortValue returns a JSON value as people read it.
func shortValue(value string) string {
	if value == "" {
		return "nothing"
	}
	if text, err := strconv.Unquote(value); err == nil {
		value = text
	}
	if r := []rune(value); len(r) > 40 {
		value = string(r[:39]) + "…"
	}
	return value
}

func (a *app) undoCommand() *cobra.Command {
	var dryRun bool
	c := &cobra.Command{
		Use:   "undo CHANGE [--dry-run]",
		Short: "Take a change back, unless it was changed again since",
		Long: `Take a change back: everything that it changed is as it was before, all or
nothing. CHANGE is a number from "cakefleetctl audit list". If any of it was
changed since, nothing is done, and you are told by whom.`,
		Args: exactly("CHANGE"),
		RunE: func(c *cobra.Command, args []string) error {
			id, err := strconv.ParseInt(args[0], 10, 64)
			if err != nil || id <= 0 {
				return errors.New("undo " + args[0] + `: must be a number from "cakefleetctl audit list"`)
			}
			conn, err := a.connect()
			if err != nil {
				return err
			}
			resp, err := call(c.Context(), a, conn.audit.UndoChange, &pb.UndoChangeRequest{Id: id, ValidateOnly: dryRun})
			if err != nil {
				return err
			}
			if a.output == "json" {
				return a.printJSON(resp)
			}
			for _, x := range resp.GetChanges() {
				fmt.Fprintln(a.cfg.Stdout, changeText(x))
			}
			if dryRun {
				a.note("dry run: nothing is changed")
			}
			return nil
		},
	}
	c.Flags().BoolVar(&dryRun, "dry-run", false, "only say what would be changed")
	return c
}
