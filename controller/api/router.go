package api

import (
	"context"
	"fmt"
	"iter"
	"time"

	"github.com/cakefleet/cakefleet/controller/fleet"
	"github.com/cakefleet/cakefleet/controller/resolve"
	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/wire"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// RouterService tells what routers run.
type RouterService struct {
	pb.UnimplementedRouterServiceServer

	store *store.Store
	hub   *fleet.Hub
	peers *Peers // nil: this controller is alone
}

// NewRouterService returns the service.
func NewRouterService(s *store.Store, hub *fleet.Hub) *RouterService {
	return &RouterService{store: s, hub: hub}
}

// member is a router with what the store derives for it.
type member struct {
	router  plan.Router
	plan    string // through its subscriber; empty if none
	desired plan.Desired
	owners  [plan.NumFields]resolve.Word // of the fields of the link, if there is one
	revoked *store.Revocation            // of its key; nil: it counts
}

func (m member) id() string { return m.router.ID }

func memberOf(st *store.State, r plan.Router) member {
	m := member{router: r}
	now := time.Now()
	m.desired, _ = resolve.Router(st, r.ID, now, nil)
	m.desired.Known = st.Known()
	m.owners, _ = resolve.Owners(st, r.ID, now)
	if sub, ok := st.Subscriber(r.Subscriber); ok {
		m.plan = sub.Plan
	}
	if v, revoked := st.Revocation(r.Key); revoked {
		m.revoked = &v
	}
	return m
}

// viewSize is how many routers are looked at in one View, as changes wait for
// it to end.
const viewSize = 1000

// members yields the routers of a plan whose id comes after an id, in order;
// those of every plan and of none if the name is empty. It does not hold up
// changes, so that one that happens meanwhile may be seen or not.
func members(s *store.Store, planName, after string) iter.Seq[member] {
	return func(yield func(member) bool) {
		for {
			batch := make([]member, 0, viewSize)
			s.View(func(st *store.State) {
				routers := st.Routers(after)
				if planName != "" {
					routers = st.RoutersOfPlan(planName, after)
				}
				for r := range routers {
					if batch = append(batch, memberOf(st, r)); len(batch) == viewSize {
						break
					}
				}
			})
			for _, m := range batch {
				if !yield(m) {
					return
				}
			}
			if len(batch) < viewSize {
				return
			}
			after = batch[viewSize-1].router.ID
		}
	}
}

// GetRouter returns one router with its state.
func (s *RouterService) GetRouter(ctx context.Context, req *pb.GetRouterRequest) (*pb.GetRouterResponse, error) {
	m, err := s.get(req.GetId())
	if err != nil {
		return nil, err
	}
	resp := &pb.GetRouterResponse{Router: s.message(m)}
	resp.SilentControllers = s.complete(ctx, []*pb.Router{resp.GetRouter()})
	return resp, nil
}

func (s *RouterService) get(id string) (member, error) { return memberByID(s.store, id) }

// memberByID returns one router; the error is a status.
func memberByID(s *store.Store, id string) (m member, err error) {
	var exists bool
	s.View(func(st *store.State) {
		var r plan.Router
		if r, exists = st.Router(id); exists {
			m = memberOf(st, r)
		}
	})
	if !exists {
		return m, statusOf(&store.Error{Kind: store.KindRouter, ID: id, Err: store.ErrNotFound})
	}
	return m, nil
}

// ListRouters returns routers in order of id.
func (s *RouterService) ListRouters(ctx context.Context, req *pb.ListRoutersRequest) (*pb.ListRoutersResponse, error) {
	if req.GetSync() < 0 || req.GetSync() > pb.SyncState_SYNC_STATE_AHEAD {
		return nil, statusOf(badField("sync", fmt.Errorf("sync: value %d is unknown", req.GetSync())))
	}
	p, err := newPage(req.GetPageSize(), req.GetPageToken())
	if err != nil {
		return nil, statusOf(err)
	}
	if s.peers != nil && len(s.peers.members.Others()) > 0 {
		return s.listAll(ctx, p, req), nil
	}
	wanted := func(m member) bool {
		_, sync := s.hub.Sync(m.router.ID, m.desired)
		return req.GetSync() == 0 || fleet.Sync(req.GetSync()) == sync
	}
	resp := &pb.ListRoutersResponse{}
	resp.Routers, resp.NextPageToken = collect(p, members(s.store, req.GetPlan(), p.after), member.id, wanted, s.message)
	return resp, nil
}

// UpdateRouter says which subscriber a router serves.
func (s *RouterService) UpdateRouter(ctx context.Context, req *pb.UpdateRouterRequest) (*pb.UpdateRouterResponse, error) {
	old, err := s.get(req.GetRouter().GetId())
	if err != nil {
		return nil, err
	}
	// Without a revision, that of the router that was just looked up: one that
	// is removed meanwhile must not be made again.
	expect := plan.Revision(req.GetRouter().GetRevision())
	if expect == 0 {
		expect = old.router.Revision
	}
	if expect != old.router.Revision {
		return nil, statusOf(&store.Error{Kind: store.KindRouter, ID: old.router.ID, Err: store.ErrConflict, Want: expect, Have: old.router.Revision, Updated: old.router.Updated})
	}
	if req.GetRouter().GetSubscriber() != old.router.Subscriber {
		r := old.router
		r.Subscriber = req.GetRouter().GetSubscriber()
		if _, err := s.store.PutRouter(ctx, r, expect); err != nil {
			return nil, statusOf(err)
		}
	}
	m, err := s.get(old.router.ID)
	if err != nil {
		return nil, err
	}
	return &pb.UpdateRouterResponse{Router: s.message(m)}, nil
}

// DeleteRouter removes a router; its session ends and its certificate is
// refused from then on.
func (s *RouterService) DeleteRouter(ctx context.Context, req *pb.DeleteRouterRequest) (*pb.DeleteRouterResponse, error) {
	if err := s.store.DeleteRouter(ctx, req.GetId(), store.Any); err != nil {
		return nil, statusOf(err)
	}
	return &pb.DeleteRouterResponse{}, nil
}

func (s *RouterService) message(m member) *pb.Router {
	snap := s.hub.Snapshot(m.router.ID, m.desired)
	return &pb.Router{
		Id:         m.router.ID,
		Subscriber: m.router.Subscriber,
		Plan:       m.plan,
		Revision:   int64(m.router.Revision),
		Desired: &pb.DesiredState{
			Revision: int64(m.desired.Revision),
			Hash:     m.desired.Hash,
			Link:     wire.FromLink(m.desired.Link),
			Reason:   m.desired.Reason,
			Since:    wire.FromTime(m.desired.Since),
			Fields:   ownedFields(m),
			Changes:  wire.FromTime(m.desired.Changes),

			EffectiveHash: m.desired.EffectiveHash(),
		},
		Reported: fromReported(snap.Reported),
		Session: &pb.SessionState{
			Connected:    snap.Connected,
			Since:        wire.FromTime(snap.Since),
			LastSeen:     wire.FromTime(snap.LastSeen),
			Peer:         snap.Peer,
			AgentVersion: snap.AgentVersion,
			Model:        snap.Model,
			BootId:       snap.BootID,
			Dataplane:    snap.Dataplane,
			Sync:         pb.SyncState(snap.Sync),
		},
		Labels:      m.router.Labels,
		Serial:      m.router.Serial,
		Fingerprint: fingerprint(m.router.Key),
		Revocation:  fromRevocation(m.revoked),
		Quarantine:  fromQuarantine(m.router.Quarantine),
	}
}

// ownedFields returns the fields that are not the plan's word.
func ownedFields(m member) (all []*pb.OwnedField) {
	for i, word := range m.owners {
		if word.Owner != plan.OwnerPlan && m.desired.Link != nil {
			f := &pb.OwnedField{Field: plan.FieldName(i), Value: plan.FieldText(m.desired.Link, i), Owner: word.Owner.String()}
			if word.Owner == plan.OwnerSchedule {
				f.Schedule = word.ID
			} else {
				f.Rollout = word.ID
			}
			all = append(all, f)
		}
	}
	return all
}

func fromReported(r *fleet.Reported) *pb.ReportedState {
	if r == nil {
		return nil
	}
	// The status of a router has most of it, in the same words.
	st := wire.FromStatus(plan.Status{
		Outcome: r.Outcome, Effective: r.Effective, Error: r.Error, Clamps: r.Clamps, Conditions: r.Conditions,
	}, 0)
	return &pb.ReportedState{
		AppliedRevision:  int64(r.Applied),
		AppliedHash:      r.AppliedHash,
		EffectiveHash:    r.EffectiveHash,
		Effective:        st.GetEffective(),
		Outcome:          st.GetOutcome(),
		RejectedRevision: int64(r.Rejected),
		Error:            st.GetError(),
		Clamps:           st.GetClamps(),
		Conditions:       st.GetConditions(),
		ReceivedTime:     wire.FromTime(r.Received),
	}
}
