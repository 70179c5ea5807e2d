package store

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
)

// schema is the version of the records. It counts up only when older
// controllers would read a record wrongly; fields they don't know don't count.
const schema = 1

// The records are words and numbers with their units, so that etcdctl shows
// what an operator can read. A field that is absent has its default.
type (
	planRecord struct {
		Schema  int         `json:"schema"`
		Down    *linkRecord `json:"down"`
		Up      *linkRecord `json:"up"`
		Updated time.Time   `json:"updated"`
		By      string      `json:"by,omitempty"`
	}
	linkRecord struct {
		RateBPS     uint64 `json:"rate_bps"`
		Tins        string `json:"tins"`
		Flows       string `json:"flows"`
		AckFilter   string `json:"ack_filter"`
		Framing     string `json:"framing"`
		NAT         bool   `json:"nat"`
		Wash        bool   `json:"wash"`
		Ingress     bool   `json:"ingress"`
		Autorate    bool   `json:"autorate_ingress"`
		SplitGSO    bool   `json:"split_gso"`
		Raw         bool   `json:"raw"`
		Overhead    int16  `json:"overhead"`
		MPU         uint16 `json:"mpu"`
		MTU         uint16 `json:"mtu"`
		RTTUS       int64  `json:"rtt_us"`
		TargetUS    int64  `json:"target_us"`
		MemoryLimit uint32 `json:"memory_limit"`
		Fwmark      uint32 `json:"fwmark"`
	}
	subscriberRecord struct {
		Schema  int               `json:"schema"`
		Plan    string            `json:"plan"`
		Labels  map[string]string `json:"labels,omitempty"`
		Updated time.Time         `json:"updated"`

		Billing           map[string]string `json:"billing,omitempty"`
		BillingSuspension string            `json:"billing_suspension,omitempty"`
		Override          map[string]string `json:"override,omitempty"`
		Boost             map[string]string `json:"boost,omitempty"`
		BoostUntil        time.Time         `json:"boost_until,omitzero"`
		Suspension        string            `json:"suspension,omitempty"`

		// Revision at which an import made it count; absent: that of the key.
		Imported plan.Revision `json:"imported,omitempty"`
	}
	routerRecord struct {
		Schema     int               `json:"schema"`
		Subscriber string            `json:"subscriber,omitempty"`
		Labels     map[string]string `json:"labels,omitempty"`
		Serial     string            `json:"serial,omitempty"`
		Key        string            `json:"key,omitempty"`
		Quarantine *quarantineRecord `json:"quarantine,omitempty"`
		Updated    time.Time         `json:"updated"`
	}
	quarantineRecord struct {
		Since   time.Time      `json:"since"`
		Devices []deviceRecord `json:"devices"`
	}
	deviceRecord struct {
		Address string `json:"address"`
		BootID  string `json:"boot_id"`
		Model   string `json:"model,omitempty"`
	}
	tokenRecord struct {
		Schema     int               `json:"schema"`
		Router     string            `json:"router"`
		Subscriber string            `json:"subscriber,omitempty"`
		Labels     map[string]string `json:"labels,omitempty"`
		Batch      string            `json:"batch,omitempty"`
		SecretHash string            `json:"secret_hash"`
		Expires    time.Time         `json:"expires"`
	}
	serialRecord struct {
		Schema     int               `json:"schema"`
		Router     string            `json:"router"`
		Subscriber string            `json:"subscriber,omitempty"`
		Labels     map[string]string `json:"labels,omitempty"`
		Key        string            `json:"key,omitempty"`
		Updated    time.Time         `json:"updated"`
	}
	revocationRecord struct {
		Schema   int       `json:"schema"`
		Router   string    `json:"router,omitempty"`
		Operator string    `json:"operator,omitempty"`
		Reason   string    `json:"reason,omitempty"`
		Updated  time.Time `json:"updated"`
	}
)

// The words of the enumerations, by value.
var (
	tinWords       = []string{"diffserv3", "diffserv4", "diffserv8", "besteffort", "precedence", "cake3"}
	flowWords      = []string{"flowblind", "srchost", "dsthost", "hosts", "flows", "dual-srchost", "dual-dsthost", "triple-isolate"}
	ackFilterWords = []string{"no-ack-filter", "ack-filter", "ack-filter-aggressive"}
	framingWords   = []string{"noatm", "atm", "ptm"}
)

func encodePlan(p plan.Plan) []byte {
	return encode(planRecord{Schema: schema, Down: encodeLink(p.Link.Down), Up: encodeLink(p.Link.Up), Updated: p.Updated, By: p.Author})
}

func encodeSubscriber(s plan.Subscriber) []byte { return encodeImported(s, 0) }

// encodeImported returns the record of a subscriber that an import made count
// at a revision.
func encodeImported(s plan.Subscriber, rev plan.Revision) []byte {
	l := s.EditLayers()
	return encode(subscriberRecord{
		Schema: schema, Plan: s.Plan, Labels: s.Labels, Updated: s.Updated,
		Billing: l.Billing.Words(), BillingSuspension: l.BillingSuspension, Override: l.Override.Words(),
		Boost: l.Boost.Settings.Words(), BoostUntil: l.Boost.Until, Suspension: l.Suspension, Imported: rev,
	})
}

