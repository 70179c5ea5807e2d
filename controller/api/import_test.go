package api_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/cakefleet/cakefleet/controller/store"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// importWith imports a file in one piece.
func importWith(t *testing.T, subs pb.SubscriberServiceClient, file string, options *pb.ImportSubscribersRequest) *pb.ImportSubscribersResponse {
	t.Helper()
	stream, err := subs.ImportSubscribers(t.Context())
	noError(t, err)
	options.Chunk = []byte(file)
	noError(t, stream.Send(options))
	resp, err := stream.CloseAndRecv()
	noError(t, err)
	return resp
}

func subscribersOf(s *store.Store, planName string) (n int) {
	s.View(func(st *store.State) { n = st.CountSubscribers(planName) })
	return n
}

// A bad row isolates itself: the other 9 999 are imported, and nobody whom a
// bad row may be about is changed or removed.
func TestFleet016_BadRowIsolatesItself(t *testing.T) {
	kv, s, subs := withPlans(t, "gold", "silver")
	importWith(t, subs, "id,plan\n5000,silver\nleft,silver\n", &pb.ImportSubscribersRequest{})
	var file strings.Builder
	file.WriteString("id,plan\n")
	for i := range 10_000 {
		name := "gold"
		if i == 5000 {
			name = "brass"
		}
		fmt.Fprintf(&file, "%d,%s\n", i, name)
	}
	bad := &pb.ImportError{Line: 5002, Column: "plan", Message: "plan brass does not exist"}
	before := kv.Txns()
	resp := importWith(t, subs, file.String(), &pb.ImportSubscribersRequest{})
	if d := cmp.Diff([]*pb.ImportError{bad}, resp.Errors, protocmp.Transform()); d != "" || resp.Applied || kv.Txns() != before {
		t.Errorf("without keep-going: applied %t, %d writes, errors %s", resp.Applied, kv.Txns()-before, d)
	}
	resp = importWith(t, subs, file.String(), &pb.ImportSubscribersRequest{KeepGoing: true, RemoveMissing: true})
	if d := cmp.Diff([]*pb.ImportError{bad}, resp.Errors, protocmp.Transform()); d != "" || !resp.Applied || resp.Added != 9999 || resp.Removed != 1 {
		t.Errorf("with keep-going: applied %t, %d added, %d removed, errors %s", resp.Applied, resp.Added, resp.Removed, d)
	}
	if g, b := subscribersOf(s, "gold"), subscribersOf(s, "silver"); g != 9999 || b != 1 {
		t.Errorf("%d have gold and %d silver, want 9999 and 1", g, b)
	}

	// Of two rows with one id, none counts; a row without a readable id holds
	// back every removal.
	resp = importWith(t, subs, "id,plan\n1,silver\n1,gold\n2,silver\n\"3,gold\n", &pb.ImportSubscribersRequest{KeepGoing: true, RemoveMissing: true})
	if resp.Changed != 1 || resp.Removed != 0 || len(resp.Errors) != 3 || subscribersOf(s, "silver") != 2 || subscribersOf(s, "gold") != 9998 {
		t.Errorf("%d changed, %d removed, errors %v", resp.Changed, resp.Removed, resp.Errors)
	}
	// What is wrong with the whole file isn't about some lines of it.
	resp = importWith(t, subs, "name,plan\n1,silver\n", &pb.ImportSubscribersRequest{KeepGoing: true})
	if resp.Applied || len(resp.Errors) != 1 {
		t.Errorf("file without ids: applied %t, errors %v", resp.Applied, resp.Errors)
	}
}

// The shipped samples are imported without a word of complaint, and say the
// same.
func TestFleet020_SamplesImportCleanly(t *testing.T) {
	_, s, subs := withPlans(t, "gold", "silver", "bronze")
	for i, name := range []string{"subscribers.csv", "subscribers.json"} {
		file, err := os.ReadFile(filepath.Join("..", "..", "deploy", "samples", name))
		noError(t, err)
		resp := importWith(t, subs, string(file), &pb.ImportSubscribersRequest{RemoveMissing: true})
		want := &pb.ImportSubscribersResponse{Added: 4, Applied: true}
		if i > 0 {
			want = &pb.ImportSubscribersResponse{Unchanged: 4, Applied: true}
		}
		if d := cmp.Diff(want, resp, protocmp.Transform(), protocmp.IgnoreFields(&pb.ImportSubscribersResponse{}, "changes")); d != "" {
			t.Errorf("%s: %s", name, d)
		}
	}
	if n := subscribersOf(s, "gold"); n != 2 {
		t.Errorf("%d subscribers have gold, want 2", n)
	}
}

// A file that changes or removes too many is held, says so, and goes through
// when it is meant.
func TestImportMassChangeIsHeld(t *testing.T) {
	kv, s, subs := withPlans(t, "gold", "silver")
	table := func(n, silver int) string {
		var b strings.Builder
		b.WriteString("id,plan\n")
		for i := range n {
			name := "gold"
			if i < silver {
				name = "silver"
			}
			fmt.Fprintf(&b, "%d,%s\n", i, name)
		}
		return b.String()
	}
	if resp := importWith(t, subs, table(100, 0), &pb.ImportSubscribersRequest{}); !resp.Applied {
		t.Fatalf("first import is held: %v", resp.Held)
	}
	for _, c := range []struct {
		name    string
		file    string
		options *pb.ImportSubscribersRequest
		held    string
	}{
		{"many changed", table(100, 21), &pb.ImportSubscribersRequest{}, "21 of 100 subscribers would be changed and 0 removed, which is more than 20 %"},
		{"many gone", table(79, 0), &pb.ImportSubscribersRequest{RemoveMissing: true}, "0 of 100 subscribers would be changed and 21 removed, which is more than 20 %"},
		{"another share", table(100, 16), &pb.ImportSubscribersRequest{MassChangePercent: 15}, "16 of 100 subscribers would be changed and 0 removed, which is more than 15 %"},
		{"dry run", table(100, 21), &pb.ImportSubscribersRequest{DryRun: true}, "21 of 100 subscribers would be changed and 0 removed, which is more than 20 %"},
	} {
		before := kv.Txns()
		if resp := importWith(t, subs, c.file, c.options); resp.Held != c.held || resp.Applied || kv.Txns() != before {
			t.Errorf("%s: held %q, applied %t, %d writes; want held %q", c.name, resp.Held, resp.Applied, kv.Txns()-before, c.held)
		}
	}
	for _, step := range []struct {
		file    string
		options *pb.ImportSubscribersRequest
		silver  int
	}{
		{table(100, 20), &pb.ImportSubscribersRequest{}, 20},
		{table(100, 100), &pb.ImportSubscribersRequest{AllowMassChange: true}, 100},
	} {
		if resp := importWith(t, subs, step.file, step.options); resp.Held != "" || !resp.Applied || subscribersOf(s, "silver") != step.silver {
			t.Errorf("held %q, applied %t, %d have silver", resp.Held, resp.Applied, subscribersOf(s, "silver"))
		}
	}
	before := kv.Txns()
	if resp := importWith(t, subs, table(100, 100), &pb.ImportSubscribersRequest{}); resp.Unchanged != 100 || kv.Txns() != before {
		t.Errorf("the same file again: %v, %d writes", resp, kv.Txns()-before)
	}
}
