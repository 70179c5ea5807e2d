package history

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/prometheus/storage"
	"github.com/prometheus/prometheus/tsdb"
	"github.com/prometheus/prometheus/util/compression"

	"github.com/cakefleet/cakefleet/controller/telemetry"
)

// ErrOff means that there is no history now; the status says why.
var ErrOff = errors.New("there is no history now")

// Config says what is kept, and where it goes.
type Config struct {
	Dir        string           // made if it doesn't exist
	Controller string           // name in the label "controller"
	Table      *telemetry.Table // what is written

	Step      time.Duration // between two samples; 0: 30 s
	Retention time.Duration // 0: 15 days
	Size      int64         // bytes of blocks, the oldest of which go first; 0: any
	Routers   int           // that have series of their own; if there are more, none beyond has
	Every     time.Duration // between two samples of those; 0: a minute

	Remotes []Remote // where else everything goes

	Logger     hclog.Logger          // nil: none
	Registerer prometheus.Registerer // of the history's own metrics; nil: nobody sees them
}

// Defaults of Config.
const (
	DefaultStep      = 30 * time.Second
	DefaultRetention = 15 * 24 * time.Hour
	DefaultRouters   = 2000
	DefaultEvery     = time.Minute
)

// Status is how the history is.
type Status struct {
	Running  bool
	Err      error     // why the newest step was not written; nil if it was
	Since    time.Time // that it is so
	Steps    uint64    // that were written
	Missed   uint64    // that were not
	Series   uint64    // in memory
	Unkept   int       // routers without series of their own, because of the bound
	Oldest   time.Time // of what is kept
	Overflow uint64    // see rollup.Set.Overflow
}

// History is the history of one controller.
type History struct {
	config Config
	logger hclog.Logger

	mu     sync.RWMutex // guards what follows; held for reading while db is used
	db     *tsdb.DB     // nil while it can't be opened
	remote *remotes     // nil like db
	status Status

	writer *writer // belongs to who writes a step
	step   sync.Mutex
}

// New returns a history that does nothing before Run. The error names what is
// wrong in the configuration.
func New(c Config) (*History, error) {
	c.Step, c.Retention = cmp.Or(c.Step, DefaultStep), cmp.Or(c.Retention, DefaultRetention)
	c.Every = cmp.Or(c.Every, DefaultEvery)
	switch {
	case c.Step < time.Second:
		return nil, fmt.Errorf("history: step %v: must be a second or more", c.Step)
	case c.Retention < 2*time.Hour:
		return nil, fmt.Errorf("history: retention %v: must be 2h or more", c.Retention)
	case c.Size < 0 || c.Size > 0 && c.Size < 1<<20:
		return nil, fmt.Errorf("history: size of %d bytes: must be 1 MB or more, or 0", c.Size)
	case c.Routers < 0:
		return nil, fmt.Errorf("history: %d routers: must not be negative", c.Routers)
	}
	for i := range c.Remotes {
		if err := c.Remotes[i].validate(); err != nil {
			return nil, err
		}
	}
	if c.Logger == nil {
		c.Logger = hclog.NewNullLogger()
	}
	if c.Registerer == nil {
		c.Registerer = prometheus.NewRegistry()
	}
	h := &History{config: c, logger: c.Logger}
	h.writer = newWriter(&h.config)
	return h, nil
}

// Run writes steps until ctx ends.
func (h *History) Run(ctx context.Context) error {
	defer h.Close()
	h.tryOpen(time.Now())
	// Steps are at multiples of their length, so that those of several
	// controllers fall together.
	for {
		now := time.Now()
		timer := time.NewTimer(now.Truncate(h.config.Step).Add(h.config.Step).Sub(now))
		select {
		case <-ctx.Done():
			timer.Stop()
			// What came since the last step would be lost.
			h.Step(context.WithoutCancel(ctx), time.Now())
			return nil
		case <-timer.C:
			h.Step(ctx, time.Now().Truncate(h.config.Step))
		}
	}
}

// Open opens the history if it isn't. Run and Step do so by themselves.
func (h *History) Open(now time.Time) {
	h.step.Lock()
	defer h.step.Unlock()
	h.mu.RLock()
	opened := h.db != nil
	h.mu.RUnlock()
	if !opened {
		h.tryOpen(now)
	}
}

// Step writes one step. What goes wrong is told in the log and in Status.
func (h *History) Step(ctx context.Context, now time.Time) {
	h.step.Lock()
	defer h.step.Unlock()
	h.mu.RLock()
	db := h.db
	h.mu.RUnlock()
	if db == nil {
		if !h.tryOpen(now) {
			return
		}
	}
	h.mu.RLock()
	unkept, err := 0, ErrOff
	if h.db != nil {
		unkept, err = h.writer.write(ctx, h.db, now)
	}
	h.mu.RUnlock()
	h.wrote(now, unkept, err)
}

