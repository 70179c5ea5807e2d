package api_test

import (
	"encoding/json"
	"os"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"google.golang.org/grpc"

	"github.com/cakefleet/cakefleet/controller/api"
)

// registered returns the calls of the operators' door.
func registered(t *testing.T) []string {
	t.Helper()
	s := grpc.NewServer()
	var services api.Services
	for i, v := 0, reflect.ValueOf(&services).Elem(); i < v.NumField(); i++ {
		v.Field(i).Set(reflect.New(v.Field(i).Type().Elem()))
	}
	api.RegisterOperators(s, services)
	var all []string
	for service, info := range s.GetServiceInfo() {
		for _, m := range info.Methods {
			all = append(all, "/"+service+"/"+m.Name)
		}
	}
	if len(all) == 0 {
		t.Fatal("no calls")
	}
	return all
}

// Every call says who may do it and whether it changes anything, and there is
// none that isn't a call.
func TestEveryCallHasARule(t *testing.T) {
	rules := api.Rules()
	for _, m := range registered(t) {
		min, ok := rules[m]
		if !ok || min == 0 {
			t.Errorf("%s has no rule: anybody or nobody may", m)
		}
		delete(rules, m)
	}
	for m := range rules {
		t.Errorf("%s has a rule and is no call", m)
	}
}

// Every call can be made in REST too.
func TestEveryCallIsInREST(t *testing.T) {
	b, err := api.OpenAPI("test")
	if err != nil {
		t.Fatal(err)
	}
	var doc struct {
		Paths map[string]map[string]struct {
			OperationID string `json:"operationId"`
		} `json:"paths"`
	}
	if err := json.Unmarshal(b, &doc); err != nil {
		t.Fatal(err)
	}
	operations := map[string]bool{}
	for _, verbs := range doc.Paths {
		for _, v := range verbs {
			operations[v.OperationID] = true
		}
	}
	for _, m := range registered(t) {
		id := strings.ReplaceAll(strings.TrimPrefix(m, "/cakefleet.v1."), "/", "_")
		if !operations[id] {
			t.Errorf("%s has no rule in proto/cakefleet/v1/http.yaml, or make generate was not run", m)
		}
	}
}

// Services that REST has rules for are registered there.
func TestEveryGatewayIsRegistered(t *testing.T) {
	source, err := os.ReadFile("rest.go")
	if err != nil {
		t.Fatal(err)
	}
	rules, err := os.ReadFile("../../proto/cakefleet/v1/http.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range regexp.MustCompile(`selector: cakefleet\.v1\.(\w+)\.`).FindAllSubmatch(rules, -1) {
		if want := "gateway.Register" + string(m[1]) + "Handler,"; !strings.Contains(string(source), want) {
			t.Errorf("rest.go has no %s", want)
		}
	}
}
