package store

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/hashicorp/go-hclog"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const (
	listPage       = 5000             // items in one answer
	requestTimeout = 10 * time.Second // of one request, on top of what the caller's context says
	dialTimeout    = 10 * time.Second
	keepalive      = 10 * time.Second
)

// OpenEtcd returns a store on the etcd cluster at c.Endpoints, or on an
// embedded etcd in c.DataDir if there are none. It has read all records.
func OpenEtcd(ctx context.Context, c Config) (*Store, error) {
	kv, err := openKV(ctx, c)
	if err != nil {
		return nil, err
	}
	between := Leaser(kv)
	if c.Between != nil {
		between = c.Between(kv)
	}
	s, err := New(ctx, between, c)
	if err != nil {
		return nil, err
	}
	s.server = kv
	return s, nil
}

func openKV(ctx context.Context, c Config) (*etcdKV, error) {
	if len(c.Endpoints) == 0 {
		return startEmbedded(ctx, c)
	}
	e := &etcdKV{endpoints: c.Endpoints, tls: c.TLS, logger: c.Logger}
	var err error
	if e.client, err = e.dial(e.endpoints); err != nil {
		return nil, err
	}
	if err := e.reach(ctx); err != nil {
		return nil, errors.Join(err, e.Close())
	}
	return e, nil
}

// dial returns a client of some endpoints, which connects when it is used.
func (e *etcdKV) dial(endpoints []string) (*clientv3.Client, error) {
	client, err := clientv3.New(clientv3.Config{
		Endpoints:            endpoints,
		TLS:                  e.tls,
		DialTimeout:          dialTimeout,
		DialKeepAliveTime:    keepalive,
		DialKeepAliveTimeout: keepalive,
		Logger:               zap.New(newCore(e.logger)),
	})
	if err != nil {
		return nil, fmt.Errorf("connect to etcd at %s: %w", strings.Join(endpoints, ","), err)
	}
	return client, nil
}

// reach waits until one of the endpoints answers, and tells meanwhile which of
// them don't and why.
func (e *etcdKV) reach(ctx context.Context) error {
	logger := e.logger
	if logger == nil {
		logger = hclog.NewNullLogger()
	}
	for wait := retryFirst; ; wait = min(2*wait, retryMost) {
		answers := false
		for _, m := range e.probe(ctx, e.endpoints) {
			if m.Err == nil {
				answers = true
			} else if ctx.Err() == nil {
				logger.Warn("etcd does not answer", "address", m.Endpoint, "error", m.Err)
			}
		}
		if answers {
			return nil
		}
		logger.Warn("no etcd to be reached, try again", "wait", wait)
		if err := sleep(ctx, wait); err != nil {
			return err
		}
	}
}

// etcdKV is a KV on etcd.
type etcdKV struct {
	client    *clientv3.Client
	endpoints []string // of the cluster, or the client socket of the embedded server
	tls       *tls.Config
	logger    hclog.Logger

	// Of the embedded server, if there is one.
	stop func() error
	died *death
	dir  string // with its data
}

func (e *etcdKV) List(ctx context.Context, prefix string) (items []Item, revision int64, err error) {
	from, end := prefix, clientv3.GetPrefixRangeEnd(prefix)
	for {
		resp, err := e.page(ctx, from, end, revision)
		if err != nil {
			return nil, 0, err
		}
		if revision == 0 {
			revision = resp.Header.Revision
		}
		for _, kv := range resp.Kvs {
			items = append(items, item(kv))
		}
		if !resp.More {
			return items, revision, nil
		}
		from = string(resp.Kvs[len(resp.Kvs)-1].Key) + "\x00"
	}
}

func (e *etcdKV) page(ctx context.Context, from, end string, revision int64) (*clientv3.GetResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	resp, err := unlessDead(e, func() (*clientv3.GetResponse, error) {
		return e.client.Get(ctx, from, clientv3.WithRange(end), clientv3.WithLimit(listPage), clientv3.WithRev(revision))
	})
	if err != nil {
		return nil, etcdError(err)
	}
	return resp, nil
}

func (e *etcdKV) Get(ctx context.Context, keys ...string) (items []Item, revision int64, err error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	gets := make([]clientv3.Op, len(keys))
	for i, k := range keys {
		gets[i] = clientv3.OpGet(k)
	}
	resp, err := unlessDead(e, e.client.Txn(ctx).Then(gets...).Commit)
	if err != nil {
		return nil, 0, etcdError(err)
	}
	return results(resp), resp.Header.Revision, nil
}

func (e *etcdKV) Range(ctx context.Context, q Range) (items []Item, count int, err error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	resp, err := unlessDead(e, func() (*clientv3.GetResponse, error) {
		return e.client.Get(ctx, q.From, clientv3.WithRange(q.End), clientv3.WithLimit(int64(q.Limit)))
	})
	if err != nil {
		return nil, 0, etcdError(err)
	}
	for _, kv := range resp.Kvs {
		items = append(items, item(kv))
	}
	return items, int(resp.Count), nil
}

func (e *etcdKV) Txn(ctx context.Context, compares []Compare, ops []Op) (TxnResult, error) {
	return e.TxnLeased(ctx, 0, compares, ops)
}

