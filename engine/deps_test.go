package engine_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// banned are packages of the standard library that a pure core can't use.
var banned = map[string]string{
	"context":     "the engine waits for nothing",
	"log":         "the engine does not log",
	"log/slog":    "the engine does not log",
	"math/rand":   "randomness comes from a seed in Config",
	"net":         "the engine does no I/O; net/netip is fine",
	"os":          "the engine does no I/O",
	"os/exec":     "the engine does no I/O",
	"os/signal":   "the engine does no I/O",
	"runtime":     "the engine knows nothing of the machine",
	"sync":        "the engine has one caller",
	"sync/atomic": "the engine has one caller",
	"syscall":     "the engine does no I/O",
	"unsafe":      "the router traps on unaligned loads",
}

// clock are the functions of package time that look at a clock or wait for one.
var clock = map[string]bool{
	"Now": true, "Since": true, "Until": true, "Sleep": true, "After": true,
	"AfterFunc": true, "NewTimer": true, "NewTicker": true, "Tick": true,
}

// TestPure holds the engine to its promise: only the standard library, no I/O,
// no clock, no goroutines. Tests and the programs under enginetest, which
// measure the engine from outside, may do as they like.
func TestPure(t *testing.T) {
	files := 0
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && (path == "enginetest" || d.Name() == "testdata") {
			return filepath.SkipDir
		}
		if !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return nil
		}
		files++
		fset := token.NewFileSet()
		f, err := parser.ParseFile(fset, path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		for _, msg := range impurities(fset, f) {
			t.Error(msg)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if files == 0 {
		t.Fatal("no files of the engine found")
	}
}

// TestPureNotices breaks each rule once.
func TestPureNotices(t *testing.T) {
	const src = `package engine
import (
	"os"
	"example.org/other"
	"github.com/cakefleet/cakefleet/internal/plan"
	clk "time"
)
func f() { go f(); clk.Sleep(1) }
`
	fset := token.NewFileSet()
	f, err := parser.ParseFile(fset, "bad.go", src, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	got := impurities(fset, f)
	if len(got) != 5 {
		t.Errorf("noticed %d of 5 broken rules: %q", len(got), got)
	}
}

func impurities(fset *token.FileSet, f *ast.File) []string {
	const own = "github.com/cakefleet/cakefleet/engine"
	var found []string
	say := func(p token.Pos, msg string) { found = append(found, fset.Position(p).String()+": "+msg) }

	timeName := ""
	for _, imp := range f.Imports {
		path, _ := strconv.Unquote(imp.Path.Value)
		first, _, _ := strings.Cut(path, "/")
		switch {
		case path == own || strings.HasPrefix(path, own+"/"):
		case strings.Contains(first, "."):
			say(imp.Pos(), path+" is not in the standard library")
		case banned[path] != "":
			say(imp.Pos(), path+": "+banned[path])
		}
		if path == "time" {
			timeName = "time"
			if imp.Name != nil {
				timeName = imp.Name.Name
			}
		}
	}
	ast.Inspect(f, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.GoStmt:
			say(n.Pos(), "the engine starts no goroutines")
		case *ast.SelectorExpr:
			if x, ok := n.X.(*ast.Ident); ok && timeName != "" && x.Name == timeName && clock[n.Sel.Name] {
				say(n.Pos(), "time."+n.Sel.Name+": the caller passes now")
			}
		}
		return true
	})
	return found
}
