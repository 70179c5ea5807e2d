package api

import (
	"bytes"
	"context"
	"encoding/json"
	"slices"
	"strings"

	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/internal/plan"
	"github.com/cakefleet/cakefleet/internal/wire"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// AuditService tells who changed what.
type AuditService struct {
	pb.UnimplementedAuditServiceServer

	store *store.Store
}

// NewAuditService returns the service on s.
func NewAuditService(s *store.Store) *AuditService { return &AuditService{store: s} }

// ListAuditEntries returns a page of changes.
func (s *AuditService) ListAuditEntries(ctx context.Context, req *pb.ListAuditEntriesRequest) (*pb.ListAuditEntriesResponse, error) {
	p, err := newPage(req.GetPageSize(), req.GetPageToken())
	if err != nil {
		return nil, statusOf(err)
	}
	q := auditQuery{who: req.GetWho()}
	q.kind, q.id, _ = strings.Cut(req.GetWhat(), "/")
	since := wire.ToTime(req.GetSince())
	entries, next, err := s.store.AuditLog(ctx, p.after, p.size, since, q.wants)
	if err != nil {
		return nil, statusOf(err)
	}
	resp := &pb.ListAuditEntriesResponse{}
	for _, e := range entries {
		resp.Entries = append(resp.Entries, auditMessage(e))
	}
	if next != "" {
		resp.NextPageToken = pageToken(next)
	}
	return resp, nil
}

// auditQuery is which entries are asked for.
type auditQuery struct{ who, kind, id string }

func (q auditQuery) wants(e store.AuditEntry) bool {
	if q.who != "" && e.Actor.Name != q.who {
		return false
	}
	return q.kind == "" || slices.ContainsFunc(e.Changes, func(c store.AuditChange) bool {
		return string(c.Kind) == q.kind && (q.id == "" || c.ID == q.id)
	})
}

// UndoChange makes everything that an entry changed what it was before.
func (s *AuditService) UndoChange(ctx context.Context, req *pb.UndoChangeRequest) (*pb.UndoChangeResponse, error) {
	changes, err := s.store.Undo(ctx, plan.Revision(req.GetId()), req.GetValidateOnly())
	if err != nil {
		return nil, statusOf(err)
	}
	resp := &pb.UndoChangeResponse{}
	for _, c := range changes {
		resp.Changes = append(resp.Changes, changeOf(c))
	}
	return resp, nil
}

func auditMessage(e store.AuditEntry) *pb.AuditEntry {
	m := &pb.AuditEntry{
		Id: int64(e.ID), Time: wire.FromTime(e.Time), Who: e.Actor.Name, Role: e.Role, Via: e.Actor.Via,
		Address: e.Actor.Address, Call: e.Actor.Call,
		Added: uint32(e.Added), Changed: uint32(e.Changed), Removed: uint32(e.Removed), Lasting: e.Lasting(),
	}
	for _, c := range e.Changes {
		m.Changes = append(m.Changes, changeOf(c))
	}
	return m
}

func changeOf(c store.AuditChange) *pb.AuditChange {
	m := &pb.AuditChange{Kind: string(c.Kind), Id: c.ID, Old: string(c.Old), New: string(c.New)}
	before, after := map[string]string{}, map[string]string{}
	flatten(before, "", c.Old)
	flatten(after, "", c.New)
	paths := map[string]bool{}
	for _, fields := range []map[string]string{before, after} {
		for path := range fields {
			// What every record has says nothing about the change.
			if path != "updated" && path != "schema" && path != "by" && path != "imported" && before[path] != after[path] {
				paths[path] = true
			}
		}
	}
	for path := range paths {
		m.Fields = append(m.Fields, &pb.AuditField{Field: path, Old: before[path], New: after[path]})
	}
	slices.SortFunc(m.Fields, func(a, b *pb.AuditField) int { return strings.Compare(a.GetField(), b.GetField()) })
	return m
}

// flatten puts each value in a JSON text under its path.
func flatten(fields map[string]string, path string, text json.RawMessage) {
	var object map[string]json.RawMessage
	if len(text) == 0 {
		return
	}
	if text[0] != '{' || json.Unmarshal(text, &object) != nil {
		fields[path] = string(bytes.TrimSpace(text))
		return
	}
	for name, v := range object {
		if path != "" {
			name = path + "." + name
		}
		flatten(fields, name, v)
	}
}
