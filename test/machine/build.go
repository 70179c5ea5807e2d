package main

import (
	"bytes"
	"cmp"
	"context"
	"debug/elf"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/cakefleet/cakefleet/internal/initrd"
	"github.com/cakefleet/cakefleet/test/machine/order"
)

// programs are what tests call, and the Debian packages that they are in.
var programs = map[string]string{"tc": "iproute2"}

// pkg is a package whose tests are to run.
type pkg struct{ path, dir, run string }

// build makes what the machine boots into: tests, and the files around them.
func build(ctx context.Context, o options, m *machine) ([]order.Test, []initrd.Entry, error) {
	pkgs, err := list(ctx, m.kernel.arch, o.packages)
	if err != nil {
		return nil, nil, err
	}
	tests := make([]order.Test, len(pkgs))
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(runtime.NumCPU())
	goBuild := func(to string, args ...string) {
		g.Go(func() error { return goCommand(ctx, m.kernel.arch, append(args, to)) })
	}
	goBuild("./test/machine/guest", "build", "-trimpath", "-ldflags=-s -w", "-o", filepath.Join(m.work, "init"))
	for i, p := range pkgs {
		goBuild(p.path, "test", "-c", "-trimpath", "-ldflags=-s -w", "-o", filepath.Join(m.work, fmt.Sprint(i)))
		verbose := "-test.v"
		if o.json {
			verbose = "-test.v=test2json"
		}
		tests[i] = order.Test{
			Package: p.path, Program: fmt.Sprintf("/tests/%d.test", i), Dir: path.Join("/src", p.path),
			Args:  append([]string{verbose, "-test.paniconexit0", "-test.timeout=" + m.timeout.String(), "-test.run=" + p.run}, o.args...),
			Limit: m.timeout + 10*time.Second,
		}
	}
	if err := g.Wait(); err != nil {
		return nil, nil, err
	}
	files, err := fileSystem(m, pkgs, order.Order{Port: m.port(), Modules: m.portModules(), Env: o.env, Tests: tests})
	return tests, files, err
}

// list returns the packages that have tests.
func list(ctx context.Context, a arch, named []string) ([]pkg, error) {
	var pkgs []pkg
	for _, name := range named {
		pattern, run, _ := strings.Cut(name, ":")
		cmd := exec.CommandContext(ctx, "go", "list", "-f", "{{if or .TestGoFiles .XTestGoFiles}}{{.ImportPath}}\t{{.Dir}}{{end}}", pattern)
		cmd.Env = append(os.Environ(), a.env...)
		cmd.Stderr = os.Stderr
		out, err := cmd.Output()
		if err != nil {
			return nil, fmt.Errorf("go list %s: %w", pattern, err)
		}
		for line := range strings.Lines(string(out)) {
			importPath, dir, _ := strings.Cut(strings.TrimSpace(line), "\t")
			pkgs = append(pkgs, pkg{importPath, dir, cmp.Or(run, ".")})
		}
	}
	if len(pkgs) == 0 {
		return nil, fmt.Errorf("no tests in %s", strings.Join(named, " "))
	}
	return pkgs, nil
}

func goCommand(ctx context.Context, a arch, args []string) error {
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Env = append(os.Environ(), a.env...)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("go %s: %w\n%s", strings.Join(args, " "), err, out)
	}
	return nil
}

