// Package house has the checks that concern the whole tree rather than one
// package.
package house

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const root = "../.."

// TestPackageComments wants one package comment for each package, no more.
// Generated packages have none: the comments are in their .proto files.
func TestPackageComments(t *testing.T) {
	comments := map[string][]string{} // folder and package: files with a comment
	each(t, func(path string) {
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.PackageClauseOnly|parser.ParseComments)
		if err != nil {
			t.Error(err)
			return
		}
		if ast.IsGenerated(f) || strings.HasSuffix(f.Name.Name, "_test") {
			return
		}
		key := filepath.Dir(path) + " " + f.Name.Name
		files := comments[key]
		if f.Doc != nil {
			files = append(files, filepath.Base(path))
		}
		comments[key] = files
	})
	if len(comments) == 0 {
		t.Fatal("no packages found")
	}
	for pkg, files := range comments {
		switch len(files) {
		case 0:
			t.Errorf("%s: no package comment", pkg)
		case 1:
		default:
			slices.Sort(files)
			t.Errorf("%s: package comments in %s; one is enough", pkg, strings.Join(files, ", "))
		}
	}
}

// TestTopLevel keeps the top level to what the map in CONTRIBUTING.md shows.
func TestTopLevel(t *testing.T) {
	allowed := []string{
		"agent", "cmd", "controller", "deploy", "engine", "internal", "proto", "test",
		"buf.gen.yaml", "buf.yaml", "go.mod", "go.sum", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md",
		"bin", "out", // made by make
	}
	entries, err := os.ReadDir(root)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), ".") && !slices.Contains(allowed, e.Name()) {
			t.Errorf("%s has no place at the top level", e.Name())
		}
	}
}

// TestGeneratedBesideProto wants Go code for each .proto file and none
// without one. `make lint` compares what is in it.
func TestGeneratedBesideProto(t *testing.T) {
	protos, err := filepath.Glob(root + "/proto/*/*/*.proto")
	if err != nil || len(protos) == 0 {
		t.Fatalf("no .proto files found (%v)", err)
	}
	for _, p := range protos {
		want := strings.TrimSuffix(p, ".proto") + ".pb.go"
		if _, err := os.Stat(want); err != nil {
			t.Errorf("%s has no generated code: run make generate", p)
		}
	}
	generated, err := filepath.Glob(root + "/proto/*/*/*.pb.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, g := range generated {
		base := strings.TrimSuffix(strings.TrimSuffix(g, ".pb.go"), "_grpc")
		if _, err := os.Stat(base + ".proto"); err != nil {
			t.Errorf("%s comes from no .proto file", g)
		}
	}
}

// each calls f with every Go file of the project.
func each(t *testing.T, f func(path string)) {
	t.Helper()
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && path != root && (strings.HasPrefix(d.Name(), ".") && d.Name() != ".." || d.Name() == "testdata") {
			return filepath.SkipDir
		}
		if !d.IsDir() && strings.HasSuffix(path, ".go") {
			f(path)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestFleet041_NothingSkipsVerification: fleet.md §4 item 41, no code turns the
// verification of certificates off.
func TestFleet041_NothingSkipsVerification(t *testing.T) {
	word := "Insecure" + "SkipVerify" // not to find itself
	n := 0
	each(t, func(path string) {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Error(err)
			return
		}
		n++
		if strings.Contains(string(b), word) {
			t.Errorf("%s has %s", path, word)
		}
	})
	if n < 100 {
		t.Fatalf("only %d files were looked at", n)
	}
}
