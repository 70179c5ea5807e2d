package main

import (
	"archive/tar"
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// apt is Debian's archive as this machine has it, or with options another
// release of it.
type apt struct{ options []string }

const keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"

// newApt is the archive of a release, with state of its own in dir.
func newApt(dir, release string) (apt, error) {
	lists, sources := filepath.Join(dir, "lists"), filepath.Join(dir, "sources.list")
	if err := os.MkdirAll(filepath.Join(lists, "partial"), 0o755); err != nil {
		return apt{}, err
	}
	line := fmt.Sprintf("deb [signed-by=%s] http://deb.debian.org/debian %s main\n", keyring, release)
	if err := os.WriteFile(sources, []byte(line), 0o644); err != nil {
		return apt{}, err
	}
	var a apt
	for _, o := range []string{
		"Dir::Etc::SourceList=" + sources, "Dir::Etc::SourceParts=-", "Dir::Etc::Preferences=-", "Dir::Etc::PreferencesParts=-",
		"Dir::State::Lists=" + lists, "Dir::State::Status=/dev/null", "Dir::Cache=" + dir,
	} {
		a.options = append(a.options, "-o", o)
	}
	return a, nil
}

func (a apt) run(ctx context.Context, dir, program string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, program, append(slices.Clip(a.options), args...)...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	var errs strings.Builder
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s %s: %w: %s", program, strings.Join(args, " "), err, strings.TrimSpace(errs.String()))
	}
	return string(out), nil
}

// deb is a package.
type deb struct{ name, version string }

func (d deb) String() string { return d.name + "=" + d.version }

// fetch returns a folder with the files of a package, and of those that it needs
// whose names match, as far as they are wanted. What was fetched before is not
// fetched again: without its folder there will be a newer one.
func (a apt) fetch(ctx context.Context, dir, pkg, needs string, want func(name string) bool) (string, error) {
	old, _ := filepath.Glob(filepath.Join(dir, pkg+"_*")) // the pattern is good
	if len(old) > 0 {
		return old[len(old)-1], nil
	}
	if _, err := exec.LookPath("apt-get"); err != nil {
		return "", errors.New("it is fetched from Debian's archive, and this is not a Debian")
	}
	path, err := a.fetchKnown(ctx, dir, pkg, needs, want)
	if err == nil || ctx.Err() != nil {
		return path, err
	}
	// What apt knows may be old, or nothing.
	if _, updateErr := a.run(ctx, ".", "apt-get", "update", "-q"); updateErr != nil {
		return "", errors.Join(err, updateErr)
	}
	return a.fetchKnown(ctx, dir, pkg, needs, want)
}

func (a apt) fetchKnown(ctx context.Context, dir, pkg, needs string, want func(name string) bool) (string, error) {
	debs, err := a.closure(ctx, pkg, regexp.MustCompile(needs))
	if err != nil {
		return "", err
	}
	to := filepath.Join(dir, debs[0].name+"_"+strings.ReplaceAll(debs[0].version, ":", "%3a"))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	tmp, err := os.MkdirTemp(dir, "new-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(tmp)
	args := []string{"download", "-q"}
	for _, d := range debs {
		args = append(args, d.String())
	}
	fmt.Fprintf(os.Stderr, "fetching %v into %s\n", debs[0], dir)
	if _, err := a.run(ctx, tmp, "apt-get", args...); err != nil {
		return "", err
	}
	files, err := filepath.Glob(filepath.Join(tmp, "*.deb"))
	if err != nil {
		return "", err
	}
	if len(files) != len(debs) {
		return "", fmt.Errorf("apt-get has fetched %d packages of %d", len(files), len(debs))
	}
	for _, f := range files {
		if err := unpack(ctx, f, filepath.Join(tmp, "files"), want); err != nil {
			return "", err
		}
	}
	return to, os.Rename(filepath.Join(tmp, "files"), to)
}

// closure returns a package, and those that it needs whose names match.
func (a apt) closure(ctx context.Context, pkg string, match *regexp.Regexp) ([]deb, error) {
	var all []deb
	seen := map[string]bool{pkg: true}
	for ask := []string{pkg}; len(ask) > 0; {
		text, err := a.run(ctx, ".", "apt-cache", append([]string{"show", "--no-all-versions"}, ask...)...)
		if err != nil {
			return nil, err
		}
		ask = nil
		for line := range strings.Lines(text) {
			field, value, _ := strings.Cut(strings.TrimSpace(line), ": ")
			switch field {
			case "Package":
				all = append(all, deb{name: value})
			case "Version":
				all[len(all)-1].version = value
			case "Depends", "Pre-Depends":
				for _, name := range needed(value) {
					if match.MatchString(name) && !seen[name] {
						seen[name] = true
						ask = append(ask, name)
					}
				}
			}
		}
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("apt knows no package %s", pkg)
	}
	return all, nil
}

// needed returns the names in a list of dependencies; of alternatives the first.
func needed(depends string) []string {
	var names []string
	for one := range strings.SplitSeq(depends, ",") {
		name, _, _ := strings.Cut(strings.TrimSpace(one), " ")
		name, _, _ = strings.Cut(name, ":")
		names = append(names, name)
	}
	return names
}

// unpack unpacks the files of a package that are wanted. Modules that are
// compressed are not any more.
func unpack(ctx context.Context, file, to string, want func(name string) bool) error {
	cmd := exec.CommandContext(ctx, "dpkg-deb", "--fsys-tarfile", file)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	if err := untar(bufio.NewReaderSize(out, 1<<20), to, want); err != nil {
		_ = cmd.Process.Kill()
		return errors.Join(fmt.Errorf("unpack %s: %w", file, err), cmd.Wait())
	}
	if err := cmd.Wait(); err != nil {
		return fmt.Errorf("unpack %s: %w", file, err)
	}
	return decompress(ctx, to)
}

func untar(in io.Reader, to string, want func(name string) bool) error {
	for t := tar.NewReader(in); ; {
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		name := filepath.Clean(h.Name)
		if !want(name) || !filepath.IsLocal(name) {
			continue
		}
		path := filepath.Join(to, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		switch h.Typeflag {
		case tar.TypeReg:
			err = writeFile(path, t)
		case tar.TypeSymlink:
			err = os.Symlink(h.Linkname, path)
		}
		if err != nil {
			return err
		}
	}
}

func writeFile(path string, from io.Reader) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, from)
	return errors.Join(err, f.Close())
}

// decompressors are by how the names of compressed modules end.
var decompressors = map[string][]string{
	".ko.xz":  {"xz", "--decompress"},
	".ko.zst": {"zstd", "--decompress", "--rm", "-q"},
	".ko.gz":  {"gzip", "--decompress"},
}

func decompress(ctx context.Context, dir string) error {
	found := map[string][]string{}
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		for end := range decompressors {
			if strings.HasSuffix(path, end) {
				found[end] = append(found[end], path)
			}
		}
		return err
	})
	if errors.Is(err, fs.ErrNotExist) { // nothing was wanted
		return nil
	}
	if err != nil {
		return err
	}
	for end, files := range found {
		with := decompressors[end]
		for part := range slices.Chunk(files, 200) {
			cmd := exec.CommandContext(ctx, with[0], append(slices.Clip(with[1:]), part...)...)
			if out, err := cmd.CombinedOutput(); err != nil {
				return fmt.Errorf("decompress modules with %s: %w: %s", with[0], err, out)
			}
		}
	}
	return nil
}
