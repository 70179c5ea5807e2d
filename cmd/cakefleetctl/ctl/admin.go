package ctl

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

func (a *app) doctorCommand() *cobra.Command {
	var repair, accept bool
	c := &cobra.Command{
		Use:   "doctor [--repair] [--accept-restore]",
		Short: "Say how the store and the controllers are, and mend what can be mended",
		Long: `Say how the store and the controllers are, and mend what can be mended. The
exit status is 1 if anything is wrong.

--repair makes room in the store: it forgets old revisions, gives back what is
free in each member's file, one after the other, and lets it take writes again.
Nothing that is in force is lost.

It says when the fleet's authority, its issuers and the certificates of the
controller's doors end; one that ends within 30 days is a problem. Subscribers
without a router and routers without a subscriber are counted: nothing is shaped
for them.

--accept-restore moves routers back that run something newer than a store that
was restored from a backup knows. Without it nothing is sent to them.`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			conn, err := a.connect()
			if err != nil {
				return err
			}
			if repair {
				if err := a.repair(c.Context(), conn); err != nil {
					return err
				}
			}
			if accept {
				resp, err := call(c.Context(), a, conn.admin.AcceptRestore, &pb.AcceptRestoreRequest{})
				if err != nil {
					return err
				}
				a.note("%s moved back to what the store has", count(resp.GetRouters(), "router"))
			}
			resp, err := call(c.Context(), a, conn.admin.GetStatus, &pb.GetStatusRequest{})
			if err != nil {
				return err
			}
			if a.output == "json" {
				err = a.printJSON(resp)
			} else {
				err = a.showStatus(resp)
			}
			if err == nil && len(resp.GetProblems()) > 0 {
				return failure{} // told already
			}
			return err
		},
	}
	c.Flags().BoolVar(&repair, "repair", false, "make room in the store")
	c.Flags().BoolVar(&accept, "accept-restore", false, "move routers back that run what the restored store does not know")
	return c
}

// repair shows each step as it is done. A big store takes minutes.
func (a *app) repair(ctx context.Context, conn *connection) error {
	stream, err := conn.admin.RepairStore(ctx, &pb.RepairStoreRequest{})
	if err != nil {
		return a.explain(err)
	}
	for {
		resp, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return a.explain(err)
		}
		a.note("%s", resp.GetStep())
	}
}

func (a *app) showStatus(s *pb.GetStatusResponse) error {
	st := s.GetStore()
	kind := "etcd cluster"
	if st.GetEmbedded() {
		kind = "etcd inside the controller"
		if st.GetFreeBytes() >= 0 {
			kind += ", " + size(uint64(st.GetFreeBytes())) + " free on its disk"
		}
	}
	fmt.Fprintf(a.cfg.Stdout, "store: %s, revision %d\n\n", kind, st.GetRevision())
	t := a.table("MEMBER", "STATE", "SIZE", "IN USE", "QUOTA", "VERSION", "ENDPOINT")
	for _, m := range st.GetMembers() {
		state := "follows"
		switch {
		case m.GetError() != "":
			t.row(m.GetName(), "no answer", "", "", "", "", m.GetEndpoint())
			continue
		case len(m.GetAlarms()) > 0:
			state = strings.Join(m.GetAlarms(), ", ")
		case m.GetLeader():
			state = "leads"
		}
		quota := ""
		if m.GetQuotaBytes() > 0 {
			quota = size(uint64(m.GetQuotaBytes()))
		}
		t.row(m.GetName(), state, size(uint64(m.GetSizeBytes())), size(uint64(m.GetUsedBytes())), quota, m.GetVersion(), m.GetEndpoint())
	}
	if err := t.end(a, "no members"); err != nil {
		return err
	}
	fmt.Fprintln(a.cfg.Stdout)
	t = a.table("CONTROLLER", "ROUTERS", "STARTED", "VERSION", "ADDRESS", "LEADS")
	for _, c := range s.GetControllers() {
		routers := fmt.Sprint(c.GetRouters())
		if c.GetError() != "" {
			routers = "no answer"
		}
		var leads []string
		for _, w := range s.GetLed() {
			if w.GetLeader() == c.GetId() {
				leads = append(leads, w.GetWork())
			}
		}
		t.row(c.GetId(), routers, a.ago(c.GetStartTime()), c.GetVersion(), c.GetAddress(), strings.Join(leads, ", "))
	}
	if err := t.end(a, "no controllers are registered"); err != nil {
		return err
	}
	if len(s.GetCertificates()) > 0 {
		fmt.Fprintln(a.cfg.Stdout)
		t = a.table("CERTIFICATE", "ENDS", "NAME")
		for _, c := range s.GetCertificates() {
			t.row(c.GetPurpose(), c.GetExpireTime().AsTime().UTC().Format(time.DateOnly), c.GetSubject())
		}
		if err := t.end(a, ""); err != nil {
			return err
		}
	}
	fmt.Fprintf(a.cfg.Stdout, "\n%s, %d without a router; %s, %d without a subscriber\n",
		count(s.GetSubscribers(), "subscriber"), s.GetUnservedSubscribers(), count(s.GetRouters(), "router"), s.GetIdleRouters())
	if r := s.GetRestore(); r != nil {
		state := "not accepted: routers that run something newer get nothing until cakefleetctl doctor --accept-restore"
		if r.GetAccepted() {
			state = "accepted by " + r.GetAcceptedBy()
		}
		fmt.Fprintf(a.cfg.Stdout, "\nrestored %s from a backup of revision %d, %s\n", a.ago(r.GetTime()), r.GetRevision(), state)
	}
	fmt.Fprintln(a.cfg.Stdout)
	if len(s.GetProblems()) == 0 {
		fmt.Fprintln(a.cfg.Stdout, "nothing is wrong")
		return nil
	}
	for _, p := range s.GetProblems() {
		fmt.Fprintln(a.cfg.Stdout, "wrong:", p)
	}
	return nil
}

