package controller

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/cakefleet/cakefleet/controller/identity"
	"github.com/cakefleet/cakefleet/controller/store"
)

// watchCertificates tells every day of certificates that end soon, until ctx
// ends.
func watchCertificates(ctx context.Context, all func() []identity.Certificate, logger hclog.Logger) {
	day := time.NewTicker(24 * time.Hour)
	defer day.Stop()
	for {
		for _, c := range all() {
			switch err := c.Ending(time.Now()); {
			case errors.Is(err, identity.ErrEnding):
				logger.Error("certificate", "kind", c.Purpose, "valid-until", c.Ends, "error", err)
			case err != nil:
				logger.Warn("certificate", "kind", c.Purpose, "valid-until", c.Ends, "error", err)
			}
		}
		select {
		case <-day.C:
		case <-ctx.Done():
			return
		}
	}
}

// authorities are those that a controller has in files, and what they make of
// the fleet's.
type authorities struct {
	config  Config
	logger  hclog.Logger
	files   []*identity.Authority // the first is the one that was asked for
	changed chan struct{}         // capacity 1
}

// authorities reads the files. The authority of the data folder counts beside
// one that was given: it is the one that took the place of that.
func (c *Controller) authorities(now time.Time) (*authorities, error) {
	a := &authorities{config: c.config, logger: c.logger, changed: make(chan struct{}, 1)}
	if c.config.CACert == "" {
		own, err := identity.Open(c.config.DataDir, now)
		if err != nil {
			return nil, err
		}
		a.files = []*identity.Authority{own}
		return a, nil
	}
	given, err := identity.Load(c.config.CACert, c.config.CAKey, now)
	if err == nil {
		a.files = append(a.files, given)
	}
	own, errOwn := identity.Load(filepath.Join(c.config.DataDir, "ca.pem"), filepath.Join(c.config.DataDir, "ca.key"), now)
	if errOwn == nil {
		a.files = append(a.files, own)
	}
	if len(a.files) == 0 {
		return nil, err
	}
	return a, nil
}

// pinText returns a pin as operators and the store have it.
func pinText(p identity.Pin) string { return base64.RawURLEncoding.EncodeToString(p[:]) }

// byPin returns the one that a pin names; nil if it is not in files.
func (a *authorities) byPin(pin string) *identity.Authority {
	for _, x := range a.files {
		if pinText(x.Pin()) == pin {
			return x
		}
	}
	return nil
}

// open returns the authority of an entry of the store, with the key from the
// files or with what they open.
func (a *authorities) open(e store.CAEntry) (*identity.Authority, error) {
	if x := a.byPin(e.Pin); x != nil {
		return x, nil
	}
	by := a.byPin(e.SealedBy)
	if by == nil {
		return nil, fmt.Errorf("authority %s: is not in files here, and neither is the one before it (%s): copy ca.pem and ca.key from the data folder of another controller", e.Pin, e.SealedBy)
	}
	x, err := by.Unseal(e.Cert, e.Key)
	if err != nil {
		return nil, err
	}
	a.files = append(a.files, x)
	return x, nil
}

// set returns the fleet's authorities as the store has them.
func (a *authorities) set(st *store.Store) (*identity.Set, error) {
	var ca store.CA
	var moved bool
	st.View(func(st *store.State) { ca, moved = st.CA() })
	if !moved {
		return a.files[0].Set(), nil
	}
	now, err := a.open(ca.Current)
	if err != nil {
		return nil, err
	}
	if ca.Next.Pin == "" {
		return identity.NewSet(now, nil, true)
	}
	next, err := a.open(ca.Next)
	if err != nil {
		return nil, err
	}
	return identity.NewSet(now, next, true)
}

// claim makes sure that all controllers on a store have the same authorities,
// and returns them.
func (a *authorities) claim(ctx context.Context, st *store.Store) (*identity.Trust, error) {
	first := pinText(a.files[0].Pin())
	var ca store.CA
	var moved bool
	st.View(func(st *store.State) { ca, moved = st.CA() })
	if moved && !a.config.ReplaceAuthority && (a.byPin(ca.Current.Pin) != nil || a.byPin(ca.Current.SealedBy) != nil) {
		first = ca.Current.Pin
	}
	err := st.ClaimAuthority(ctx, first, a.config.ReplaceAuthority)
	switch {
	case errors.Is(err, store.ErrAuthority):
		file := a.config.CACert
		if file == "" {
			file = filepath.Join(a.config.DataDir, "ca.pem")
		}
		return nil, fmt.Errorf("authority %s (pin %s): the %w. All controllers of a fleet need the same one: give this one the fleet's with --ca-cert and --ca-key, or put its ca.pem and ca.key into the data folder. "+
			"If the fleet is to have this one from now on, and every router to join again, start one controller with --replace-authority", file, first, err)
	case errors.Is(err, store.ErrFull): // it is of a fleet that did not write it down yet
		a.logger.Warn("the fleet's authority is not written down, so that a controller with another one is not refused", "error", err)
	case err != nil:
		return nil, err
	}
	if a.config.ReplaceAuthority { // what the store had of the one before is gone
		return identity.NewTrust(a.files[0].Set()), nil
	}
	set, err := a.set(st)
	if err != nil {
		return nil, err
	}
	a.adopt(set)
	return identity.NewTrust(set), nil
}

// adopt puts the authority that the doors show into the data folder, so that
// the controller starts when the one before has ended, and has the key that the
// next one is sealed with.
func (a *authorities) adopt(set *identity.Set) {
	if !set.Moved() || a.config.CACert != "" && pinText(set.Shows().Pin()) == pinText(a.files[0].Pin()) {
		return
	}
	if err := set.Shows().Adopt(a.config.DataDir, time.Now()); err != nil {
		a.logger.Error("the fleet's authority is not put into the data folder: it is in the store alone", "error", err)
		return
	}
	if a.config.CACert != "" {
		a.logger.Warn("the authority of --ca-cert is retired: the one of the data folder is used, leave --ca-cert and --ca-key out", "file", a.config.CACert)
	}
}

// tell is for store.OnChange.
func (a *authorities) tell(c store.Change) {
	if c.Kind != store.KindCA {
		return
	}
	select {
	case a.changed <- struct{}{}:
	default:
	}
}

// follow makes trust what the store has until ctx ends. told is called after
// each change.
func (a *authorities) follow(ctx context.Context, st *store.Store, trust *identity.Trust, told func()) {
	tickets := time.NewTicker(ticketsEvery)
	defer tickets.Stop()
	for {
		set, err := a.set(st)
		switch {
		case err != nil:
			a.logger.Error("the fleet's authorities have changed and this controller can't follow: it goes on with what it has", "error", err)
		case set.ID() != trust.Set().ID():
			if err := trust.Use(set); err != nil {
				a.logger.Error("the fleet's authorities have changed and this controller can't follow: it goes on with what it has", "error", err)
				break
			}
			a.adopt(set)
			told()
			a.logger.Info("the fleet's authorities have changed", "count", len(set.All()), "key", pinText(set.Signs().Pin()))
		}
		select {
		case <-a.changed:
		case now := <-tickets.C:
			if err := trust.RenewTickets(now); err != nil {
				a.logger.Error("session tickets", "error", err)
			}
		case <-ctx.Done():
			return
		}
	}
}

// ticketsEvery is how often the keys of session tickets are looked at, which
// change once a day.
const ticketsEvery = 10 * time.Minute
