package join

import (
	"bytes"
	"encoding/pem"
	"os"
	"path/filepath"
	"strings"
	"testing"

	agentidentity "github.com/cakefleet/cakefleet/agent/identity"
	"github.com/cakefleet/cakefleet/cmd/cakefleetctl/ctl"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// ca runs cakefleetctl ca as the first operator.
func (p *isp) ca(args ...string) (code int, text string) {
	var b bytes.Buffer
	code = ctl.Run(p.t.Context(), ctl.Config{
		Args:   append([]string{"--controller", p.ready.Operators.String(), "--credentials", p.ready.Credentials, "ca"}, args...),
		Stdout: &b, Stderr: &b,
	})
	return code, b.String()
}

func (p *isp) mustCA(args ...string) string {
	p.t.Helper()
	code, text := p.ca(args...)
	if code != 0 {
		p.t.Fatalf("ca %v: exit status %d: %s", args, code, text)
	}
	return text
}

func (p *isp) authority() *pb.GetAuthorityResponse {
	p.t.Helper()
	resp, err := p.joins.GetAuthority(p.t.Context(), &pb.GetAuthorityRequest{})
	if err != nil {
		p.t.Fatal(err)
	}
	return resp
}

// restart ends the controller and starts it on the same folder.
func (p *isp) restart() {
	p.t.Helper()
	p.stop()
	r, err := p.run(false)
	if err != nil {
		p.t.Fatal(err)
	}
	p.connect(r)
}

// trusts waits until the box has stored n authorities.
func (b *box) trusts(n int) *agentidentity.Identity {
	b.t.Helper()
	var id *agentidentity.Identity
	eventually(b.t, "another number of authorities on the router", func() bool {
		var err error
		id, err = agentidentity.Load(b.dir)
		return err == nil && len(id.Authorities) == n
	})
	return id
}

// TestAuthorityIsReplaced puts another authority in the place of the fleet's:
// one router is there all the time, one is away, one joins meanwhile with what
// was made before, one with what was made after. The controller is started anew
// between all steps. Nobody is visited and nothing is unshaped.
func TestAuthorityIsReplaced(t *testing.T) {
	p := newISP(t)
	here, away, early, late := p.box(), p.box(), p.box(), p.box()
	here.token, away.token, early.token = p.token("here"), p.token("away"), p.token("early")
	for _, b := range []*box{here, away} {
		b.start()
	}
	p.inSync("here")
	p.inSync("away")
	away.stop()
	first := p.authority().GetPin()

	if code, text := p.ca("retire"); code != 1 || !strings.Contains(text, "cakefleetctl ca rotate") {
		t.Fatalf("retire without another: exit status %d: %s", code, text)
	}
	p.mustCA("rotate")
	if code, text := p.ca("rotate"); code != 1 || !strings.Contains(text, "takes the place of") {
		t.Errorf("rotate twice: exit status %d: %s", code, text)
	}
	// The router that is there stores both, gets a certificate of the new one, and
	// says so.
	id := here.trusts(2)
	if err := id.Leaf.CheckSignatureFrom(id.Authorities[1]); err != nil {
		t.Errorf("the certificate is not of the new authority: %v", err)
	}
	eventually(t, "one of two has confirmed", func() bool { a := p.authority(); return a.GetRouters() == 2 && a.GetUnconfirmed() == 1 })
	if code, text := p.ca("retire"); code != 1 || !strings.Contains(text, "1 of 2 routers have not confirmed") || !strings.Contains(text, "away") {
		t.Errorf("retire too early: exit status %d: %s", code, text)
	}
	if text := p.mustCA("show", "--unconfirmed"); !strings.Contains(text, "away") || strings.Contains(text, "here") {
		t.Errorf("unconfirmed: %s", text)
	}

	p.restart()
	p.inSync("here")
	if a := p.authority(); len(a.GetAuthorities()) != 2 || a.GetPin() == first || a.GetUnconfirmed() != 1 {
		t.Errorf("after a start: %v", a)
	}
	// What was made before is good until the old one is retired, and what is made
	// now after that too.
	early.start()
	p.inSync("early")
	late.token = p.token("late")
	late.start()
	p.inSync("late")
	unused := p.token("unused")
	// Who was away finds the fleet.
	away.start()
	p.inSync("away")
	eventually(t, "all have confirmed", func() bool { a := p.authority(); return a.GetRouters() == 4 && a.GetUnconfirmed() == 0 })
	p.restart()

	p.mustCA("retire")
	for _, b := range []*box{here, away, early, late} {
		b.trusts(1)
	}
	p.connect(p.ready) // the operator's file is another one
	a := p.authority()
	if len(a.GetAuthorities()) != 1 || a.GetPin() == first {
		t.Errorf("after retire: %v", a)
	}
	p.restart()
	for name, b := range map[string]*box{"here": here, "away": away, "early": early, "late": late} {
		p.inSync(name)
		b.shapes()
		b.stop()
		b.start()
		p.inSync(name)
	}
	last := p.box()
	last.token = unused
	last.start()
	p.inSync("unused")
	eventually(t, "the audit log has both steps", func() bool {
		var b bytes.Buffer
		ctl.Run(t.Context(), ctl.Config{
			Args:   []string{"--controller", p.ready.Operators.String(), "--credentials", p.ready.Credentials, "audit", "list"},
			Stdout: &b, Stderr: &b,
		})
		return strings.Contains(b.String(), "RotateAuthority") && strings.Contains(b.String(), "RetireAuthority")
	})
	for _, b := range []*box{here, away, early, late, last} {
		if strings.Contains(b.log.String(), "another authority than the router's") {
			t.Error("a router met an authority that it does not know")
		}
	}
}

// TestRetireIsForced retires an authority while a router that knows the new one
// still has a certificate of the old one, and one does not know it: the first
// comes back by its key, the second needs a token.
func TestRetireIsForced(t *testing.T) {
	p := newISP(t)
	b, lost := p.box(), p.box()
	b.token, lost.token = p.token("home-1"), p.token("home-2")
	b.start()
	lost.start()
	p.inSync("home-1")
	p.inSync("home-2")
	lost.stop()
	old, err := agentidentity.Load(b.dir)
	if err != nil {
		t.Fatal(err)
	}
	p.mustCA("rotate")
	both := b.trusts(2)
	b.stop()
	both.Leaf = old.Leaf
	if err := both.Save(b.dir); err != nil {
		t.Fatal(err)
	}
	if code, text := p.ca("retire", "--force"); code != 1 || !strings.Contains(text, "is retired") {
		t.Fatalf("exit status %d: %s", code, text)
	}
	eventually(t, "the controller's authority is the new one", func() bool {
		raw, err := os.ReadFile(filepath.Join(p.dir, "ca.pem"))
		return err == nil && bytes.Contains(raw, pemOf(both.Authorities[1].Raw))
	})
	p.connect(p.ready)
	b.token = ""
	b.start()
	b.logs("the certificate is of an authority that is retired, ask for another")
	p.inSync("home-1")
	b.trusts(1)
	b.shapes()
	lost.start()
	lost.logs("the controller shows another authority than the router's")
	lost.shapes()
	lost.stop()
	lost.setToken(p.token("home-2"))
	lost.start()
	p.inSync("home-2")
}

// pemOf returns a certificate as a file has it.
func pemOf(der []byte) []byte {
	text := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	return text[:len(text)-1]
}
