package api

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/cakefleet/cakefleet/controller/conduct"
	"github.com/cakefleet/cakefleet/controller/fleet"
	"github.com/cakefleet/cakefleet/controller/rollout"
	"github.com/cakefleet/cakefleet/controller/schedule"
	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/wire"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

var (
	// errBusyRouters means that another rollout changes the same routers.
	errBusyRouters = errors.New("another rollout is in the way")
	// errHeld means that the same was rolled back before.
	errHeld = errors.New("the same was rolled back before")
)

// RolloutService changes many routers in stages.
type RolloutService struct {
	pb.UnimplementedRolloutServiceServer

	store   *store.Store
	hub     *fleet.Hub
	conduct *conduct.Conductor
	peers   *Peers // nil: this controller is alone
}

// NewRolloutService returns the service.
func NewRolloutService(s *store.Store, hub *fleet.Hub, c *conduct.Conductor) *RolloutService {
	return &RolloutService{store: s, hub: hub, conduct: c}
}

// GetRollout returns one rollout and how its routers are now.
func (s *RolloutService) GetRollout(ctx context.Context, req *pb.GetRolloutRequest) (*pb.GetRolloutResponse, error) {
	l, err := s.live(req.GetId())
	if err != nil {
		return nil, statusOf(err)
	}
	resp := &pb.GetRolloutResponse{Rollout: rolloutMessage(&l.Rollout), Report: &pb.RolloutReport{}}
	if l.Settled || l.Phase == rollout.Overtaken {
		return resp, nil
	}
	report, missing := s.conduct.Report(ctx, l)
	if report == nil {
		resp.Report.Missing = missing
		return resp, nil
	}
	resp.Report.Changed, resp.Report.Control = tallyMessage(&report.Changed), tallyMessage(&report.Control)
	if l.Opened > 0 && !l.Phase.Final() {
		for _, g := range l.Gates {
			v := l.Judge(g, report, l.Phase != rollout.Answering)
			v.Wave = l.Wave()
			resp.Report.Gates = append(resp.Report.Gates, verdictMessage(v))
		}
	}
	return resp, nil
}

func (s *RolloutService) live(id string) (l *rollout.Live, err error) {
	ok := false
	s.store.View(func(st *store.State) { l, ok = st.Rollout(id) })
	if !ok {
		return nil, &store.Error{Kind: store.KindRollout, ID: id, Err: store.ErrNotFound}
	}
	return l, nil
}

// ListRollouts returns a page of rollouts.
func (s *RolloutService) ListRollouts(_ context.Context, req *pb.ListRolloutsRequest) (*pb.ListRolloutsResponse, error) {
	p, err := newPage(req.GetPageSize(), req.GetPageToken())
	if err != nil {
		return nil, statusOf(err)
	}
	resp := &pb.ListRolloutsResponse{}
	s.store.View(func(st *store.State) {
		resp.Rollouts, resp.NextPageToken = collect(p, st.Rollouts(p.after),
			func(l *rollout.Live) string { return l.ID },
			func(l *rollout.Live) bool { return !req.GetActive() || l.Active() },
			func(l *rollout.Live) *pb.Rollout { return rolloutMessage(&l.Rollout) })
	})
	return resp, nil
}

// ListRolloutRouters returns a page of the routers that a rollout means.
func (s *RolloutService) ListRolloutRouters(ctx context.Context, req *pb.ListRolloutRoutersRequest) (*pb.ListRolloutRoutersResponse, error) {
	p, err := newPage(req.GetPageSize(), req.GetPageToken())
	if err != nil {
		return nil, statusOf(err)
	}
	if err := conduct.CheckState(req.GetState()); err != nil {
		return nil, statusOf(badField("state", err))
	}
	l, err := s.live(req.GetId())
	if err != nil {
		return nil, statusOf(err)
	}
	resp := &pb.ListRolloutRoutersResponse{}
	resp.Routers, resp.NextPageToken = collect(p, s.routers(ctx, l, p.after, &resp.SilentControllers), (*pb.RolloutRouter).GetId,
		func(r *pb.RolloutRouter) bool { return req.GetState() == "" || req.GetState() == r.GetState() },
		func(r *pb.RolloutRouter) *pb.RolloutRouter { return r })
	return resp, nil
}