func (e *etcdKV) TxnLeased(ctx context.Context, l Lease, compares []Compare, ops []Op) (TxnResult, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	cmps := make([]clientv3.Cmp, len(compares))
	gets := make([]clientv3.Op, len(compares))
	for i, c := range compares {
		cmps[i] = clientv3.Compare(clientv3.ModRevision(c.Key), string(c.Relation), c.Revision)
		gets[i] = clientv3.OpGet(c.Key)
	}
	then := make([]clientv3.Op, len(ops))
	for i, o := range ops {
		if o.Value == nil {
			then[i] = clientv3.OpDelete(o.Key)
		} else {
			then[i] = clientv3.OpPut(o.Key, string(o.Value), clientv3.WithLease(clientv3.LeaseID(l)))
		}
	}
	resp, err := unlessDead(e, e.client.Txn(ctx).If(cmps...).Then(then...).Else(gets...).Commit)
	if err != nil {
		return TxnResult{}, leaseError(err)
	}
	r := TxnResult{OK: resp.Succeeded, Revision: resp.Header.Revision}
	if !r.OK {
		r.Items = results(resp)
	}
	return r, nil
}

func (e *etcdKV) Watch(ctx context.Context, prefix string, after int64, seen func(Batch)) error {
	ctx, cancel := context.WithCancel(watchContext(ctx))
	defer cancel()
	watch := e.client.Watch(ctx, prefix, clientv3.WithPrefix(), clientv3.WithRev(after+1),
		clientv3.WithProgressNotify(), clientv3.WithFragment())
	for resp := range watch {
		if resp.CompactRevision != 0 {
			return ErrCompacted
		}
		if err := resp.Err(); err != nil {
			return etcdError(err)
		}
		b := Batch{Items: make([]Item, len(resp.Events))}
		for i, ev := range resp.Events {
			b.Items[i] = item(ev.Kv)
			if ev.Type == clientv3.EventTypeDelete {
				b.Items[i].Value = nil
			}
		}
		switch {
		case resp.IsProgressNotify():
			b.Revision = resp.Header.Revision
		case len(b.Items) > 0:
			// Not the header's: while a watch catches up, that is ahead.
			b.Revision = b.Items[len(b.Items)-1].Revision
		}
		seen(b)
	}
	if err := context.Cause(ctx); err != nil {
		return err
	}
	return fmt.Errorf("%w: watch was closed", ErrUnavailable)
}

func (e *etcdKV) Progress(ctx context.Context) error {
	if err := e.client.RequestProgress(watchContext(ctx)); err != nil {
		return etcdError(err)
	}
	return nil
}

func (e *etcdKV) Close() error {
	if e.died != nil && e.died.is() {
		return nil // it holds its own locks for ever; only the end of the process frees them
	}
	err := e.client.Close()
	if errors.Is(err, context.Canceled) {
		err = nil // what the client says when it ends as it should
	}
	if e.stop != nil {
		err = errors.Join(err, e.stop())
	}
	if err != nil {
		return fmt.Errorf("close etcd: %w", err)
	}
	return nil
}

// unlessDead returns what call does. The embedded server reads in its caller's
// goroutine and, once it died, waits there for locks that nobody lets go of,
// whatever the context says; then the call is left behind.
func unlessDead[T any](e *etcdKV, call func() (T, error)) (T, error) {
	if e.died == nil {
		return call()
	}
	type answer struct {
		of  T
		err error
	}
	answered := make(chan answer, 1)
	go func() {
		of, err := call()
		answered <- answer{of, err}
	}()
	select {
	case a := <-answered:
		return a.of, a.err
	case <-e.died.done:
		var none T
		return none, fmt.Errorf("%w: %w", ErrUnavailable, e.died.err)
	}
}

// watchContext makes a member without a leader end the watch instead of
// looking healthy. Watch and Progress must agree on it to share a stream.
func watchContext(ctx context.Context) context.Context { return clientv3.WithRequireLeader(ctx) }

func item(kv *mvccpb.KeyValue) Item {
	v := kv.Value
	if v == nil {
		v = []byte{} // nil would mean deleted
	}
	return Item{Key: string(kv.Key), Value: v, Revision: kv.ModRevision}
}

func results(resp *clientv3.TxnResponse) (items []Item) {
	for _, r := range resp.Responses {
		for _, kv := range r.GetResponseRange().GetKvs() {
			items = append(items, item(kv))
		}
	}
	return items
}

// etcdError puts the sentinel that callers branch on before etcd's error.
func etcdError(err error) error {
	code := status.Code(err)
	if e, ok := errors.AsType[rpctypes.EtcdError](err); ok {
		code = e.Code()
	}
	switch {
	case errors.Is(err, rpctypes.ErrNoSpace):
		return fmt.Errorf("%w: %w", ErrFull, err)
	case slices.Contains([]codes.Code{codes.Unavailable, codes.DeadlineExceeded, codes.Canceled, codes.ResourceExhausted}, code),
		errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		return fmt.Errorf("%w: %w", ErrUnavailable, err)
	default:
		return fmt.Errorf("etcd: %w", err)
	}
}
