package kernel

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cakefleet/cakefleet/agent/dataplane/internal/nlmsg"
)

// restorable are the kinds of qdiscs whose listing is all that it takes to make
// them anew, and the attributes in it that are times of CoDel. What has
// classes, filters or a size table is more than that; sfq lists other limits
// than it was made with.
var restorable = map[string][]uint16{
	"bfifo":    nil,
	"cake":     nil,
	"codel":    {1, 3, 5}, // TCA_CODEL_TARGET, _INTERVAL, _CE_THRESHOLD
	"fq":       nil,
	"fq_codel": {1, 3, 7}, // TCA_FQ_CODEL_TARGET, _INTERVAL, _CE_THRESHOLD
	"pfifo":    nil,
}

// taken is a root qdisc that we have replaced.
type taken struct {
	Index   uint32 // of its interface: that alone has it
	Handle  uint32
	Kind    string
	Options []byte // as listed
}

// newTaken notes the root qdisc. It refuses one that could not be put back as
// it was.
func newTaken(w *world) (*taken, error) {
	q := w.root
	if _, ok := restorable[q.kind]; !ok {
		return nil, fmt.Errorf("it could not be put back: its kind is none of %s", strings.Join(slices.Sorted(maps.Keys(restorable)), ", "))
	}
	if q.stab {
		return nil, errors.New("it could not be put back: it has a size table")
	}
	return &taken{Index: w.wan.index, Handle: q.handle, Kind: q.kind, Options: bytes.Clone(q.options.Bytes)}, nil
}

// restore is the request that puts it back. CoDel counts in 1024 ns and lists
// microseconds, rounded down: one more gives the same count again.
func (t *taken) restore() []byte {
	options := nlmsg.Builder{Order: native()}
	for typ, v := range (nlmsg.Attrs{Order: native(), Bytes: t.Options}).All() {
		if slices.Contains(restorable[t.Kind], typ) && len(v.Bytes) == 4 {
			options.U32(typ, v.U32()+1)
			continue
		}
		options.Attr(typ, v.Bytes)
	}
	if t.Kind == "pfifo" || t.Kind == "bfifo" { // no attributes but a struct
		options.Bytes = t.Options
	}
	return setRoot(t.Index, t.Handle, t.Kind, options.Bytes)
}

// noteTaken remembers what is about to be replaced.
func (d *Dataplane) noteTaken(t *taken) error {
	if d.cfg.RunDir != "" {
		b, err := json.Marshal(t)
		if err != nil {
			return fmt.Errorf("note qdisc %s: %w", t.Kind, err)
		}
		if err := os.MkdirAll(d.cfg.RunDir, 0o700); err != nil {
			return fmt.Errorf("note qdisc %s: %w", t.Kind, err)
		}
		tmp := d.takenPath() + ".tmp"
		if err := errors.Join(os.WriteFile(tmp, b, 0o600), os.Rename(tmp, d.takenPath())); err != nil {
			return fmt.Errorf("note qdisc %s: %w", t.Kind, err)
		}
	}
	d.taken = t
	return nil
}

func (d *Dataplane) forgetTaken() error {
	d.taken = nil
	if d.cfg.RunDir == "" {
		return nil
	}
	if err := os.Remove(d.takenPath()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("forget a qdisc: %w", err)
	}
	return nil
}

// readTaken finds what an agent that crashed had replaced.
func (d *Dataplane) readTaken() error {
	if d.cfg.RunDir == "" {
		return nil
	}
	b, err := os.ReadFile(d.takenPath())
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read what was replaced: %w", err)
	}
	var t taken
	if err := json.Unmarshal(b, &t); err != nil {
		d.log.Error("what was replaced can't be read, it will not be put back", "error", err)
		return d.forgetTaken()
	}
	d.taken = &t
	return nil
}

func (d *Dataplane) takenPath() string {
	return filepath.Join(d.cfg.RunDir, "qdisc-"+cleanName(d.cfg.Interface)+".json")
}

// sameAsTaken reads back what was put back.
func (d *Dataplane) sameAsTaken() error {
	w, err := d.look()
	if err != nil {
		return err
	}
	t, q := d.taken, w.root
	if q == nil || q.kind != t.Kind || q.handle != t.Handle || !bytes.Equal(q.options.Bytes, t.Options) {
		return fmt.Errorf("qdisc %s %x: is back, but not exactly as it was", t.Kind, t.Handle>>16)
	}
	return nil
}