// CommandRollout gives a command.
func (s *RolloutService) CommandRollout(ctx context.Context, req *pb.CommandRolloutRequest) (*pb.CommandRolloutResponse, error) {
	c := rollout.Command(req.GetCommand())
	if c < rollout.Approve || c > rollout.Retry {
		return nil, statusOf(badField("command", fmt.Errorf("command: value %d is unknown", req.GetCommand())))
	}
	for try := 1; ; try++ {
		l, err := s.live(req.GetId())
		if err != nil {
			return nil, statusOf(err)
		}
		if want := plan.Revision(req.GetRevision()); want != 0 && want != l.Revision {
			return nil, statusOf(&store.Error{Kind: store.KindRollout, ID: l.ID, Err: store.ErrConflict, Want: want, Have: l.Revision})
		}
		next, effect, err := rollout.Do(l.Rollout, c, author(ctx), time.Now().UTC().Truncate(time.Microsecond))
		if err != nil {
			return nil, statusOf(err)
		}
		if next.Phase == rollout.Completed && next.Whole && next.Base != 0 {
			next, err = s.store.SettleRollout(ctx, next, l.Revision)
		} else {
			next, err = s.store.PutRollout(ctx, next, l.Revision, effect)
		}
		if err == nil {
			return &pb.CommandRolloutResponse{Rollout: rolloutMessage(&next)}, nil
		}
		// The leader may have gone on in between.
		if !errors.Is(err, store.ErrConflict) || req.GetRevision() != 0 || try == attempts {
			return nil, statusOf(err)
		}
	}
}

// StartRollout freezes the targets and begins.
func (s *RolloutService) StartRollout(ctx context.Context, req *pb.StartRolloutRequest) (*pb.StartRolloutResponse, error) {
	spec, err := toSpec(req.GetRollout())
	if err != nil {
		return nil, statusOf(badField("rollout", err))
	}
	spec.Author = author(ctx)
	if spec.ID == "" {
		spec.ID = newRolloutID(spec.Selector.Plan, time.Now())
	}
	resp := &pb.StartRolloutResponse{}
	if err := s.change(ctx, &spec, req.GetRollout().GetToRevision(), resp); err != nil {
		return nil, statusOf(err)
	}
	if err := spec.Validate(); err != nil {
		return nil, statusOf(badField("rollout", err))
	}
	made, places, seen, err := s.freeze(spec, req.GetIgnoreHold(), resp)
	if err != nil {
		return nil, statusOf(err)
	}
	if !req.GetValidateOnly() {
		if made, err = s.store.StartRollout(ctx, made, places, seen); err != nil {
			return nil, statusOf(err)
		}
	}
	resp.Rollout = rolloutMessage(&made)
	return resp, nil
}

// change fills in what a rollout of a plan sets, and tells it.
func (s *RolloutService) change(ctx context.Context, spec *rollout.Spec, to int64, resp *pb.StartRolloutResponse) error {
	name := spec.Selector.Plan
	if name == "" {
		if to != 0 {
			return badField("rollout", errors.New("to_revision: is for a plan, and none is said"))
		}
		return nil
	}
	var p plan.Plan
	var ok bool
	s.store.View(func(st *store.State) { p, ok = st.Plan(name) })
	if !ok {
		return &store.Error{Kind: store.KindPlan, ID: name, Err: store.ErrNotFound}
	}
	if to != 0 {
		if spec.Set.Fields != 0 {
			return badField("rollout", errors.New("to_revision and set: say one of them"))
		}
		all, err := s.store.PlanHistory(ctx, name)
		if err != nil {
			return err
		}
		i := slices.IndexFunc(all, func(p plan.Plan) bool { return int64(p.Revision) == to })
		if i < 0 {
			return badField("to_revision", fmt.Errorf("plan %s: revision %d is not in its history, which goes back to %d", name, to, all[len(all)-1].Revision))
		}
		for _, c := range plan.Diff(p.Link, all[i].Link) {
			if err := spec.Set.Parse(c.Field, c.After); err != nil {
				return err
			}
		}
		if spec.Note == "" {
			spec.Note = fmt.Sprintf("plan %s to revision %d", name, to)
		}
	}
	link := p.Link
	spec.Set.Over(&link)
	if err := link.Validate(); err != nil {
		return badField("rollout", fmt.Errorf("plan %s: %w", name, err))
	}
	for _, c := range plan.Diff(p.Link, link) {
		resp.Changes = append(resp.Changes, c.String())
	}
	if len(resp.Changes) == 0 && len(spec.Versions) == 0 {
		return badField("rollout", fmt.Errorf("plan %s: is like that already (revision %d)", name, p.Revision))
	}
	sel := spec.Selector
	spec.Base, spec.LinkHash = p.Revision, link.Hash()
	spec.Whole = len(sel.Labels) == 0 && !sel.Listed && len(spec.Versions) == 0
	return nil
}