func (a *app) backupCommand() *cobra.Command {
	var force bool
	c := &cobra.Command{
		Use:   "backup FILE",
		Short: "Write a backup of the store to a file",
		Long: `Write a backup of the store to a file: plans, subscribers, routers and whatever
else the controllers keep, as of one moment, with a checksum. The fleet's
authority is not in it: keep ca.pem and ca.key of the controller's data
directory too. To use it:

  cakefleet-controller restore --from FILE --data-dir DIR`,
		Args: exactly("FILE"),
		RunE: func(c *cobra.Command, args []string) error {
			conn, err := a.connect()
			if err != nil {
				return err
			}
			file := args[0]
			if _, err := os.Stat(file); err == nil && !force {
				return failure{fmt.Errorf("%s exists already: choose another name, or say --force", file)}
			}
			n, err := a.backup(c.Context(), conn, file)
			if err != nil {
				return err
			}
			if a.output == "json" {
				return a.printJSONText(fmt.Appendf(nil, `{"file":%q,"bytes":"%d"}`, file, n))
			}
			fmt.Fprintf(a.cfg.Stdout, "%s: %s, checksum is right\n", file, size(uint64(n)))
			return nil
		},
	}
	c.Flags().BoolVar(&force, "force", false, "replace a file that is there")
	return c
}

// backup writes to a file beside the one that is wanted, which appears only
// when all of it is there and right.
func (a *app) backup(ctx context.Context, conn *connection, file string) (n int64, err error) {
	f, err := os.CreateTemp(filepath.Dir(file), "."+filepath.Base(file)+".*")
	if err != nil {
		return 0, failure{err}
	}
	defer func() {
		_ = f.Close()
		_ = os.Remove(f.Name()) // there is none any more if it was renamed
	}()
	stream, err := conn.admin.BackupStore(ctx, &pb.BackupStoreRequest{})
	if err != nil {
		return 0, a.explain(err)
	}
	h := sha256.New()
	var tail []byte // the newest bytes, which may be the checksum
	var total int64
	told := a.cfg.Now()
	for {
		resp, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return 0, a.explain(err)
		}
		total = max(total, resp.GetSizeBytes())
		if _, err := f.Write(resp.GetChunk()); err != nil {
			return 0, failure{err}
		}
		n += int64(len(resp.GetChunk()))
		tail = append(tail, resp.GetChunk()...)
		if more := len(tail) - sha256.Size; more > 0 {
			h.Write(tail[:more])
			tail = append(tail[:0], tail[more:]...)
		}
		if now := a.cfg.Now(); now.Sub(told) >= time.Second && total > 0 {
			told = now
			a.note("%d %%, %s", min(100*n/total, 100), size(uint64(n)))
		}
	}
	if !bytes.Equal(h.Sum(nil), tail) {
		return 0, failure{fmt.Errorf("what came of the backup is not whole: its checksum is wrong after %d bytes; nothing was written to %s", n, file)}
	}
	if err := errors.Join(f.Sync(), f.Close(), os.Rename(f.Name(), file)); err != nil {
		return 0, failure{err}
	}
	return n, nil
}