// fileSystem is what the machine boots into.
func fileSystem(m *machine, pkgs []pkg, o order.Order) ([]initrd.Entry, error) {
	t := tree{made: map[string]bool{}}
	for _, dir := range []string{"dev", "proc", "run", "sys", "tmp", "sbin"} {
		t.dir(dir)
	}
	if err := t.file("init", filepath.Join(m.work, "init")); err != nil {
		return nil, err
	}
	t.add(initrd.Entry{Name: "sbin/modprobe", Mode: initrd.ModeLink, Body: []byte("/init")})
	for i, p := range pkgs {
		if err := t.file(fmt.Sprintf("tests/%d.test", i), filepath.Join(m.work, fmt.Sprint(i))); err != nil {
			return nil, err
		}
		t.dir(path.Join("src", p.path))
		if err := t.all(path.Join("src", p.path, "testdata"), filepath.Join(p.dir, "testdata")); err != nil {
			return nil, err
		}
	}
	if m.kernel.root != "" {
		for name, from := range programs {
			if err := t.program(m.kernel.root, name); err != nil {
				return nil, fmt.Errorf("%s is missing: apt-get install %s (%w)", name, from, err)
			}
		}
	}
	if m.kernel.modules != "" {
		mods, err := modules(m.kernel.modules)
		if err != nil {
			return nil, err
		}
		for _, e := range mods {
			t.add(e)
		}
	}
	// What is not there as a module is built in.
	o.Modules = slices.DeleteFunc(o.Modules, func(name string) bool {
		return !t.made[strings.TrimPrefix(order.ModuleDir, "/")+"/"+name+".ko"]
	})
	b, err := json.Marshal(o)
	if err != nil {
		return nil, err
	}
	t.add(initrd.Entry{Name: strings.TrimPrefix(order.File, "/"), Mode: initrd.ModeFile, Body: b})
	return t.entries, nil
}

// tree is a file system that grows.
type tree struct {
	entries []initrd.Entry
	made    map[string]bool
}

func (t *tree) dir(name string) {
	if name == "." || t.made[name] {
		return
	}
	t.dir(path.Dir(name))
	t.made[name] = true
	t.entries = append(t.entries, initrd.Entry{Name: name, Mode: initrd.ModeDir})
}

// add adds a file or a link, with the directories that it is in.
func (t *tree) add(e initrd.Entry) {
	if e.Mode == initrd.ModeDir {
		t.dir(e.Name)
		return
	}
	if t.made[e.Name] {
		return
	}
	t.dir(path.Dir(e.Name))
	t.made[e.Name] = true
	t.entries = append(t.entries, e)
}

func (t *tree) file(name, from string) error {
	b, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	t.add(initrd.Entry{Name: name, Mode: initrd.ModeFile, Body: b})
	return nil
}

// all adds a directory with all that is in it; there need not be one.
func (t *tree) all(name, from string) error {
	err := filepath.WalkDir(from, func(p string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		rel, err := filepath.Rel(from, p)
		if err != nil {
			return err
		}
		return t.file(path.Join(name, filepath.ToSlash(rel)), p)
	})
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// program adds a program from the file system at root, with its libraries.
func (t *tree) program(root, name string) error {
	from, err := find(root, name, "usr/sbin", "sbin", "usr/bin", "bin")
	if err != nil {
		return err
	}
	if err := t.file("bin/"+name, from); err != nil {
		return err
	}
	return t.libraries(root, from)
}

// libraries adds the shared libraries of a program or library, and of those.
func (t *tree) libraries(root, file string) error {
	f, err := elf.Open(file)
	if err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	defer f.Close()
	if s := f.Section(".interp"); s != nil {
		b, err := s.Data()
		if err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
		interp := string(bytes.TrimRight(b, "\x00"))
		from, err := find(root, path.Base(interp), libraryDirs...)
		if err != nil {
			return err
		}
		if err := t.file(strings.TrimPrefix(interp, "/"), from); err != nil {
			return err
		}
	}
	names, err := f.ImportedLibraries()
	if err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	for _, name := range names {
		if t.made["lib/"+name] {
			continue
		}
		from, err := find(root, name, libraryDirs...)
		if err != nil {
			return err
		}
		if err := errors.Join(t.file("lib/"+name, from), t.libraries(root, from)); err != nil {
			return err
		}
	}
	return nil
}

var libraryDirs = []string{"lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu", "lib64", "usr/lib64", "lib", "usr/lib"}

func find(root, name string, dirs ...string) (string, error) {
	for _, dir := range dirs {
		p := filepath.Join(root, dir, name)
		if fi, err := os.Stat(p); err == nil && fi.Mode().IsRegular() {
			return p, nil
		}
	}
	return "", fmt.Errorf("%s: no %s", filepath.Join(root, dirs[0]), name)
}
