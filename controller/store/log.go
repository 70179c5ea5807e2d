package store

import (
	"slices"
	"sync/atomic"

	"github.com/hashicorp/go-hclog"
	"go.uber.org/zap/zapcore"
)

// core passes etcd's log on to ours, two levels quieter: what etcd calls
// information is of no use to an operator.
type core struct {
	logger  hclog.Logger
	fields  []zapcore.Field
	closing *atomic.Bool // errors are expected from now on: etcd reports each socket that it closes
}

func newCore(l hclog.Logger) *core {
	if l == nil {
		l = hclog.NewNullLogger()
	}
	return &core{logger: l.Named("etcd"), closing: new(atomic.Bool)}
}

func (c *core) level(l zapcore.Level) hclog.Level {
	switch {
	case l >= zapcore.ErrorLevel && !c.closing.Load():
		return hclog.Warn
	case l >= zapcore.ErrorLevel:
		return hclog.Debug
	case l == zapcore.WarnLevel:
		return hclog.Debug
	default:
		return hclog.Trace
	}
}

// Enabled tells whether an entry would be written. A logger that writes nothing
// has no level; etcd makes text of each request for a log that has debugging on.
func (c *core) Enabled(l zapcore.Level) bool {
	level := c.logger.GetLevel()
	return level != hclog.NoLevel && c.level(l) >= level
}

func (c *core) With(fields []zapcore.Field) zapcore.Core {
	return &core{logger: c.logger, fields: append(slices.Clip(c.fields), fields...), closing: c.closing}
}

func (c *core) Check(e zapcore.Entry, ce *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if !c.Enabled(e.Level) {
		return ce
	}
	return ce.AddCore(e, c)
}

func (c *core) Write(e zapcore.Entry, fields []zapcore.Field) error {
	enc := zapcore.NewMapObjectEncoder()
	for _, f := range c.fields {
		f.AddTo(enc)
	}
	for _, f := range fields {
		f.AddTo(enc)
	}
	c.logger.Log(c.level(e.Level), "etcd says", "said", e.Message, "facts", enc.Fields)
	return nil
}

func (c *core) Sync() error { return nil }
