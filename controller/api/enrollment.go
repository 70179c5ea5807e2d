package api

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/hashicorp/go-hclog"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/cakefleet/cakefleet/controller/identity"
	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/internal/plan"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// EnrollmentService gives routers their certificates. Whoever proves a key
// gets a certificate for the router whose record has that key, whatever became
// of an earlier answer or certificate; what a record's key is to be, a join
// token, an announced serial with its key, or an operator says. A serial alone
// is printed on a box and easy to guess, so that it never gives anything.
type EnrollmentService struct {
	pb.UnimplementedEnrollmentServiceServer

	store       *store.Store
	authorities identity.Source
	logger      hclog.Logger
	limits      *enrollLimits
	news        *news
	pending     *pendingQueue
}

// NewEnrollmentService returns the service that signs with the fleet's
// authorities.
func NewEnrollmentService(s *store.Store, authorities identity.Source, logger hclog.Logger) *EnrollmentService {
	return &EnrollmentService{store: s, authorities: authorities, logger: logger, limits: newEnrollLimits(), news: newNews(), pending: newPendingQueue()}
}

// applicant is who asks for a certificate, after it has proven its key.
type applicant struct {
	request *pb.EnrollRequest
	proof   identity.Request
	key     plan.Key
	serial  string // empty if it names none
	address string
	now     time.Time
}

// Enroll gives a certificate. Neither a token nor a certificate is ever logged.
func (e *EnrollmentService) Enroll(ctx context.Context, req *pb.EnrollRequest) (*pb.EnrollResponse, error) {
	a := applicant{request: req, serial: req.GetSerial(), address: peerAddress(ctx), now: time.Now()}
	if ok, wait := e.limits.connection(origin(a.address), a.now); !ok {
		return nil, tooMany(wait)
	}
	var err error
	if a.proof, err = identity.ParseRequest(req.GetCsr()); err != nil {
		return nil, statusOf(badField("csr", err))
	}
	a.key = a.proof.Key
	if store.ValidateSerial(a.serial) != nil {
		a.serial = ""
	}
	if ok, wait := e.limits.key(a.key, a.now); !ok {
		return nil, tooMany(wait)
	}
	var revocation store.Revocation
	var revoked bool
	e.store.View(func(st *store.State) { revocation, revoked = st.Revocation(a.key) })
	if revoked {
		if e.news.is(a.key, a.now) {
			e.logger.Warn("a revoked key asked for a certificate", "router", revocation.Router, "address", a.address)
		}
		return nil, revokedError(revocation, "enrolment")
	}
	if req.GetToken() != "" {
		return e.byToken(ctx, a)
	}
	return e.byKey(ctx, a)
}

// tooMany is the answer to who asks too often. The wait is spread, as many may
// get it at once.
func tooMany(wait time.Duration) error {
	wait = max(wait, time.Second)
	wait += rand.N(wait)
	return refusal(codes.ResourceExhausted, "TOO_MANY", wait.Round(time.Millisecond), "too many enrolments: try again in %v", wait.Round(time.Second))
}

// byToken trades a join token.
func (e *EnrollmentService) byToken(ctx context.Context, a applicant) (*pb.EnrollResponse, error) {
	token, err := identity.ParseToken(a.request.GetToken())
	if err != nil {
		return nil, status.Error(codes.Unauthenticated, err.Error())
	}
	if !e.authorities.Set().Has(token.Pin) {
		return nil, status.Errorf(codes.Unauthenticated, "join token %s: belongs to another fleet", token.ID)
	}
	router, err := e.store.UseToken(ctx, token.ID, token.Hash(), a.key, a.serial, a.now)
	if errors.Is(err, store.ErrToken) {
		// Perhaps this very router has used it and the answer was lost: then its
		// record has this key.
		if known, ok := e.routerOf(a.key); ok {
			return e.sign(a, known.ID, "key", "")
		}
	}
	if err != nil {
		return nil, statusOf(err)
	}
	e.pending.drop(a.key)
	return e.sign(a, router.ID, "token", token.ID)
}

// byKey answers who has no token: it is known, announced, or waits.
func (e *EnrollmentService) byKey(ctx context.Context, a applicant) (*pb.EnrollResponse, error) {
	if known, ok := e.routerOf(a.key); ok {
		e.pending.drop(a.key)
		return e.sign(a, known.ID, "key", "")
	}
	var x store.Serial
	e.store.View(func(st *store.State) { x, _ = st.Serial(a.serial) })
	if x.Key == a.key { // which is never zero
		router, err := e.store.Admit(ctx, store.Admission{
			Serial: x.Serial, Replace: true,
			Router: plan.Router{ID: x.Router, Subscriber: x.Subscriber, Labels: x.Labels, Serial: x.Serial, Key: a.key},
		})
		if err != nil {
			return nil, statusOf(err)
		}
		return e.sign(a, router.ID, "serial", "")
	}
	p := pendingRouter{key: a.key, serial: a.serial, model: word(a.request.GetModel()), address: a.address, seen: a.now, origin: origin(a.address)}
	if !e.pending.put(p) {
		return nil, tooMany(pendingLife / 2)
	}
	if e.news.is(a.key, a.now) {
		e.logger.Info("router waits for approval", "fingerprint", a.key.String(), "address", a.address)
	}
	return &pb.EnrollResponse{Waiting: &pb.Waiting{
		Fingerprint: a.key.String(), RetryAfter: durationpb.New(pendingEvery + rand.N(pendingEvery)),
	}}, nil
}

