// Package plan has the words that agent and controller share: links, plans,
// subscribers, routers, and what a router answers. They are plain data in
// native types; internal/wire maps them to and from the protocol.
package plan

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/cakefleet/cakefleet/engine"
)

// Limits on what an operator may ask for.
const (
	MaxRate = engine.BitsPerSecond(100_000_000_000) // bits/s

	maxName   = 63
	maxID     = 128
	maxLabels = 64
	maxLabel  = 256
)

// Revision is the etcd revision of the newest input of a desired state; 0
// means none.
type Revision int64

// Link is what one router's WAN interface does: the engine's configuration in
// both directions.
type Link struct {
	Down engine.Config // from the provider to the subscriber
	Up   engine.Config // from the subscriber to the provider
}

// DefaultLink returns what a new plan starts from: sch_cake's defaults, but each
// home host gets the same share of the line whatever number of flows or servers
// it has. sch_cake's triple-isolate shares by the flow where two hosts use one
// server.
func DefaultLink() Link {
	l := Link{Down: engine.DefaultConfig(), Up: engine.DefaultConfig()}
	l.Down.Flows, l.Down.NAT = engine.DualDstHost, true
	l.Up.Flows, l.Up.NAT = engine.DualSrcHost, true
	return l
}

// Validate returns an error that names the direction and the field.
func (l Link) Validate() error {
	return errors.Join(validateDirection("down", l.Down), validateDirection("up", l.Up))
}

