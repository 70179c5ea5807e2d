package controller

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/cakefleet/cakefleet/controller/identity"
	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/controller/store/storetest"
)

// member is what a controller has of the authorities.
type member struct {
	config Config
	trust  *identity.Trust
	moved  chan struct{}
	store  *store.Store
}

// runMember starts one on a KV that others share, until the test or stop ends.
func runMember(t *testing.T, kv store.KV, config Config) (m *member, stop func()) {
	t.Helper()
	m = &member{config: config, moved: make(chan struct{}, 10)}
	files, err := (&Controller{config: config, logger: hclog.NewNullLogger()}).authorities(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	m.store = storetest.Start(t, kv, store.Config{}, files.tell)
	if m.trust, err = files.claim(t.Context(), m.store); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		files.follow(ctx, m.store, m.trust, func() { m.moved <- struct{}{} })
	}()
	return m, func() { cancel(); <-done }
}

// folder is a data folder with the same authority as others have.
func folder(t *testing.T, from string) string {
	t.Helper()
	dir := t.TempDir()
	for _, name := range []string{"ca.pem", "ca.key"} {
		text, err := os.ReadFile(filepath.Join(from, name))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// One controller is told to change the authority; the others follow by what the
// store has, also one that was down all the time and one whose authority was
// given in files.
func TestSeveralControllersFollow(t *testing.T) {
	first := t.TempDir()
	a, err := identity.Open(first, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	given := folder(t, first)
	kv := storetest.NewKV()
	one, stopOne := runMember(t, kv, Config{DataDir: first})
	two, stopTwo := runMember(t, kv, Config{DataDir: t.TempDir(), CACert: filepath.Join(given, "ca.pem"), CAKey: filepath.Join(given, "ca.key")})
	defer stopTwo()
	down := Config{DataDir: folder(t, first)}

	b, err := identity.NewAuthority(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	key, err := a.Seal(b)
	if err != nil {
		t.Fatal(err)
	}
	entry := store.CAEntry{Pin: pinText(b.Pin()), Cert: b.Certificate(), Key: key, SealedBy: pinText(a.Pin())}
	ca, err := one.store.PutCA(t.Context(), store.CA{Current: store.CAEntry{Pin: pinText(a.Pin())}, Next: entry}, 0)
	if err != nil {
		t.Fatal(err)
	}
	check := func(m *member, shows, signs identity.Pin) {
		t.Helper()
		if s := m.trust.Set(); s.Shows().Pin() != shows || s.Signs().Pin() != signs {
			t.Errorf("%s shows %s and signs with %s", m.config.DataDir, pinText(s.Shows().Pin()), pinText(s.Signs().Pin()))
		}
	}
	for _, m := range []*member{one, two} {
		<-m.moved
		check(m, a.Pin(), b.Pin())
	}
	stopOne() // it is down while the old one is retired
	ca.Current, ca.Next = ca.Next, store.CAEntry{}
	if _, err := two.store.PutCA(t.Context(), ca, ca.Revision); err != nil {
		t.Fatal(err)
	}
	<-two.moved
	check(two, b.Pin(), b.Pin())
	for _, config := range []Config{{DataDir: first}, down, two.config} {
		m, stop := runMember(t, kv, config)
		check(m, b.Pin(), b.Pin())
		stop()
		if own, err := identity.Open(config.DataDir, time.Now()); err != nil || own.Pin() != b.Pin() {
			t.Errorf("%s: the folder does not have the new authority, %v", config.DataDir, err)
		}
	}

	// Another fleet's controller is refused, unless it is told to replace it.
	files, err := (&Controller{config: Config{DataDir: t.TempDir()}, logger: hclog.NewNullLogger()}).authorities(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := files.claim(t.Context(), two.store); err == nil {
		t.Error("an authority of another fleet is let in")
	}
	files.config.ReplaceAuthority = true
	if trust, err := files.claim(t.Context(), two.store); err != nil || trust.Set().Signs().Pin() != files.files[0].Pin() {
		t.Errorf("replace: %v", err)
	}
}
