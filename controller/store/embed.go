package store

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"go.etcd.io/etcd/server/v3/embed"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3client"
	"go.uber.org/zap"
)

const (
	defaultQuota     = 2 << 30
	defaultRetention = time.Hour

	// What the member of the embedded etcd is called. It is in the data.
	memberName = "cakefleet"
	memberPeer = "unix://cakefleet"

	// socketMost is how long the path of a socket may be on Linux, less room
	// for the name.
	socketMost = 108 - len("/client.sock") - 1
)

// startEmbedded starts an etcd of one member. The store talks to it without a
// socket; the client socket in the data directory is there for etcdctl. Both
// sockets are files in a directory that only this user can enter, because this
// etcd asks nobody who they are.
func startEmbedded(ctx context.Context, c Config) (*etcdKV, error) {
	if c.DataDir == "" {
		return nil, errors.New("start etcd: data directory is missing")
	}
	dir, err := filepath.Abs(filepath.Join(c.DataDir, "etcd"))
	if err != nil {
		return nil, fmt.Errorf("start etcd: %w", err)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("start etcd: %w", err)
	}
	// etcd itself would wait for the other one for ever, without a word.
	lock, err := lockDir(dir)
	if err != nil {
		return nil, fmt.Errorf("start etcd: %w", err)
	}
	if err := checkLog(dir); err != nil {
		return nil, errors.Join(fmt.Errorf("start etcd: %w", err), lock.Close())
	}
	sockets, temporary := dir, ""
	if len(sockets) > socketMost {
		if temporary, err = os.MkdirTemp("", "cakefleet-etcd-"); err != nil {
			return nil, errors.Join(fmt.Errorf("start etcd: %w", err), lock.Close())
		}
		sockets = temporary
	}
	clean := func() error {
		if temporary != "" {
			_ = os.RemoveAll(temporary) // in the system's temporary directory, which is cleaned anyway
		}
		return lock.Close()
	}
	log := newCore(c.Logger)
	died := newDeath(dir)
	server, err := start(ctx, embedConfig(c, dir, sockets, log, died), died)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start etcd in %s: %w", dir, err), clean())
	}
	kv := &etcdKV{
		client: v3client.New(server.Server), died: died, dir: dir,
		endpoints: []string{"unix://" + filepath.Join(sockets, "client.sock")},
	}
	kv.stop = func() error {
		log.closing.Store(true)
		server.Close()
		return clean()
	}
	select {
	case <-server.Server.ReadyNotify():
		return kv, nil
	case err = <-server.Err():
	case <-died.done:
		err = died.err
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	return nil, errors.Join(fmt.Errorf("start etcd in %s: %w", dir, err), kv.Close())
}

// start starts etcd, but does not wait for it when it has died or when ctx
// ends: it may hang for ever then, and the process is to end anyway.
func start(ctx context.Context, cfg *embed.Config, died *death) (*embed.Etcd, error) {
	type result struct {
		server *embed.Etcd
		err    error
	}
	started := make(chan result, 1) // the goroutine never waits for the reader
	go func() {
		var r result
		defer func() {
			if p := recover(); p != nil {
				r = result{err: died.damaged(fmt.Sprint(p))}
			}
			started <- r
		}()
		r.server, r.err = embed.StartEtcd(cfg)
		if r.err != nil {
			r.err = died.explain("it could not be started", r.err)
		}
	}()
	select {
	case r := <-started:
		return r.server, r.err
	case <-died.done:
		return nil, died.err
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// lockDir takes the lock on a data directory. It is held until the file is
// closed, also by the end of the process.
func lockDir(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		if errors.Is(err, syscall.EWOULDBLOCK) {
			err = errors.New("another controller is running on it")
		}
		return nil, errors.Join(fmt.Errorf("lock %s: %w", dir, err), f.Close())
	}
	return f, nil
}

func embedConfig(c Config, dir, sockets string, log *core, died *death) *embed.Config {
	cfg := embed.NewConfig()
	cfg.Name = memberName
	cfg.Dir = dir
	cfg.ListenClientUrls = []url.URL{{Scheme: "unix", Path: filepath.Join(sockets, "client.sock")}}
	cfg.AdvertiseClientUrls = cfg.ListenClientUrls
	// For peers etcd takes the host alone as the path. There are none; what is
	// advertised must stay the same for as long as the data does.
	cfg.ListenPeerUrls = []url.URL{{Scheme: "unix", Host: filepath.Join(sockets, "peer.sock")}}
	cfg.AdvertisePeerUrls = []url.URL{{Scheme: "unix", Host: memberName}}
	cfg.InitialCluster = memberName + "=" + memberPeer
	cfg.InitialClusterToken = memberName
	// Off by default in etcd, and the data would grow for ever.
	cfg.AutoCompactionMode = embed.CompactorModePeriodic
	cfg.AutoCompactionRetention = or(c.Retention, defaultRetention).String()
	cfg.QuotaBackendBytes = or(c.Quota, defaultQuota)
	cfg.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zap.New(log, zap.WithFatalHook(died), zap.WithPanicHook(died)))
	return cfg
}

func or[T comparable](v, def T) T {
	var zero T
	if v == zero {
		return def
	}
	return v
}
