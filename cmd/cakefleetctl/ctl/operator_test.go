package ctl_test

import (
	"encoding/json"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cakefleet/cakefleet/cmd/cakefleetctl/ctl"
	"github.com/cakefleet/cakefleet/controller"
	"github.com/cakefleet/cakefleet/controller/access"
	"github.com/cakefleet/cakefleet/controller/access/accesstest"
	"github.com/cakefleet/cakefleet/controller/controllertest"
	"github.com/cakefleet/cakefleet/controller/identity"
)

// realController runs a controller, with etcd and all, until the test ends.
func realController(t *testing.T) (controller.Ready, map[string]string) {
	t.Helper()
	r := controllertest.Start(t, controllertest.Config(t.TempDir())).Ready
	return r, map[string]string{"CAKEFLEET_CONTROLLER": r.Operators.String(), "CAKEFLEET_CREDENTIALS": r.Credentials}
}

// want runs a command and checks its status and what it says on both outputs.
func want(t *testing.T, env map[string]string, code int, says string, args ...string) string {
	t.Helper()
	r := run(t, env, args...)
	if r.code != code || !strings.Contains(r.stdout+r.stderr, says) {
		t.Fatalf("%v: status %d, want %d and %q in:\n%s%s", args, r.code, code, says, r.stdout, r.stderr)
	}
	return r.stdout
}

// What an admin does with operators, on a real controller: fleet.md §5, tasks
// 16 (who changed this, undo it) and 20 (show a junior, hidden by the server).
func TestOperatorsDay(t *testing.T) {
	r, admin := realController(t)
	want(t, admin, 0, "admin, admin, by certificate, from 127.0.0.1", "whoami")
	want(t, admin, 0, "plan gold", "plan", "set", "gold", "--down", "115mbit", "--up", "12mbit")
	want(t, admin, 0, "", "subscriber", "set", "4711", "--plan", "gold", "--label", "site=north", "--label", "name=Ada Lovelace")

	// A viewer by token, with nothing but the token.
	want(t, admin, 0, "operator noc is viewer", "operator", "create", "noc", "--role", "viewer")
	token := strings.TrimSpace(want(t, admin, 0, "cfo1.noc.", "operator", "token", "noc", "--note", "grafana"))
	viewer := map[string]string{"CAKEFLEET_CONTROLLER": r.Operators.String(), "CAKEFLEET_TOKEN": token}
	want(t, viewer, 0, "noc, viewer, by token ", "whoami")
	seen := want(t, viewer, 0, "north", "subscriber", "list", "-o", "json")
	if strings.Contains(seen, "Lovelace") || !strings.Contains(seen, "(hidden)") {
		t.Errorf("viewer sees %s", seen)
	}
	want(t, admin, 0, "Lovelace", "subscriber", "list", "-o", "json")
	want(t, viewer, 1, "noc is viewer here", "plan", "set", "gold", "--down", "1mbit")
	want(t, viewer, 1, "noc is viewer here", "audit", "list")
	want(t, viewer, 1, "noc is viewer here", "operator", "list")

	// An operator by certificate whose key was made here.
	want(t, admin, 0, "", "operator", "create", "alice", "--role", "operator")
	file := filepath.Join(t.TempDir(), "alice.pem")
	want(t, admin, 0, "credentials of alice are in", "operator", "certificate", "alice", "--out", file)
	want(t, admin, ctl.ExitFailed, "exists", "operator", "certificate", "alice", "--out", file)
	alice := map[string]string{"CAKEFLEET_CONTROLLER": r.Operators.String(), "CAKEFLEET_CREDENTIALS": file}
	want(t, alice, 0, "alice, operator, by certificate", "whoami")
	want(t, alice, 0, "", "plan", "set", "gold", "--down", "200mbit")
	want(t, alice, 1, "this is for an admin", "operator", "set", "alice", "--role", "admin")

	// Who changed this, undo it.
	log := want(t, admin, 0, "down.rate_bps 115000000 -> 200000000", "audit", "list", "--what", "plan/gold", "--who", "alice", "--since", "1000000h")
	id := regexp.MustCompile(`(?m)^(\d+)`).FindString(log)
	want(t, alice, 0, "down.rate_bps 200000000 -> 115000000", "undo", id, "--dry-run")
	want(t, alice, 0, "down.rate_bps 200000000 -> 115000000", "undo", id)
	want(t, admin, 0, "115Mbit", "plan", "list")
	want(t, alice, 1, "was changed since: by alice", "undo", id)
	if all := want(t, admin, 0, "UndoChange", "audit", "list", "-o", "json"); strings.Contains(all, token) || strings.Contains(all, "PRIVATE") {
		t.Error("the audit log has a secret")
	}

	// fleet.md §4 item 38: a rollback is a new revision, and told.
	want(t, alice, 0, "", "plan", "set", "gold", "--down", "300mbit")
	want(t, alice, 0, "", "plan", "rollback", "gold", "--to", strconv.Itoa(firstRevision(t, admin)))
	want(t, admin, 0, "RollbackPlan", "audit", "list", "--what", "plan/gold", "--most", "1")
	want(t, admin, 0, "115Mbit", "plan", "list")

	// A token that may less than its operator.
	small := strings.TrimSpace(want(t, admin, 0, "", "operator", "token", "alice", "--role", "viewer"))
	want(t, map[string]string{"CAKEFLEET_CONTROLLER": r.Operators.String(), "CAKEFLEET_TOKEN": small}, 0, "alice, viewer", "whoami")

	// Out, at once.
	list := want(t, admin, 0, "grafana", "operator", "show", "noc")
	want(t, admin, 0, "revoked", "operator", "revoke", "noc", regexp.MustCompile(`(?m)^([a-z2-7]{10})  `).FindStringSubmatch(list)[1])
	want(t, viewer, 1, "unknown, revoked or ended", "whoami")
	want(t, admin, 0, "deleted", "operator", "delete", "alice")
	want(t, alice, 1, "this certificate is revoked", "whoami")
	want(t, admin, 1, "is the last admin", "operator", "delete", "admin")
	want(t, admin, 1, "is the last admin", "operator", "set", "admin", "--role", "operator")

	// Clear words.
	want(t, map[string]string{"CAKEFLEET_CONTROLLER": r.Operators.String(), "CAKEFLEET_TOKEN": "secret"}, 1, "must be \"cfo1.\"", "whoami")
	want(t, admin, 2, "must be viewer, operator, admin", "operator", "create", "x", "--role", "root")
	want(t, admin, 2, `must be a number from "cakefleetctl audit list"`, "undo", "yesterday")
	want(t, admin, 1, "change 1: not found", "undo", "1")
	want(t, admin, 1, "does not come back by undoing", "undo", regexp.MustCompile(`(?m)^(\d+)`).FindString(want(t, admin, 0, "", "audit", "list", "--what", "operator")))
}

