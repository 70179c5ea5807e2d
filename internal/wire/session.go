package wire

import (
	"fmt"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cakefleet/cakefleet/internal/plan"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// FromStatus returns the message of s as the answer to the push named nonce.
func FromStatus(s plan.Status, nonce uint64) *pb.Status {
	m := &pb.Status{
		Nonce:           nonce,
		Outcome:         pb.Outcome(s.Outcome),
		AppliedRevision: int64(s.Applied),
		AppliedHash:     s.AppliedHash,
		EffectiveHash:   s.EffectiveHash,
		Effective:       FromLink(s.Effective),
		Error:           s.Error,
		Dataplane:       s.Dataplane,
	}
	for _, c := range s.Clamps {
		m.Clamps = append(m.Clamps, &pb.Clamp{Field: c.Field, Desired: c.Desired, Effective: c.Effective, Reason: c.Reason})
	}
	for _, c := range s.Conditions {
		m.Conditions = append(m.Conditions, &pb.Condition{Type: c.Type, Status: c.Status, Reason: c.Reason, Message: c.Message})
	}
	return m
}

// ToStatus returns the status of m. An outcome that this version doesn't know
// is an error, because taking it for success would be guessing.
func ToStatus(m *pb.Status) (plan.Status, error) {
	if m.GetOutcome() < 0 || m.GetOutcome() > pb.Outcome_OUTCOME_REJECTED {
		return plan.Status{}, fmt.Errorf("outcome: value %d is unknown", m.GetOutcome())
	}
	effective, err := ToLink(m.GetEffective())
	if err != nil {
		return plan.Status{}, fmt.Errorf("effective: %w", err)
	}
	s := plan.Status{
		Outcome:       plan.Outcome(m.GetOutcome()),
		Applied:       plan.Revision(m.GetAppliedRevision()),
		AppliedHash:   m.GetAppliedHash(),
		EffectiveHash: m.GetEffectiveHash(),
		Effective:     effective,
		Error:         m.GetError(),
		Dataplane:     m.GetDataplane(),
	}
	for _, c := range m.GetClamps() {
		s.Clamps = append(s.Clamps, plan.Clamp{Field: c.GetField(), Desired: c.GetDesired(), Effective: c.GetEffective(), Reason: c.GetReason()})
	}
	for _, c := range m.GetConditions() {
		s.Conditions = append(s.Conditions, plan.Condition{Type: c.GetType(), Status: c.GetStatus(), Reason: c.GetReason(), Message: c.GetMessage()})
	}
	return s, nil
}

// FromDesired returns the push of d that nonce names.
func FromDesired(d plan.Desired, nonce uint64) *pb.Desired {
	m := &pb.Desired{Revision: int64(d.Revision), Nonce: nonce, Hash: d.Hash, Link: FromLink(d.Link)}
	if d.ExpiresAfter > 0 {
		m.ExpiresAfter, m.Then = durationpb.New(d.ExpiresAfter), FromLink(d.Then)
	}
	return m
}

// ToDesired returns the desired state of m. The error names the field; the
// push is to be refused with it.
func ToDesired(m *pb.Desired) (plan.Desired, error) {
	link, err := ToLink(m.GetLink())
	if err != nil {
		return plan.Desired{}, err
	}
	return plan.Desired{Revision: plan.Revision(m.GetRevision()), Hash: m.GetHash(), Link: link}, nil
}

// FromTime returns the message of t; nil for the zero time.
func FromTime(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}

// ToTime returns the time of m; the zero time for nil.
func ToTime(m *timestamppb.Timestamp) time.Time {
	if m == nil {
		return time.Time{}
	}
	return m.AsTime()
}
