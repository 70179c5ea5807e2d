package api

import (
	"context"
	"maps"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/cakefleet/cakefleet/controller/identity"
	"github.com/cakefleet/cakefleet/controller/rollout"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// Rules returns the least role for each call.
func Rules() map[string]identity.OperatorRole {
	all := map[string]identity.OperatorRole{}
	for m, r := range rules {
		all[m] = r.min
	}
	return all
}

// ForCaller returns what a caller may see of an answer.
func ForCaller(c identity.Caller, answer any) any {
	return newPrivacy(DefaultViewerLabels).forCaller(c, answer)
}

// Personal tells whether a field is hidden from viewers.
func Personal(field protoreflect.FullName) bool { return personal[field] }

// PersonalFields are those that are hidden from viewers.
func PersonalFields() []protoreflect.FullName { return slices.Collect(maps.Keys(personal)) }

// Apart says how another controller's clock is to this one.
func Apart(theirs, from, to time.Time) string { return apart(theirs, from, to) }

// OverTheWire returns a report as another controller gets it.
func OverTheWire(r *rollout.Report) (rollout.Report, error) {
	text, err := proto.Marshal(rolloutSums(r))
	if err != nil {
		return rollout.Report{}, err
	}
	m := &pb.SumRolloutResponse{}
	err = proto.Unmarshal(text, m)
	return toRolloutReport(m), err
}

// LookElsewhere asks the other controllers once who came to them.
func (s *SessionService) LookElsewhere(ctx context.Context) { s.lookElsewhere(ctx, nil) }
