package house

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestChecks holds checks.txt and faults.txt against the tree: every number has
// a test of its name, or a reason why it has none.
func TestChecks(t *testing.T) {
	for _, list := range []struct {
		file, prefix string
		least        int // numbers
	}{
		{"checks.txt", "TestFleet", 60},
		{"faults.txt", "TestFault", 90},
	} {
		t.Run(list.file, func(t *testing.T) { hold(t, list.file, list.prefix, list.least) })
	}
}

func hold(t *testing.T, file, prefix string, least int) {
	numbered := regexp.MustCompile(`^` + prefix + `(\d{3})(_|$)`)
	tests, where := map[string][]string{}, map[string]string{}
	each(t, func(path string) {
		if !strings.HasSuffix(path, "_test.go") {
			return
		}
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Error(err)
			return
		}
		for _, d := range f.Decls {
			fn, ok := d.(*ast.FuncDecl)
			if !ok || fn.Recv != nil || !strings.HasPrefix(fn.Name.Name, "Test") {
				continue
			}
			name := fn.Name.Name
			where[name] = path
			if m := numbered.FindStringSubmatch(name); m != nil {
				rel, err := filepath.Rel(root, filepath.Dir(path))
				if err != nil {
					t.Error(err)
				}
				tests[m[1]] = append(tests[m[1]], rel+"."+name)
			}
		}
	})

	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	known := map[string]bool{}
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		number, what, ok := strings.Cut(line, " ")
		if !ok {
			t.Errorf("%q: says not what is checked", line)
			continue
		}
		if number == "-" {
			what, names, _ := strings.Cut(what, ": ")
			if strings.TrimSpace(names) == "" {
				t.Errorf("%q names no test", strings.TrimSpace(what))
			}
			for name := range strings.FieldsSeq(names) {
				if where[name] == "" {
					t.Errorf("%q: there is no test %s", strings.TrimSpace(what), name)
				}
			}
			continue
		}
		var n int
		if _, err := fmt.Sscanf(number, "%d", &n); err != nil {
			t.Errorf("%q: begins with no number: %v", line, err)
			continue
		}
		key := fmt.Sprintf("%03d", n)
		if known[key] {
			t.Errorf("number %d is there twice", n)
		}
		known[key] = true
		what, reason, _ := strings.Cut(what, "|")
		slices.Sort(tests[key])
		t.Logf("%s %s: %s", key, strings.TrimSpace(what), strings.Join(append(tests[key], strings.TrimSpace(reason)), " "))
		if len(tests[key]) == 0 && strings.TrimSpace(reason) == "" {
			t.Errorf("%d, %s: there is no test %s%s and no reason", n, strings.TrimSpace(what), prefix, key)
		}
	}
	for key, names := range tests {
		if !known[key] {
			t.Errorf("%v: %s does not know number %s", names, file, key)
		}
	}
	if len(known) < least {
		t.Errorf("only %d numbers are known", len(known))
	}
}
