package store

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"
)

// authorityKey names the fleet's authority, so that two controllers with
// authorities of their own never work on one store: each would refuse the
// other's routers.
const authorityKey = Prefix + "authority"

// ErrAuthority means that the store is of a fleet with another authority.
var ErrAuthority = errors.New("store is of a fleet with another authority")

type authorityRecord struct {
	Pin   string    `json:"pin"`
	Since time.Time `json:"since"`
}

// ClaimAuthority makes the authority that pin names the fleet's, if it has none
// yet or replace is true. Errors: ErrAuthority if it has another one, which the
// error names with since when; what a write brings.
func (s *Store) ClaimAuthority(ctx context.Context, pin string, replace bool) error {
	for range attempts {
		items, _, err := s.kv.Get(ctx, authorityKey)
		if err != nil {
			return fmt.Errorf("read the fleet's authority: %w", err)
		}
		var have int64
		if len(items) > 0 {
			have = items[0].Revision
			var r authorityRecord
			if err := json.Unmarshal(items[0].Value, &r); err != nil {
				return fmt.Errorf("%s: %w", authorityKey, err)
			}
			switch {
			case r.Pin == pin:
				return nil
			case !replace:
				return fmt.Errorf("%w: pin %s since %s", ErrAuthority, r.Pin, r.Since.Format(time.RFC3339))
			}
		}
		value, err := json.Marshal(authorityRecord{Pin: pin, Since: stamp()})
		if err != nil {
			return err
		}
		ops := []Op{{authorityKey, value}}
		if have > 0 { // what the one before was to be replaced by is over
			ops = append(ops, Op{key(KindCA, FleetCA), nil})
		}
		res, err := s.kv.Txn(ctx, []Compare{{authorityKey, Equal, have}}, ops)
		if err != nil {
			return fmt.Errorf("write the fleet's authority: %w", err)
		}
		if res.OK {
			return nil
		}
	}
	return fmt.Errorf("write the fleet's authority: %w", errBusy)
}
