package prometheus_test

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/promql/parser"

	"github.com/cakefleet/cakefleet/controller/history"
)

var update = flag.Bool("update", false, "write METRICS.md")

// checkExpression wants PromQL about metrics and labels that there are.
func checkExpression(t *testing.T, where, expr string) {
	t.Helper()
	known := map[string]history.Metric{}
	for _, m := range history.Metrics() {
		known[m.Name] = m
	}
	// Of the controllers' own /metrics; package controller tests that it is there.
	known["cakefleet_unserved"] = history.Metric{Name: "cakefleet_unserved", Labels: []string{"kind"}}
	e, err := parser.NewParser(parser.Options{}).ParseExpr(expr)
	if err != nil {
		t.Errorf("%s: %v", where, err)
		return
	}
	metrics := 0
	parser.Inspect(e, func(n parser.Node, _ []parser.Node) error {
		s, ok := n.(*parser.VectorSelector)
		if !ok {
			return nil
		}
		metrics++
		m, ok := known[s.Name]
		if !ok {
			t.Errorf("%s: there is no metric %s", where, s.Name)
			return nil
		}
		for _, match := range s.LabelMatchers {
			if match.Name != model.MetricNameLabel && match.Name != history.LabelController && !slices.Contains(m.Labels, match.Name) {
				t.Errorf("%s: metric %s has no label %s", where, s.Name, match.Name)
			}
		}
		return nil
	})
	if metrics == 0 {
		t.Errorf("%s: %s asks for nothing", where, expr)
	}
}

func TestAlerts(t *testing.T) {
	rules, errs := rulefmt.ParseFile("alerts.yaml", false, model.UTF8Validation, parser.NewParser(parser.Options{}), nil)
	if len(errs) > 0 {
		t.Fatal(errs)
	}
	n := 0
	for _, g := range rules.Groups {
		for _, r := range g.Rules {
			n++
			checkExpression(t, r.Alert, r.Expr)
			for _, need := range []string{r.Labels["severity"], r.Labels["cause"], r.Annotations["summary"], r.Annotations["description"]} {
				if need == "" {
					t.Errorf("%s: says neither how bad it is nor what to do: %v %v", r.Alert, r.Labels, r.Annotations)
				}
			}
		}
	}
	if n < 5 {
		t.Errorf("%d alerts", n)
	}
}

// TestPromtool has Prometheus' own tool check the rules, and run them.
func TestPromtool(t *testing.T) {
	promtool, err := exec.LookPath("promtool")
	if err != nil {
		t.Skip("skipped: promtool is not here (Debian: prometheus)")
	}
	for _, args := range [][]string{{"check", "rules", "alerts.yaml"}, {"test", "rules", "alerts_test.yaml"}} {
		if out, err := exec.CommandContext(t.Context(), promtool, args...).CombinedOutput(); err != nil {
			t.Errorf("promtool %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
}

// variables are what Grafana puts in.
var variables = strings.NewReplacer("${by}", "plan", "$__rate_interval", "5m")

func TestDashboards(t *testing.T) {
	text, err := os.ReadFile("../grafana/fleet.json")
	if err != nil {
		t.Fatal(err)
	}
	var dashboard struct {
		Title  string
		Panels []struct {
			ID      int
			Title   string
			Targets []struct{ Expr string }
		}
	}
	if err := json.Unmarshal(text, &dashboard); err != nil {
		t.Fatal(err)
	}
	if dashboard.Title == "" || len(dashboard.Panels) == 0 {
		t.Fatalf("dashboard %q has %d panels", dashboard.Title, len(dashboard.Panels))
	}
	seen := map[int]bool{}
	for _, p := range dashboard.Panels {
		if seen[p.ID] {
			t.Errorf("panel %q: number %d is there twice", p.Title, p.ID)
		}
		seen[p.ID] = true
		if len(p.Targets) == 0 {
			t.Errorf("panel %q shows nothing", p.Title)
		}
		for _, target := range p.Targets {
			expr := variables.Replace(target.Expr)
			if left := regexp.MustCompile(`\$\w+`).FindString(expr); left != "" {
				t.Errorf("panel %q: variable %s is not known here", p.Title, left)
			}
			checkExpression(t, fmt.Sprintf("panel %q", p.Title), expr)
		}
	}
}

// TestMetricsList holds METRICS.md against the code; -update writes it.
func TestMetricsList(t *testing.T) {
	var b strings.Builder
	b.WriteString("# Metrics of a fleet's history\n\nWritten by the controller for each group of routers, and served at `/api/v1/` of its HTTPS door. GROUP stands for a\nlabel named like the dimension in `by`: `cakefleet_routers{by=\"site\", site=\"north\"}`. All have `controller`, who\ncounted it: sum over it. Made by `go test ./deploy/prometheus -update`.\n\n| metric | type | labels | meaning |\n| --- | --- | --- | --- |\n")
	for _, m := range history.Metrics() {
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", m.Name, m.Type, strings.Join(m.Labels, ", "), m.Help)
	}
	const path = "METRICS.md"
	if *update {
		if err := os.WriteFile(path, []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	have, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if string(have) != b.String() {
		t.Error("METRICS.md is not what the code writes: go test ./deploy/prometheus -update")
	}
}
