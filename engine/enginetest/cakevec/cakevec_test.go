package cakevec

import (
	"compress/gzip"
	"errors"
	"io"
	"os"
	"strings"
	"testing"
)

func recording(t testing.TB, name string) []string {
	t.Helper()
	f, err := os.Open("../../testdata/vectors/" + name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(z)
	if err != nil {
		t.Fatal(err)
	}
	return strings.Split(strings.TrimSuffix(string(b), "\n"), "\n")
}

// TestMismatchIsNamed falsifies one line of each kind and wants the replay to
// stop there.
func TestMismatchIsNamed(t *testing.T) {
	lines := recording(t, "fuzz-6.txt.gz")
	if _, err := Replay(strings.NewReader(strings.Join(lines, "\n"))); err != nil {
		t.Fatal(err)
	}
	for _, kind := range []string{"W ", "X ", "P ", "D ", "S ", "I ", "T ", "U ", "F "} {
		t.Run(kind[:1], func(t *testing.T) {
			at := -1
			for i, l := range lines {
				if strings.HasPrefix(l, kind) && (i > 2000 || at < 0) {
					at = i
					if i > 2000 {
						break
					}
				}
			}
			if at < 0 {
				t.Fatalf("no line %q", kind)
			}
			wrong := append([]string(nil), lines...)
			if last := len(wrong[at]) - 1; wrong[at][last] == '7' {
				wrong[at] = wrong[at][:last] + "8"
			} else {
				wrong[at] = wrong[at][:last] + "7"
			}
			_, err := Replay(strings.NewReader(strings.Join(wrong, "\n")))
			var m *Mismatch
			if !errors.As(err, &m) {
				t.Fatalf("line %d says %q: error %v", at+1, wrong[at], err)
			}
			if m.Line != at+1 {
				t.Errorf("line %d says %q: mismatch at %d: %v", at+1, wrong[at], m.Line, err)
			}
		})
	}
	for _, c := range []struct{ name, remove string }{{"nothing", "N"}, {"a drop", "X "}, {"a timer", "W "}} {
		for i, l := range lines {
			if l == c.remove || strings.HasSuffix(c.remove, " ") && strings.HasPrefix(l, c.remove) {
				short := append(append([]string(nil), lines[:i]...), lines[i+1:]...)
				var m *Mismatch
				if _, err := Replay(strings.NewReader(strings.Join(short, "\n"))); !errors.As(err, &m) {
					t.Errorf("without the line of %s: error %v", c.name, err)
				}
				break
			}
		}
	}
}

// TestBadRecording: what is not a recording is an error, and no mismatch.
func TestBadRecording(t *testing.T) {
	for _, text := range []string{
		"", "C format cakevec-1", "C format other\nQ 0\nN", "C format cakevec-1\nC t0 x\nQ 0\nN", "Z 1", "C a",
	} {
		_, err := Replay(strings.NewReader(text))
		var m *Mismatch
		if err == nil || errors.As(err, &m) {
			t.Errorf("%q: error %v", text, err)
		}
	}
}

// FuzzReplay: no recording, however broken, makes the replay or the engine
// panic.
func FuzzReplay(f *testing.F) {
	for _, name := range []string{"low-clamp-d8.txt.gz", "gso-split-d4.txt.gz", "ack-filter-1m.txt.gz", "reconf-tinmode.txt.gz"} {
		lines := recording(f, name)
		f.Add(strings.Join(lines[:min(len(lines), 120)], "\n"))
	}
	f.Add("C format cakevec-1\nC lcg_seed 1\nC t0 -5\nC handle 0\nC rate_bps 1\nE 0 4294967295 0 0800 65535 00 1 1 1 g=65535,1,65535,0 h=-\nQ 9000000000\n")
	f.Fuzz(func(t *testing.T, text string) {
		if strings.Count(text, "=65535") > 3 {
			return // each makes 65535 packets
		}
		sum, err := Replay(strings.NewReader(text))
		if err == nil && sum.Snapshots == 0 {
			t.Error("no counters and no error")
		}
	})
}