func validateDirection(name string, c engine.Config) error {
	if c.Rate > MaxRate {
		return fmt.Errorf("%s rate %d bit/s: above the limit of 100 Gbit/s", name, c.Rate)
	}
	if err := c.Validate(); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

// Plan is what subscribers can buy: rates and shaping options under a name.
type Plan struct {
	Name     string
	Link     Link
	Revision Revision // of the last change; 0 before it is stored
	Updated  time.Time
	Author   string // operator who made the last change; empty if not known
}

// Validate returns an error that names the field.
func (p Plan) Validate() error {
	if err := ValidateName("plan", p.Name); err != nil {
		return err
	}
	if err := p.Link.Validate(); err != nil {
		return fmt.Errorf("plan %s: %w", p.Name, err)
	}
	return nil
}

// Subscriber is who a router serves. It refers to a plan by name.
type Subscriber struct {
	ID       string
	Plan     string
	Labels   map[string]string
	Layers   *Layers // what changes the plan for this subscriber; nil: nothing. Not to be changed
	Revision Revision
	Updated  time.Time
}

// EditLayers returns a copy of the layers to change.
func (s Subscriber) EditLayers() Layers {
	if s.Layers == nil {
		return Layers{}
	}
	return *s.Layers
}

// WithLayers returns the subscriber with other layers.
func (s Subscriber) WithLayers(l Layers) Subscriber {
	s.Layers = nil
	if l != (Layers{}) {
		s.Layers = &l
	}
	return s
}

// Plans returns the names of all plans that the subscriber refers to, its own
// first and each once.
func (s Subscriber) Plans() []string {
	if s.Layers == nil || s.Layers.Suspension == "" && s.Layers.BillingSuspension == "" {
		return []string{s.Plan}
	}
	names := []string{s.Plan}
	for _, name := range []string{s.Layers.Suspension, s.Layers.BillingSuspension} {
		if name != "" && !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return names
}

// Validate returns an error that names the field. It does not ask whether the
// plan exists.
func (s Subscriber) Validate() error {
	if err := ValidateID("subscriber", s.ID); err != nil {
		return err
	}
	if err := ValidateName("plan", s.Plan); err != nil {
		return fmt.Errorf("subscriber %s: %w", s.ID, err)
	}
	if err := s.Layers.Validate(); err != nil {
		return fmt.Errorf("subscriber %s: %w", s.ID, err)
	}
	if err := ValidateLabels(s.Labels); err != nil {
		return fmt.Errorf("subscriber %s: %w", s.ID, err)
	}
	return nil
}

// ValidateLabels checks all labels of a record.
func ValidateLabels(labels map[string]string) error {
	if len(labels) > maxLabels {
		return fmt.Errorf("%d labels, at most %d are allowed", len(labels), maxLabels)
	}
	for k, v := range labels {
		if err := ValidateLabel(k, v); err != nil {
			return err
		}
	}
	return nil
}

// ValidateLabel checks one label: its name as ValidateName does, and that its
// value is at most 256 bytes that can be printed.
func ValidateLabel(name, value string) error {
	if err := ValidateName("label", name); err != nil {
		return err
	}
	if len(value) > maxLabel {
		return fmt.Errorf("label %s has %d bytes, at most %d are allowed", name, len(value), maxLabel)
	}
	if i := strings.IndexFunc(value, func(r rune) bool { return r < ' ' || r == 0x7f || r == '\uFFFD' }); i >= 0 {
		return fmt.Errorf("label %s has a character at byte %d that can't be printed", name, i+1)
	}
	return nil
}

// Router is one device.
type Router struct {
	ID         string
	Subscriber string            // whom it serves; empty if nobody
	Labels     map[string]string // not to be changed
	Serial     string            // that it said when it joined; proves nothing
	Key        Key               // what its certificate must be for; zero: nothing opens a session
	Quarantine *Quarantine       // nil: there is one of it, as far as is known
	Revision   Revision
	Updated    time.Time
}

// Quarantine says that two live devices had one key. It is not to be changed.
type Quarantine struct {
	Since   time.Time
	Devices []Device // the one that was connected first is first
}

// Device is one of several with one key.
type Device struct {
	Address string
	BootID  string
	Model   string
}

// Key stands for the public key of a router: SHA-256 of its
// SubjectPublicKeyInfo in DER.
type Key [sha256.Size]byte

// String returns the key's fingerprint as operators see it: hex digits.
func (k Key) String() string { return hex.EncodeToString(k[:]) }

// ParseKey reads a fingerprint. Colons and upper case are fine.
func ParseKey(fingerprint string) (k Key, err error) {
	b, err := hex.DecodeString(strings.ReplaceAll(fingerprint, ":", ""))
	if err != nil || len(b) != len(k) {
		return Key{}, fmt.Errorf("fingerprint %.80q: must be %d hex digits, as cakefleet-agent --print-key says", fingerprint, 2*len(k))
	}
	return Key(b), nil
}

// Validate returns an error that names the field.
func (r Router) Validate() error {
	if err := ValidateName("router", r.ID); err != nil {
		return err
	}
	if err := ValidateLabels(r.Labels); err != nil {
		return fmt.Errorf("router %s: %w", r.ID, err)
	}
	if r.Subscriber == "" {
		return nil
	}
	if err := ValidateID("subscriber", r.Subscriber); err != nil {
		return fmt.Errorf("router %s: %w", r.ID, err)
	}
	return nil
}

// Desired is the whole state that one router should run.
type Desired struct {
	Revision Revision
	Hash     string // Link.Hash as the controller computed it, of an expiry too if there is one; empty if Link is nil
	Link     *Link  // nil: nothing is shaped
	Reason   string // why Link is nil
	Since    time.Time

	// ExpiresAfter is when the router runs Then instead, with or without a
	// controller; 0: never.
	ExpiresAfter time.Duration
	Then         *Link
	LinkHash     string    // Link.Hash, if Hash is another one
	Changes      time.Time // when there will be another desired state without any change of records; zero: never

	Known Known // what the store knew when it said so
}

// EffectiveHash returns the hash that the data plane has if it runs d.
func (d Desired) EffectiveHash() string {
	if d.LinkHash != "" {
		return d.LinkHash
	}
	return d.Hash
}

// Outcome is a router's answer to a desired state.
type Outcome uint8

// The answers. Nothing is ever guessed as applied.
const (
	OutcomeNone     Outcome = iota // no answer, only news
	OutcomeApplied                 // runs as desired
	OutcomeClamped                 // runs with the values in Clamps
	OutcomeRejected                // refused; what ran before still runs
)

// String returns the word that operators see.
func (o Outcome) String() string {
	switch o {
	case OutcomeApplied:
		return "applied"
	case OutcomeClamped:
		return "clamped"
	case OutcomeRejected:
		return "rejected"
	default:
		return "none"
	}
}

// Clamp is one value that a router could not run as desired.
type Clamp struct {
	Field     string // such as "down.rate"
	Desired   string
	Effective string
	Reason    string
}

// Condition is one lasting fact about a router.
type Condition struct {
	Type    string // such as "ClockOK" or "Degraded"
	Status  bool
	Reason  string // one word for programs
	Message string // a sentence for people
}

// Status is what a router says it runs.
type Status struct {
	Outcome       Outcome
	Applied       Revision
	AppliedHash   string // as the controller gave it
	EffectiveHash string // of Effective; empty if nothing is shaped
	Effective     *Link  // read back from the data plane
	Clamps        []Clamp
	Error         string // why it was refused
	Conditions    []Condition
	Dataplane     string // that runs; empty: none was opened yet
}

// ValidateName checks names of plans, routers and labels: 1 to 63 of a-z, 0-9,
// "-", "_" and ".", beginning with a letter or digit. what names the thing in
// the error.
func ValidateName(what, name string) error {
	if name == "" {
		return fmt.Errorf("%s name is empty", what)
	}
	if len(name) > maxName {
		return fmt.Errorf("%s name %.20q...: %d characters, at most %d are allowed", what, name, len(name), maxName)
	}
	for i, r := range name {
		letter := r >= 'a' && r <= 'z' || r >= '0' && r <= '9'
		if !letter && (i == 0 || r != '-' && r != '_' && r != '.') {
			return fmt.Errorf(`%s name %q: %q at position %d; allowed are a-z, 0-9, "-", "_" and ".", beginning with a letter or digit`, what, name, r, i+1)
		}
	}
	return nil
}

// ValidateID checks ids that come from other systems, such as billing numbers:
// 1 to 128 printable ASCII characters without space, "/" and ",".
func ValidateID(what, id string) error {
	if id == "" {
		return fmt.Errorf("%s id is empty", what)
	}
	if len(id) > maxID {
		return fmt.Errorf("%s id %.20q...: %d characters, at most %d are allowed", what, id, len(id), maxID)
	}
	for i, r := range id {
		if r <= ' ' || r > '~' || r == '/' || r == ',' {
			return fmt.Errorf(`%s id %q: %q at position %d; allowed are printable ASCII characters without space, "/" and ","`, what, id, r, i+1)
		}
	}
	return nil
}