func encodeRouter(r plan.Router) []byte {
	record := routerRecord{
		Schema: schema, Subscriber: r.Subscriber, Labels: r.Labels, Serial: r.Serial, Key: encodeKey(r.Key), Updated: r.Updated,
	}
	if r.Quarantine != nil {
		record.Quarantine = &quarantineRecord{Since: r.Quarantine.Since}
		for _, d := range r.Quarantine.Devices {
			record.Quarantine.Devices = append(record.Quarantine.Devices, deviceRecord(d))
		}
	}
	return encode(record)
}

// encodeKey returns the hex digits of a key; empty for none.
func encodeKey(k plan.Key) string {
	if k == (plan.Key{}) {
		return ""
	}
	return k.String()
}

func decodeKey(digits string) (k plan.Key, err error) {
	if digits == "" {
		return k, nil
	}
	if err := decodeHash(k[:], digits); err != nil {
		return plan.Key{}, fmt.Errorf("key: %w", err)
	}
	return k, nil
}

func encodeToken(t Token) []byte {
	return encode(tokenRecord{
		Schema: schema, Router: t.Router, Subscriber: t.Subscriber, Labels: t.Labels, Batch: t.Batch,
		SecretHash: hex.EncodeToString(t.SecretHash[:]), Expires: t.Expires,
	})
}

func encode(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err) // strings, numbers and times of this century always have a form
	}
	return b
}

func decodePlan(name string, value []byte, rev plan.Revision) (plan.Plan, error) {
	def := encodeLink(engine.DefaultConfig())
	down, up := *def, *def
	r := planRecord{Down: &down, Up: &up}
	if err := decode(value, &r, &r.Schema); err != nil {
		return plan.Plan{}, err
	}
	var link plan.Link
	var err error
	if link.Down, err = decodeLink(r.Down); err != nil {
		return plan.Plan{}, fmt.Errorf("down: %w", err)
	}
	if link.Up, err = decodeLink(r.Up); err != nil {
		return plan.Plan{}, fmt.Errorf("up: %w", err)
	}
	return plan.Plan{Name: name, Link: link, Revision: rev, Updated: r.Updated, Author: r.By}, nil
}

func decodeSubscriber(id string, value []byte, rev plan.Revision) (plan.Subscriber, error) {
	var r subscriberRecord
	if err := decode(value, &r, &r.Schema); err != nil {
		return plan.Subscriber{}, err
	}
	if r.Imported != 0 {
		rev = r.Imported
	}
	l := plan.Layers{BillingSuspension: r.BillingSuspension, Boost: plan.Boost{Until: r.BoostUntil}, Suspension: r.Suspension}
	for _, s := range []struct {
		name  string
		words map[string]string
		to    *plan.Settings
	}{{"billing", r.Billing, &l.Billing}, {"override", r.Override, &l.Override}, {"boost", r.Boost, &l.Boost.Settings}} {
		var err error
		if *s.to, err = plan.ParseSettings(s.words); err != nil {
			return plan.Subscriber{}, fmt.Errorf("%s: %w", s.name, err)
		}
	}
	sub := plan.Subscriber{ID: id, Plan: r.Plan, Labels: r.Labels, Revision: rev, Updated: r.Updated}
	return sub.WithLayers(l), nil
}

func decodeRouter(id string, value []byte, rev plan.Revision) (plan.Router, error) {
	var r routerRecord
	if err := decode(value, &r, &r.Schema); err != nil {
		return plan.Router{}, err
	}
	router := plan.Router{ID: id, Subscriber: r.Subscriber, Labels: r.Labels, Serial: r.Serial, Revision: rev, Updated: r.Updated}
	var err error
	if router.Key, err = decodeKey(r.Key); err != nil {
		return plan.Router{}, err
	}
	if r.Quarantine != nil {
		router.Quarantine = &plan.Quarantine{Since: r.Quarantine.Since}
		for _, d := range r.Quarantine.Devices {
			router.Quarantine.Devices = append(router.Quarantine.Devices, plan.Device(d))
		}
	}
	return router, nil
}

func decodeToken(id string, value []byte, rev plan.Revision) (Token, error) {
	var r tokenRecord
	if err := decode(value, &r, &r.Schema); err != nil {
		return Token{}, err
	}
	t := Token{ID: id, Router: r.Router, Subscriber: r.Subscriber, Labels: r.Labels, Batch: r.Batch, Expires: r.Expires, Revision: rev}
	if err := decodeHash(t.SecretHash[:], r.SecretHash); err != nil {
		return Token{}, fmt.Errorf("secret_hash: %w", err)
	}
	return t, nil
}

func encodeSerial(s Serial) []byte {
	return encode(serialRecord{
		Schema: schema, Router: s.Router, Subscriber: s.Subscriber, Labels: s.Labels, Key: encodeKey(s.Key), Updated: s.Updated,
	})
}

