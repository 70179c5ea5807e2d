package api_test

import (
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/cakefleet/cakefleet/controller/api"
	"github.com/cakefleet/cakefleet/controller/identity"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// fleet.md §4 item 24: a viewer sees nothing personal, whatever is around it,
// and what is hidden for one is not changed for others.
func TestFleet024_ViewerSeesNothingPersonal(t *testing.T) {
	stored := &pb.Subscriber{Id: "4711", Labels: map[string]string{"site": "north", "name": "Ada Lovelace"}}
	router := &pb.Router{Id: "home-1", Session: &pb.SessionState{Peer: "192.0.2.1:4000", Model: "x"}}
	for _, c := range []struct {
		role   identity.OperatorRole
		hidden bool
	}{{identity.Viewer, true}, {identity.Operator, false}, {identity.Admin, false}} {
		caller := identity.Caller{Name: "noc", Role: c.role}
		list := api.ForCaller(caller, &pb.ListSubscribersResponse{Subscribers: []*pb.Subscriber{stored}}).(*pb.ListSubscribersResponse)
		got := list.GetSubscribers()[0]
		if (got.GetLabels()["name"] == "(hidden)") != c.hidden || got.GetLabels()["site"] != "north" || got.GetId() != "4711" {
			t.Errorf("%s sees %v", c.role, got)
		}
		one := api.ForCaller(caller, &pb.GetRouterResponse{Router: router}).(*pb.GetRouterResponse)
		if (one.GetRouter().GetSession().GetPeer() == "(hidden)") != c.hidden || one.GetRouter().GetSession().GetModel() != "x" {
			t.Errorf("%s sees %v", c.role, one)
		}
	}
	if stored.GetLabels()["name"] != "Ada Lovelace" || router.GetSession().GetPeer() != "192.0.2.1:4000" {
		t.Error("what was hidden from one is lost")
	}
	var m proto.Message = &pb.ListPlansResponse{Plans: []*pb.Plan{{Name: "gold"}}}
	if api.ForCaller(identity.Caller{Role: identity.Viewer}, m) != m {
		t.Error("an answer with nothing personal is copied")
	}
}

// Whoever adds a field with labels or an address to what viewers get must say
// whether it is personal.
func TestEveryPersonalFieldIsKnown(t *testing.T) {
	harmless := []protoreflect.FullName{
		"cakefleet.v1.WhoAmIResponse.address",   // one's own
		"cakefleet.v1.ProbeStats.address",       // of a host in the operator's network
		"cakefleet.v1.ControllerStatus.address", // of a controller
		"cakefleet.v1.ScheduleTarget.labels",    // which subscribers it is for
		"cakefleet.v1.RolloutSelector.labels",   // likewise
	}
	rules := api.Rules()
	seen := map[protoreflect.FullName]bool{}
	var walk func(d protoreflect.MessageDescriptor)
	walk = func(d protoreflect.MessageDescriptor) {
		if seen[d.FullName()] {
			return
		}
		seen[d.FullName()] = true
		for i := range d.Fields().Len() {
			f := d.Fields().Get(i)
			name := string(f.Name())
			if (name == "labels" || name == "peer" || strings.HasSuffix(name, "address")) && !api.Personal(f.FullName()) && !slices.Contains(harmless, f.FullName()) {
				t.Errorf("%s: is it personal? say so in redact.go, or here that it isn't", f.FullName())
			}
			if f.IsMap() {
				f = f.MapValue()
			}
			if f.Message() != nil {
				walk(f.Message())
			}
		}
	}
	for method, min := range rules {
		if min != identity.Viewer {
			continue
		}
		d, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(strings.ReplaceAll(strings.Trim(method, "/"), "/", ".")))
		if err != nil {
			t.Fatal(err)
		}
		walk(d.(protoreflect.MethodDescriptor).Output())
	}
	for _, name := range api.PersonalFields() {
		if _, err := protoregistry.GlobalFiles.FindDescriptorByName(name); err != nil {
			t.Errorf("%s is hidden and doesn't exist", name)
		}
	}
}
