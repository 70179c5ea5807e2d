package store

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"

	"go.uber.org/zap/zapcore"
)

// death is how the embedded etcd ends by itself. etcd would print a stack and
// end the process, or just end it; here the rest of the controller gets a
// sentence and ends in order.
type death struct {
	dir  string
	once sync.Once
	err  error         // written before done is closed
	done chan struct{} // closed when etcd can't go on
}

func newDeath(dir string) *death { return &death{dir: dir, done: make(chan struct{})} }

// OnWrite is called by etcd's log for what is fatal or a panic. It must not
// return, as the code behind it counts on that.
func (d *death) OnWrite(e *zapcore.CheckedEntry, fields []zapcore.Field) {
	var cause error
	for _, f := range fields {
		if err, ok := f.Interface.(error); ok {
			cause = err
		}
	}
	d.once.Do(func() {
		d.err = d.explain(e.Message, cause)
		close(d.done)
	})
	select {}
}

func (d *death) is() bool {
	select {
	case <-d.done:
		return true
	default:
		return false
	}
}

// explain returns an error that says what happened to etcd and what to do.
func (d *death) explain(what string, cause error) error {
	text := what
	if cause != nil {
		text += ": " + cause.Error()
	}
	has := func(part string) bool { return strings.Contains(text, part) }
	switch {
	case errors.Is(cause, syscall.ENOSPC), has("no space left"), has("disk quota exceeded"):
		return fmt.Errorf("the disk with %s is full; nothing that was confirmed is lost: make space and start again (etcd: %s)", d.dir, text)
	case errors.Is(cause, syscall.EROFS), has("read-only file system"), has("permission denied"):
		return fmt.Errorf("%s can't be written (etcd: %s)", d.dir, text)
	case errors.Is(cause, syscall.EIO), has("input/output error"):
		return fmt.Errorf("the disk with %s has a fault (etcd: %s)", d.dir, text)
	case has("no such file"), has("crc mismatch"), has("checksum error"), has("invalid database"), has("invalid page"),
		has("failed to read WAL"), has("failed to recover"), has("failed to open database"), has("unexpected EOF"), has("file size too small"),
		has("assertion failed"), has("freelist"), has("out of range"):
		return d.damaged(text)
	default:
		return fmt.Errorf("etcd can't go on: %s", text)
	}
}

func (d *death) damaged(text string) error {
	return fmt.Errorf("the data in %s is damaged (etcd: %s); with a backup: cakefleet-controller restore --from FILE --data-dir %s --replace", d.dir, text, filepath.Dir(d.dir))
}

// checkLog finds a database whose log is gone, with which etcd would wait for
// ever for what is never to come.
func checkLog(dir string) error {
	db, wal := filepath.Join(dir, "member", "snap", "db"), filepath.Join(dir, "member", "wal")
	if _, err := os.Stat(db); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	logs, err := filepath.Glob(filepath.Join(wal, "*.wal"))
	if err != nil || len(logs) > 0 {
		return err
	}
	return fmt.Errorf("%s is there, but its log in %s is gone. Put the log back, or go on from the database alone, "+
		"which may lack what was written last: cakefleet-controller restore --from %s --data-dir %s --replace", db, wal, db, filepath.Dir(dir))
}