func decodeSerial(serial string, value []byte, rev plan.Revision) (Serial, error) {
	var r serialRecord
	if err := decode(value, &r, &r.Schema); err != nil {
		return Serial{}, err
	}
	k, err := decodeKey(r.Key)
	return Serial{Serial: serial, Router: r.Router, Subscriber: r.Subscriber, Labels: r.Labels, Key: k, Revision: rev, Updated: r.Updated}, err
}

func encodeRevocation(r Revocation) []byte {
	return encode(revocationRecord{Schema: schema, Router: r.Router, Operator: r.Operator, Reason: r.Reason, Updated: r.Time})
}

func decodeRevocation(id string, value []byte, rev plan.Revision) (Revocation, error) {
	var r revocationRecord
	if err := decode(value, &r, &r.Schema); err != nil {
		return Revocation{}, err
	}
	k, err := plan.ParseKey(id)
	return Revocation{Key: k, Router: r.Router, Operator: r.Operator, Reason: r.Reason, Time: r.Updated, Revision: rev}, err
}

// decodeHash reads hex digits that fill hash.
func decodeHash(hash []byte, digits string) error {
	if len(digits) != hex.EncodedLen(len(hash)) {
		return fmt.Errorf("%d hex digits, not %d", len(digits), hex.EncodedLen(len(hash)))
	}
	_, err := hex.Decode(hash, []byte(digits))
	return err
}

func decode(value []byte, record any, version *int) error {
	if err := json.Unmarshal(value, record); err != nil {
		return fmt.Errorf("decode: %w", err)
	}
	if *version < 1 || *version > schema {
		return fmt.Errorf("decode: schema %d, this version knows 1 to %d", *version, schema)
	}
	return nil
}

func encodeLink(c engine.Config) *linkRecord {
	return &linkRecord{
		RateBPS:     uint64(c.Rate),
		Tins:        tinWords[c.Tins],
		Flows:       flowWords[c.Flows],
		AckFilter:   ackFilterWords[c.AckFilter],
		Framing:     framingWords[c.Framing],
		NAT:         c.NAT,
		Wash:        c.Wash,
		Ingress:     c.Ingress,
		Autorate:    c.Autorate,
		SplitGSO:    c.SplitGSO,
		Raw:         c.Raw,
		Overhead:    c.Overhead,
		MPU:         c.MPU,
		MTU:         c.MTU,
		RTTUS:       c.RTT.Microseconds(),
		TargetUS:    c.Target.Microseconds(),
		MemoryLimit: c.MemoryLimit,
		Fwmark:      c.Fwmark,
	}
}

func decodeLink(r *linkRecord) (engine.Config, error) {
	if r == nil {
		return engine.Config{}, fmt.Errorf("is null")
	}
	tins, flows := slices.Index(tinWords, r.Tins), slices.Index(flowWords, r.Flows)
	ackFilter, framing := slices.Index(ackFilterWords, r.AckFilter), slices.Index(framingWords, r.Framing)
	switch {
	case tins < 0:
		return engine.Config{}, fmt.Errorf("tins: %q is unknown", r.Tins)
	case flows < 0:
		return engine.Config{}, fmt.Errorf("flows: %q is unknown", r.Flows)
	case ackFilter < 0:
		return engine.Config{}, fmt.Errorf("ack_filter: %q is unknown", r.AckFilter)
	case framing < 0:
		return engine.Config{}, fmt.Errorf("framing: %q is unknown", r.Framing)
	}
	return engine.Config{
		Rate:        engine.BitsPerSecond(r.RateBPS),
		Tins:        engine.TinMode(tins),
		Flows:       engine.FlowMode(flows),
		AckFilter:   engine.AckFilter(ackFilter),
		Framing:     engine.Framing(framing),
		NAT:         r.NAT,
		Wash:        r.Wash,
		Ingress:     r.Ingress,
		Autorate:    r.Autorate,
		SplitGSO:    r.SplitGSO,
		Raw:         r.Raw,
		Overhead:    r.Overhead,
		MPU:         r.MPU,
		MTU:         r.MTU,
		RTT:         time.Duration(r.RTTUS) * time.Microsecond,
		Target:      time.Duration(r.TargetUS) * time.Microsecond,
		MemoryLimit: r.MemoryLimit,
		Fwmark:      r.Fwmark,
	}, nil
}

// revisionIn returns the revision of a record, which an import may have made
// count before it was stored under its key.
func revisionIn(it Item) plan.Revision {
	var r struct {
		Imported plan.Revision `json:"imported"`
	}
	if k, _, ok := parseKey(it.Key); ok && k == KindSubscriber && json.Unmarshal(it.Value, &r) == nil && r.Imported != 0 {
		return r.Imported
	}
	return plan.Revision(it.Revision)
}

// updated returns the time in a record of any kind; zero if it has none.
func updated(value []byte) time.Time {
	var r struct {
		Updated time.Time `json:"updated"`
	}
	if json.Unmarshal(value, &r) != nil {
		return time.Time{}
	}
	return r.Updated
}
