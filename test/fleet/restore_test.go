package fleet_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cakefleet/cakefleet/controller"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// A controller that was restored from a backup older than what routers run does
// not move them back until an operator says so; what is changed after the
// restore reaches them all the same.
func TestRestoredStore(t *testing.T) {
	if os.Getenv(insideEnv) != "" {
		t.Skip("is for the process outside")
	}
	t.Parallel()
	c := newCluster(t, &network{base: 80}, 0, 1, nil)
	l := newLoad(t, c, 1, 2, 6)
	limit, done := context.WithTimeout(t.Context(), 2*patience)
	defer done()
	admin := pb.NewAdminServiceClient(c.operators[0])
	if !wait(limit, l.settled) {
		t.Fatal("the fleet does not settle")
	}
	old := l.runsOf("plan-0")
	file := filepath.Join(t.TempDir(), "backup")
	l.backup(limit, admin, file)
	for _, name := range []string{"plan-0", "plan-1"} {
		l.mustWrite(limit, name, c.operators[0], 0)
	}
	if !wait(limit, l.settled) {
		t.Fatal("the fleet does not settle after a change")
	}
	newer := l.runsOf("plan-0")
	if newer == old {
		t.Fatal("nothing has changed")
	}

	p := c.controllers[0]
	p.end()
	said, err := controller.Restore(limit, controller.RestoreConfig{File: file, DataDir: c.dir, Replace: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Log(strings.Join(said, "\n"))
	p.start(t)
	if !wait(limit, func() bool { return l.inState(pb.SyncState_SYNC_STATE_AHEAD) == 6 }) {
		t.Fatalf("%d routers of 6 are ahead", l.inState(pb.SyncState_SYNC_STATE_AHEAD))
	}
	st, err := admin.GetStatus(limit, &pb.GetStatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if st.GetAhead() != 6 || st.GetRestore() == nil || st.GetRestore().GetAccepted() || !strings.Contains(fmt.Sprint(st.GetProblems()), "--accept-restore") {
		t.Errorf("status says %v", st)
	}
	l.mustWrite(limit, "plan-1", c.operators[0], 0)
	if !wait(limit, func() bool { return l.inState(pb.SyncState_SYNC_STATE_IN_SYNC) == 3 }) {
		t.Errorf("%d routers of 3 have what was changed after the restore", l.inState(pb.SyncState_SYNC_STATE_IN_SYNC))
	}
	if got := l.runsOf("plan-0"); got != newer {
		t.Error("routers were moved back in silence")
	}
	resp, err := admin.AcceptRestore(limit, &pb.AcceptRestoreRequest{})
	if err != nil || resp.GetRouters() != 3 || !resp.GetRestore().GetAccepted() || resp.GetRestore().GetAcceptedBy() != "judge" {
		t.Errorf("accepted: %v, %v", resp, err)
	}
	if !wait(limit, l.settled) {
		t.Error("the fleet does not settle after the restore was accepted")
	}
	if got := l.runsOf("plan-0"); got != old {
		t.Error("routers don't run what the backup has")
	}
	if st, err := admin.GetStatus(limit, &pb.GetStatusRequest{}); err != nil || st.GetAhead() != 0 || len(st.GetProblems()) > 0 {
		t.Errorf("in the end: %v, %v", st, err)
	}
}

// backup writes what the controller gives to a file.
func (l *load) backup(ctx context.Context, admin pb.AdminServiceClient, file string) {
	l.t.Helper()
	stream, err := admin.BackupStore(ctx, &pb.BackupStoreRequest{})
	if err != nil {
		l.t.Fatal(err)
	}
	f, err := os.Create(file)
	if err != nil {
		l.t.Fatal(err)
	}
	for {
		resp, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			l.t.Fatal(err)
		}
		if _, err := f.Write(resp.GetChunk()); err != nil {
			l.t.Fatal(err)
		}
	}
	if err := f.Close(); err != nil {
		l.t.Fatal(err)
	}
}

// runsOf returns the hash of what the first router of a plan runs.
func (l *load) runsOf(name string) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := range len(l.agents) {
		id := fmt.Sprintf("r%03d", i)
		if l.history.PlanOf[id] == name {
			return l.runs[id].Hash
		}
	}
	return ""
}

// inState returns how many routers the first controller says are in a state.
func (l *load) inState(s pb.SyncState) int {
	resp, err := pb.NewRouterServiceClient(l.operators[0]).ListRouters(l.t.Context(), &pb.ListRoutersRequest{Sync: s})
	if err != nil {
		return -1
	}
	return len(resp.GetRouters())
}
