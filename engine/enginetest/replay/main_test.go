package main

import (
	"bytes"
	"compress/gzip"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

const good = "../../testdata/vectors/low-clamp-d8.txt.gz"

func zip(t *testing.T, text []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	if _, err := z.Write(text); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// TestFiles: whatever is wrong with a file, the line about it names the file
// and what is wrong, and at what line and event where it has any.
func TestFiles(t *testing.T) {
	packed, err := os.ReadFile(good)
	if err != nil {
		t.Fatal(err)
	}
	z, err := gzip.NewReader(bytes.NewReader(packed))
	if err != nil {
		t.Fatal(err)
	}
	text, err := io.ReadAll(z)
	if err != nil {
		t.Fatal(err)
	}
	corrupt := bytes.Clone(packed)
	corrupt[len(corrupt)-6] ^= 1 // the checksum
	lines := bytes.SplitAfter(text, []byte{'\n'})
	half := bytes.Join(lines[:len(lines)/2], nil)

	for name, c := range map[string]struct {
		content []byte
		want    string // of the line, as a regular expression
		status  int
	}{
		"good":      {packed, `^ok   \S+: \d+ events: \d+ delivered`, 0},
		"truncated": {packed[:len(packed)/2], `^FAIL \S+: line \d+, after \d+ events: then unexpected EOF$`, 1},
		"corrupt":   {corrupt, `^FAIL \S+: line \d+, after \d+ events: then gzip: invalid checksum$`, 1},
		"half":      {zip(t, half), `^FAIL \S+: line \d+, (after \d+ events: ends without its final counters|event \d+, .*: recorded nothing more, engine .*)$`, 1},
		"not gzip":  {text, `^FAIL \S+: not a gzip file: gzip: invalid header$`, 1},
		"empty":     {nil, `^FAIL \S+: empty file$`, 1},
		"no text":   {zip(t, nil), `^FAIL \S+: line 0, after 0 events: ends without its final counters$`, 1},
		"modified": {
			zip(t, regexp.MustCompile(`(?m)^D (\d+) 0 `).ReplaceAll(text, []byte("D $1 1 "))),
			`^FAIL \S+: line \d+, event \d+, Q \d+: recorded D (\d+) 1 .*, engine D (\d+) 0 `, 1,
		},
		"other format": {zip(t, bytes.Replace(text, []byte("cakevec-1"), []byte("cakevec-2"), 1)), `^FAIL \S+: line \d+, after 0 events: format "cakevec-2": not cakevec-1$`, 1},
		"out of range": {zip(t, bytes.Replace(text, []byte("C diffserv 2"), []byte("C diffserv 258"), 1)), `^FAIL \S+: line \d+, after 0 events: diffserv "258": not a number from 0 to 4$`, 1},
		"no counters":  {zip(t, regexp.MustCompile(`(?m)^S .*$`).ReplaceAll(text, []byte("S final=1"))), `^FAIL \S+: line \d+, after \d+ events: S line of 1 counters, want \d+$`, 1},
		"back in time": {zip(t, regexp.MustCompile(`(?m)^Q \d+$`).ReplaceAll(text, []byte("Q -1"))), `^FAIL \S+: line \d+, after \d+ events: time "-1": not a number of 0 or more$`, 1},
	} {
		path := filepath.Join(t.TempDir(), "file.gz")
		if err := os.WriteFile(path, c.content, 0o600); err != nil {
			t.Fatal(err)
		}
		var out, complaints strings.Builder
		status := run([]string{path}, &out, &complaints)
		line := strings.TrimSuffix(out.String(), "\n")
		if status != c.status || strings.Contains(line, "\n") || !regexp.MustCompile(c.want).MatchString(line) || strings.Count(line, path) != 1 {
			t.Errorf("%s: exit status %d, want %d: %q, want %s", name, status, c.status, line, c.want)
		}
		if complaints.Len() != 0 {
			t.Errorf("%s: complains %q", name, complaints.String())
		}
	}
}

func TestUsage(t *testing.T) {
	for _, args := range [][]string{nil, {"-h"}, {"--help", good}} {
		var out, complaints strings.Builder
		if status := run(args, &out, &complaints); status != 2 || out.Len() != 0 || !strings.HasPrefix(complaints.String(), "usage: ") {
			t.Errorf("%q: exit status %d, %q, %q; want 2 and the usage", args, status, out.String(), complaints.String())
		}
	}
}

// TestGoesOn: a bad file does not keep the others from being replayed.
func TestGoesOn(t *testing.T) {
	var out, complaints strings.Builder
	missing := filepath.Join(t.TempDir(), "missing.gz")
	status := run([]string{missing, good}, &out, &complaints)
	lines := strings.Split(out.String(), "\n")
	if status != 1 || len(lines) != 3 || lines[0] != "FAIL "+missing+": no such file or directory" || !strings.HasPrefix(lines[1], "ok   "+good) {
		t.Errorf("exit status %d, want 1: %q", status, lines)
	}
}