// wrote notes what became of a step.
func (h *History) wrote(now time.Time, unkept int, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	s := &h.status
	s.Unkept = unkept
	if err == nil {
		s.Steps++
	} else {
		s.Missed++
	}
	if (err == nil) != (s.Err == nil) || s.Since.IsZero() {
		s.Since = now
		if err != nil {
			h.logger.Error("history is not written, and tries again each step", "error", err)
		} else if s.Missed > 0 {
			h.logger.Info("history is written again", "count", s.Missed)
		}
	}
	s.Err = err
}

// tryOpen opens the database, and tells why not if that is news.
func (h *History) tryOpen(now time.Time) bool {
	db, err := h.open()
	if err != nil {
		h.wrote(now, 0, err)
		return false
	}
	r, err := newRemotes(&h.config, db)
	if err != nil {
		h.wrote(now, 0, errors.Join(err, db.Close()))
		return false
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.db, h.remote = db, r
	h.writer.reset()
	return true
}

func (h *History) open() (*tsdb.DB, error) {
	o := tsdb.DefaultOptions()
	o.RetentionDuration = h.config.Retention.Milliseconds()
	o.MaxBytes = h.config.Size
	o.MaxBlockDuration = max(o.MinBlockDuration, min(o.RetentionDuration/10, (31*24*time.Hour).Milliseconds()))
	o.WALCompression = compression.Snappy
	o.WALSegmentSize = 32 << 20
	o.NoLockfile = true // the whole data directory is locked
	o.StripeSize = 1 << 10
	o.HeadChunksWriteQueueSize = 0
	if err := os.MkdirAll(h.config.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("history: %w", err)
	}
	// A new registry each time: the database registers its metrics in New and
	// never takes them back.
	db, err := tsdb.Open(h.config.Dir, h.slog(), nil, o, nil)
	if err != nil {
		return nil, fmt.Errorf("history %s: %w", h.config.Dir, err)
	}
	return db, nil
}

// slog passes the library's warnings on. Debug and info are about its inner
// life.
func (h *History) slog() *slog.Logger {
	return slog.New(slog.NewTextHandler(h.logger.StandardWriter(&hclog.StandardLoggerOptions{ForceLevel: hclog.Warn}), &slog.HandlerOptions{Level: slog.LevelWarn}))
}

// Close closes the history. It is opened again by the next step.
func (h *History) Close() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.remote != nil {
		h.remote.close()
		h.remote = nil
	}
	if h.db != nil {
		if err := h.db.Close(); err != nil {
			h.logger.Warn("history was not closed as it should be", "error", err)
		}
		h.db = nil
	}
}

// Status returns how the history is.
func (h *History) Status() Status {
	h.mu.RLock()
	defer h.mu.RUnlock()
	s := h.status
	s.Running = h.db != nil && s.Err == nil
	s.Overflow = h.config.Table.Groups().Overflow()
	if h.db != nil {
		s.Series = h.db.Head().NumSeries()
		if oldest, err := h.db.StartTime(); err == nil && h.db.Head().NumSeries() > 0 {
			s.Oldest = time.UnixMilli(oldest)
		}
	}
	return s
}

// Querier returns a querier over what this controller has kept, for PromQL.
func (h *History) Querier(mint, maxt int64) (storage.Querier, error) {
	h.mu.RLock()
	defer h.mu.RUnlock()
	if h.db == nil {
		return nil, h.off()
	}
	return h.db.Querier(mint, maxt)
}

// ChunkQuerier is Querier for whole chunks.
func (h *History) ChunkQuerier(mint, maxt int64) (storage.ChunkQuerier, error) {
	h.mu.RLock()
	defer h.mu.RUnlock()
	if h.db == nil {
		return nil, h.off()
	}
	return h.db.ChunkQuerier(mint, maxt)
}

func (h *History) off() error {
	return fmt.Errorf("%w: %w", ErrOff, cmp.Or(h.status.Err, errors.New("it starts")))
}

// Dir returns the folder of the history in a data directory.
func Dir(dataDir string) string { return filepath.Join(dataDir, "history") }

// ParseSize reads a number of bytes such as 512MB, 20GB or 1TB; without a unit
// they are bytes.
func ParseSize(s string) (int64, error) {
	text, factor := strings.TrimSpace(s), int64(1)
	for unit, f := range map[string]int64{"KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12} {
		if cut, ok := strings.CutSuffix(strings.ToUpper(text), unit); ok {
			text, factor = strings.TrimSpace(cut), f
		}
	}
	n, err := strconv.ParseFloat(text, 64)
	if err != nil || n < 0 || n*float64(factor) > 1<<60 {
		return 0, fmt.Errorf("size %q: must be like 20GB", s)
	}
	return int64(n * float64(factor)), nil
}