// word returns what a stranger says as it may be kept and shown.
func word(s string) string {
	if len(s) > maxWord {
		s = s[:maxWord]
	}
	return printable(s)
}

// routerOf returns the router whose key this is.
func (e *EnrollmentService) routerOf(k plan.Key) (r plan.Router, ok bool) {
	e.store.View(func(st *store.State) { r, ok = st.RouterOfKey(k) })
	return r, ok
}

// sign answers with a certificate. by says what it was given for.
func (e *EnrollmentService) sign(a applicant, router, by, token string) (*pb.EnrollResponse, error) {
	set := e.authorities.Set()
	signs := set.Shows()
	if a.request.GetSeveral() {
		signs = set.Signs()
	} else if t, err := identity.ParseToken(a.request.GetToken()); err == nil {
		signs = set.ByPin(t.Pin) // the one that the router trusts
	}
	cert, err := signs.SignRouter(a.proof.Public, router, a.now)
	if err != nil {
		return nil, statusOf(err)
	}
	facts := []any{"router", router, "by", by, "address", a.address}
	if token != "" {
		facts = append(facts, "token", token)
	}
	e.logger.Info("router enrolled", facts...)
	resp := &pb.EnrollResponse{RouterId: router, Certificate: cert, CaCertificate: signs.Certificate()}
	if a.request.GetSeveral() {
		resp.Authorities = set.Raw()
	}
	return resp, nil
}

// Renew gives a certificate that holds longer to who has one. The key stays: if
// it changed and the answer were lost, the router could not come back.
func (e *EnrollmentService) Renew(ctx context.Context, req *pb.RenewRequest) (*pb.RenewResponse, error) {
	who, err := caller(ctx)
	switch {
	case err != nil:
		return nil, status.Error(codes.Unauthenticated, err.Error())
	case who.Role != identity.RoleRouter:
		return nil, status.Error(codes.PermissionDenied, "only a router renews its certificate here")
	}
	now := time.Now()
	if ok, wait := e.limits.key(who.Key, now); !ok {
		return nil, tooMany(wait)
	}
	e.store.View(func(st *store.State) { err = standing(st, who) })
	if err != nil {
		return nil, err
	}
	proof, err := identity.ParseRequest(req.GetCsr())
	if err != nil {
		return nil, statusOf(badField("csr", err))
	}
	if proof.Key != who.Key {
		return nil, statusOf(badField("csr", fmt.Errorf("signing request: is not by the key of router %s; a new key needs a join token", who.Name)))
	}
	set := e.authorities.Set()
	signs := set.Signs()
	if !req.GetSeveral() {
		signs = set.Issuer(*connectionState(ctx)) // the one that the router trusts
	}
	cert, err := signs.SignRouter(proof.Public, who.Name, now)
	if err != nil {
		return nil, statusOf(err)
	}
	e.logger.Debug("certificate renewed", "router", who.Name)
	resp := &pb.RenewResponse{Certificate: cert, CaCertificate: signs.Certificate()}
	if req.GetSeveral() {
		resp.Authorities = set.Raw()
	}
	return resp, nil
}

// ConfirmAuthorities stores that a router trusts the authorities that the fleet
// has now. Any others are not stored, so that a router writes once for each set.
func (e *EnrollmentService) ConfirmAuthorities(ctx context.Context, req *pb.ConfirmAuthoritiesRequest) (*pb.ConfirmAuthoritiesResponse, error) {
	who, err := caller(ctx)
	switch {
	case err != nil:
		return nil, status.Error(codes.Unauthenticated, err.Error())
	case who.Role != identity.RoleRouter:
		return nil, status.Error(codes.PermissionDenied, "only a router says here what it trusts")
	}
	e.store.View(func(st *store.State) { err = standing(st, who) })
	if err != nil {
		return nil, err
	}
	set := e.authorities.Set()
	if id := set.ID(); !set.Moved() || string(req.GetAuthorities()) != string(id[:]) {
		return nil, status.Error(codes.FailedPrecondition, "these are not the authorities that the fleet has now")
	}
	if err := e.store.Confirm(ctx, who.Name, set.ID()); err != nil {
		return nil, statusOf(err)
	}
	return &pb.ConfirmAuthoritiesResponse{}, nil
}