// freeze puts the targets into steps, unless something is in the way. It
// returns the revision that it looked at.
func (s *RolloutService) freeze(spec rollout.Spec, ignoreHold bool, resp *pb.StartRolloutResponse) (made rollout.Rollout, places []uint64, seen plan.Revision, err error) {
	var seed [8]byte
	if _, err := rand.Read(seed[:]); err != nil {
		return made, nil, 0, err
	}
	s.store.View(func(st *store.State) {
		seen = st.Revision()
		if !ignoreHold {
			if err = held(st, &spec); err != nil {
				return
			}
		}
		var targets []rollout.Target
		if targets, err = conduct.Targets(st, s.hub, spec.Selector, spec.SiteLabel); err != nil {
			err = badField("selector", err)
			return
		}
		if places, err = spec.Freeze(targets, binary.BigEndian.Uint64(seed[:])); err != nil {
			err = badField("rollout", fmt.Errorf("rollout %s: %w", spec.ID, err))
			return
		}
		spec.Selector.Routers = nil
		resp.Targets = uint32(len(places))
		made = rollout.Rollout{Spec: spec, State: rollout.State{Phase: rollout.Waiting}}
		if spec.Approval {
			made.Phase = rollout.Approving
		}
		l, failed := rollout.NewLive(made, places)
		if failed != nil {
			err = failed
			return
		}
		if other := conduct.Blocked(st, l); other != "" {
			if !spec.Queued {
				err = fmt.Errorf("rollout %s: %w: rollout %s changes the same routers and has not ended; wait for it, queue this one behind it, or end it", spec.ID, errBusyRouters, other)
				return
			}
			resp.QueuedBehind = other
		}
	})
	return made, places, seen, err
}

// held returns an error if what a rollout sets was rolled back, and neither it
// nor the plan is other than then.
func held(st *store.State, spec *rollout.Spec) error {
	for l := range st.Rollouts("") {
		if rollout.Held(spec, &l.Rollout) {
			return fmt.Errorf("rollout %s: %w, by rollout %s: %s; change something of it, or say that it is to be tried again all the same", spec.ID, errHeld, l.ID, l.Reason)
		}
	}
	return nil
}

// newRolloutID makes an id for one that has none.
func newRolloutID(planName string, now time.Time) string {
	const most = 63 - len("-20060102-150405")
	if planName == "" {
		planName = "rollout"
	}
	return planName[:min(len(planName), most)] + now.UTC().Format("-20060102-150405")
}

