package ctl_test

import (
	"context"
	"crypto/sha256"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"

	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// admin is a store that may be full and was restored.
type admin struct {
	pb.UnimplementedAdminServiceServer
	full, ahead bool
	cut         int // bytes that a backup lacks
}

func (f *admin) GetStatus(context.Context, *pb.GetStatusRequest) (*pb.GetStatusResponse, error) {
	m := &pb.StoreMember{Name: "a", Endpoint: "http://a:2379", Version: "3.7.3", SizeBytes: 90e6, UsedBytes: 40e6, QuotaBytes: 2e9, Leader: true}
	resp := &pb.GetStatusResponse{
		Store: &pb.StoreStatus{Members: []*pb.StoreMember{m, {Name: "b", Endpoint: "http://b:2379", Error: "refused"}}, Revision: 120, SeenRevision: 120, FreeBytes: -1},
		Controllers: []*pb.ControllerStatus{
			{Id: "core-1", Address: "core-1:8443", Version: "0.1.0", StartTime: before(50 * time.Hour), Routers: 4, Self: true},
			{Id: "core-2", Address: "core-2:8443", Version: "0.1.0", StartTime: before(3 * time.Hour), Error: "no answer"},
		},
		Led:         []*pb.LedWork{{Work: "rollouts", Leader: "core-1"}, {Work: "schedules", Leader: "core-1"}},
		Subscribers: 5, UnservedSubscribers: 1, Routers: 6, IdleRouters: 2,
		Certificates: []*pb.CertificateStatus{
			{Purpose: "authority", Subject: "CN=cakefleet authority", ExpireTime: before(-1000 * 24 * time.Hour)},
			{Purpose: "HTTPS door", Subject: "CN=isp.example", ExpireTime: before(-60 * 24 * time.Hour)},
		},
		Problems: []string{"etcd at http://b:2379 does not answer: refused"},
	}
	if f.full {
		m.Alarms = []string{"NOSPACE"}
		resp.Problems = append(resp.Problems, "the store is full")
	}
	if f.ahead {
		resp.Restore = &pb.RestoreStatus{Revision: 100, UntilRevision: 1000000100, Time: before(time.Hour)}
		resp.Ahead, resp.AheadRouters, resp.AheadRevision = 1, []string{"home-1"}, 118
	}
	return resp, nil
}

func (f *admin) RepairStore(_ *pb.RepairStoreRequest, s grpc.ServerStreamingServer[pb.RepairStoreResponse]) error {
	f.full = false
	return s.Send(&pb.RepairStoreResponse{Step: "member a: 50000000 of 90000000 bytes given back"})
}

func (f *admin) AcceptRestore(context.Context, *pb.AcceptRestoreRequest) (*pb.AcceptRestoreResponse, error) {
	f.ahead = false
	return &pb.AcceptRestoreResponse{Routers: 1}, nil
}

func (f *admin) BackupStore(_ *pb.BackupStoreRequest, s grpc.ServerStreamingServer[pb.BackupStoreResponse]) error {
	data := []byte(strings.Repeat("backup", 1000))
	sum := sha256.Sum256(data)
	data = append(data, sum[:]...)
	data = data[f.cut:]
	for len(data) > 0 {
		n := min(len(data), 1000)
		if err := s.Send(&pb.BackupStoreResponse{Chunk: data[:n], SizeBytes: 6032}); err != nil {
			return err
		}
		data = data[n:]
	}
	return nil
}

func TestBackup(t *testing.T) {
	f := newFleet()
	address, credentials := f.serve(t)
	env := map[string]string{"CAKEFLEET_CONTROLLER": address, "CAKEFLEET_CREDENTIALS": credentials}
	dir := t.TempDir()
	file := filepath.Join(dir, "fleet.backup")
	if r := run(t, env, "backup", file); r.code != 0 {
		t.Fatalf("%+v", r)
	}
	b, err := os.ReadFile(file)
	if err != nil || len(b) != 6032 {
		t.Fatalf("%d bytes, error %v", len(b), err)
	}
	if r := run(t, env, "backup", file); r.code != 1 || !strings.Contains(r.stderr, "exists already") {
		t.Errorf("over a file that is there: %+v", r)
	}
	// What is not whole leaves nothing, and what was there before is there.
	f.admin.cut = 1
	if r := run(t, env, "backup", "--force", file); r.code != 1 || !strings.Contains(r.stderr, "not whole") {
		t.Errorf("not whole: %+v", r)
	}
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 1 {
		t.Errorf("left in the folder: %v, %v", left, err)
	}
	if now, err := os.ReadFile(file); err != nil || string(now) != string(b) {
		t.Errorf("the file is another one: %v", err)
	}
}
