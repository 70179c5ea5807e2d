package house

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"strings"
	"testing"
)

// TestFleet041_VerificationIsNeverOff wants no way to speak without TLS, or with TLS
// that looks at nothing: not by default, not by a flag, and not for tests. An
// agent that could do so would one day run so.
func TestFleet041_VerificationIsNeverOff(t *testing.T) {
	off := map[string]bool{"Insecure" + "SkipVerify": true, "InsecureServerNameToVerify": true}
	// Connections that never leave the process, and tests of what happens to
	// clients that try.
	inside := map[string]bool{"controller/api/rest.go": true, "controller/api/plan_test.go": true, "controller/watched_test.go": true}
	files := 0
	each(t, func(path string) {
		rel, err := filepath.Rel(root, path)
		if err != nil {
			t.Fatal(err)
		}
		if rel == filepath.Join("test", "house", "verification_test.go") {
			return
		}
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
		if err != nil {
			t.Error(err)
			return
		}
		files++
		for _, i := range f.Imports {
			if i.Path.Value == `"google.golang.org/grpc/credentials/insecure"` && !inside[filepath.ToSlash(rel)] {
				t.Errorf("%s imports credentials/insecure", rel)
			}
		}
		ast.Inspect(f, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.Ident:
				if off[n.Name] {
					t.Errorf("%s uses %s", rel, n.Name)
				}
			case *ast.BasicLit: // a flag or a setting
				word := strings.ToLower(strings.Trim(n.Value, "\"`"))
				agent := strings.HasPrefix(rel, "agent") || strings.HasPrefix(rel, filepath.Join("cmd", "cakefleet-agent"))
				if agent && n.Kind == token.STRING && !strings.ContainsAny(word, " \n") && (strings.Contains(word, "insecure") || strings.Contains(word, "skip-verify") || strings.Contains(word, "plaintext")) {
					t.Errorf("%s: the agent has a word %s", rel, n.Value)
				}
			}
			return true
		})
	})
	if files < 100 {
		t.Errorf("looked at %d files", files)
	}
}