// toSpec reads what an operator can say of a rollout.
func toSpec(m *pb.Rollout) (s rollout.Spec, err error) {
	if m == nil {
		return s, errors.New("rollout is missing")
	}
	sel := m.GetSelector()
	s = rollout.Spec{
		ID: m.GetId(), Versions: maps.Clone(m.GetVersions()), Note: m.GetNote(), Soak: rollout.DefaultSoak, AnswerTime: rollout.DefaultAnswerTime,
		MinSamples: m.GetMinSamples(), PerSite: int(m.GetPerSite()), SiteLabel: m.GetSiteLabel(), Zone: m.GetZone(), Approval: m.GetApproval(), Queued: m.GetQueued(),
		Selector: rollout.Selector{Plan: sel.GetPlan(), Labels: maps.Clone(sel.GetLabels()), Model: sel.GetModel(), Routers: sel.GetRouters()},
	}
	s.Selector.Listed = s.Selector.Model != "" || len(s.Selector.Routers) > 0
	if m.GetSoak() != nil {
		s.Soak = m.GetSoak().AsDuration()
	}
	if m.GetAnswerTime() != nil {
		s.AnswerTime = m.GetAnswerTime().AsDuration()
	}
	if s.MinSamples == 0 {
		s.MinSamples = rollout.DefaultMinSamples
	}
	if s.SiteLabel == "" {
		s.SiteLabel = rollout.DefaultSiteLabel
	}
	if s.Set, err = plan.ParseSettings(m.GetSet()); err != nil {
		return s, err
	}
	if s.Waves, err = parseEach(m.GetWaves(), rollout.ParseSize); err != nil {
		return s, err
	}
	if len(s.Waves) == 0 {
		s.Waves = rollout.DefaultWaves()
	}
	if s.Gates, err = parseEach(m.GetGates(), rollout.ParseGate); err != nil {
		return s, err
	}
	if s.OnFailure, err = rollout.ParseOnFailure(m.GetOnFailure()); err != nil {
		return s, err
	}
	if s.Windows, err = parseEach(m.GetWindows(), schedule.ParseWindow); err != nil {
		return s, err
	}
	if s.Start, err = schedule.ParseClock(m.GetStart()); err != nil {
		return s, fmt.Errorf("start %w", err)
	}
	return s, nil
}

func parseEach[T any](texts []string, parse func(string) (T, error)) (all []T, err error) {
	for _, text := range texts {
		v, err := parse(text)
		if err != nil {
			return nil, err
		}
		all = append(all, v)
	}
	return all, nil
}

func textsOf[T fmt.Stringer](all []T) (texts []string) {
	for _, v := range all {
		texts = append(texts, v.String())
	}
	return texts
}

func rolloutMessage(r *rollout.Rollout) *pb.Rollout {
	m := &pb.Rollout{
		Id: r.ID, Selector: &pb.RolloutSelector{Plan: r.Selector.Plan, Labels: r.Selector.Labels, Model: r.Selector.Model},
		Set: r.Set.Words(), Versions: r.Versions, Note: r.Note, Waves: textsOf(r.Waves), Soak: durationpb.New(r.Soak), AnswerTime: durationpb.New(r.AnswerTime),
		Gates: textsOf(r.Gates), MinSamples: r.MinSamples, OnFailure: r.OnFailure.String(), PerSite: uint32(r.PerSite), SiteLabel: r.SiteLabel,
		Windows: textsOf(r.Windows), Zone: r.Zone, Start: r.Start.String(), Approval: r.Approval, Queued: r.Queued,
		Revision: int64(r.Revision), Author: r.Author, CreateTime: wire.FromTime(r.Created), Phase: pb.RolloutPhase(r.Phase), PhaseTime: wire.FromTime(r.Since),
		Reason: r.Reason, Wave: uint32(r.Wave() + 1), OpenedSteps: uint32(r.Opened), Steps: uint32(len(r.Steps)), Approver: r.Approved,
		FinishTime: wire.FromTime(r.Finished), Seed: r.Seed,
	}
	if r.Touched > 0 {
		m.ReachedWave = uint32(r.Steps[r.Touched-1].Wave + 1)
	}
	for wave := range r.NumWaves() {
		m.Sizes = append(m.Sizes, uint32(r.Size(wave)))
	}
	for _, v := range r.Verdicts {
		m.Verdicts = append(m.Verdicts, verdictMessage(v))
	}
	return m
}

func verdictMessage(v rollout.Verdict) *pb.RolloutVerdict {
	return &pb.RolloutVerdict{
		Wave: uint32(v.Wave + 1), Gate: v.Gate, Result: v.Result.String(), Value: v.Value, Limit: v.Limit, Reference: v.Reference, Samples: v.Samples,
		Time: wire.FromTime(v.Time), Text: v.Why,
	}
}

func tallyMessage(t *rollout.Tally) *pb.RolloutTally {
	return &pb.RolloutTally{
		Members: uint32(t.Members), Offered: uint32(t.Offered), Applied: uint32(t.Applied), Clamped: uint32(t.Clamped), Rejected: uint32(t.Rejected),
		Unreachable: uint32(t.Unreachable), Already: uint32(t.Already), RolledBack: uint32(t.RolledBack),
		Pending: uint32(t.Pending), Lost: uint32(t.Lost), Restarted: uint32(t.Restarted),
	}
}