// firstRevision returns the first revision of the plan gold.
func firstRevision(t *testing.T, env map[string]string) int {
	t.Helper()
	var list struct {
		Revisions []struct {
			Revision string `json:"revision"`
		} `json:"revisions"`
	}
	if err := json.Unmarshal([]byte(want(t, env, 0, "", "plan", "history", "gold", "-o", "json")), &list); err != nil || len(list.Revisions) == 0 {
		t.Fatal(err)
	}
	n, err := strconv.Atoi(list.Revisions[len(list.Revisions)-1].Revision)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// A token of an identity provider comes in with the fleet's authority beside it,
// and nowhere without.
func TestOIDC(t *testing.T) {
	issuer := accesstest.NewIssuer(t)
	c := controllertest.Config(t.TempDir())
	c.OIDC.Issuer, c.OIDC.Audience, c.OIDC.Roles = issuer.URL, "cakefleet", []access.OIDCRole{{Role: identity.Operator, Value: "netops"}}
	r := controllertest.Start(t, c)
	token := issuer.Rotate("1").Token(map[string]any{"iss": issuer.URL, "aud": "cakefleet", "sub": "ada", "groups": "netops", "exp": time.Now().Add(time.Hour).Unix()})
	env := map[string]string{"CAKEFLEET_CONTROLLER": r.Operators.String(), "CAKEFLEET_TOKEN": token, "CAKEFLEET_CREDENTIALS": filepath.Join(filepath.Dir(r.Credentials), "ca.pem")}
	want(t, env, 0, "ada, operator, by oidc "+strings.TrimPrefix(issuer.URL, "http://")+", from 127.0.0.1", "whoami")
	env["CAKEFLEET_CREDENTIALS"] = filepath.Join(t.TempDir(), "ca.pem")
	want(t, env, 1, "does not name the fleet", "whoami")
	_, other := realController(t)
	env["CAKEFLEET_CREDENTIALS"] = other["CAKEFLEET_CREDENTIALS"]
	want(t, env, 1, "unknown authority", "whoami")
}
