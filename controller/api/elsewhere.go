package api

import (
	"context"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cakefleet/cakefleet/controller/fleet"
	"github.com/cakefleet/cakefleet/controller/identity"
	"github.com/cakefleet/cakefleet/controller/lead"
	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/internal/plan"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// elsewhereEvery is how often the other controllers are asked who came to them.
const elsewhereEvery = 5 * time.Second

// Ask makes the service learn who opens sessions with other controllers, so that
// a router has one session in the whole fleet, and two devices with one
// identity are found wherever they connect. It comes before Run.
func (s *SessionService) Ask(p *Peers) { s.peers = p }

// watchOthers asks the others until ctx ends.
func (s *SessionService) watchOthers(ctx context.Context) {
	if s.peers == nil {
		return
	}
	ticker := time.NewTicker(elsewhereEvery)
	defer ticker.Stop()
	after := map[string]*timestamppb.Timestamp{} // by controller: its clock at its last answer
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		after = s.lookElsewhere(ctx, after)
	}
}

// lookElsewhere takes in who came to the others after the times that their
// clocks said last, and returns what they say now.
func (s *SessionService) lookElsewhere(ctx context.Context, after map[string]*timestamppb.Timestamp) map[string]*timestamppb.Timestamp {
	type told struct {
		*pb.ListNewcomersResponse
		asked, got time.Time
	}
	answers := askAll(ctx, s.peers, sumTime, func(ctx context.Context, c pb.PeerServiceClient, m lead.Member) (told, error) {
		t := told{asked: time.Now()}
		var err error
		t.ListNewcomersResponse, err = c.ListNewcomers(ctx, &pb.ListNewcomersRequest{AfterTime: after[m.ID]})
		t.got = time.Now()
		return t, err
	})()
	next := map[string]*timestamppb.Timestamp{} // without those that are gone
	for _, a := range answers {
		if a.err != nil || a.resp.GetClock() == nil { // it is of an older version
			next[a.member.ID] = after[a.member.ID]
			continue
		}
		next[a.member.ID] = a.resp.GetClock()
		for _, n := range a.resp.GetNewcomers() {
			since := n.GetSinceTime().AsTime().Add(-ahead(a.resp.GetClock().AsTime(), a.resp.asked, a.resp.got))
			clone := s.hub.Elsewhere(n.GetId(), fleet.Newcomer{
				Since:  since,
				Device: plan.Device{BootID: n.GetBootId(), Model: n.GetModel(), Address: n.GetAddress()},
			}, a.resp.got)
			if clone != nil {
				s.quarantineRouter(ctx, n.GetId(), clone)
			}
		}
	}
	return next
}

// ahead returns how much another clock is ahead of this one at least, which was
// read between two times of this one: nothing if both may be the same.
func ahead(theirs, from, to time.Time) time.Duration {
	switch {
	case theirs.After(to):
		return theirs.Sub(to)
	case theirs.Before(from):
		return theirs.Sub(from)
	default:
		return 0
	}
}

// quarantineRouter refuses a router of which two were found at two controllers.
func (s *SessionService) quarantineRouter(ctx context.Context, id string, c *fleet.Clone) {
	var key plan.Key
	s.store.View(func(st *store.State) {
		r, _ := st.Router(id)
		key = r.Key
	})
	s.quarantine(ctx, identity.Peer{Role: identity.RoleRouter, Name: id, Key: key}, c)
}
