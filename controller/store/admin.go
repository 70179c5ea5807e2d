package store

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// probeTime is how long a member of etcd has to say how it is.
const probeTime = 3 * time.Second

// ErrNoEtcd means that the store is not on etcd.
var ErrNoEtcd = errors.New("the store is not on etcd")

// EtcdMember is one server of etcd and how it is.
type EtcdMember struct {
	Endpoint string
	Name     string
	Version  string
	Size     int64  // of the database's file, bytes
	InUse    int64  // of it that is in use, bytes
	Quota    int64  // that the file may reach, bytes; 0 if it does not say
	Leader   bool   // whether it leads etcd
	Index    uint64 // of the newest entry that it has applied
	Alarms   []string
	Err      error // why it does not answer; the rest is not known then

	id       uint64
	revision int64
}

// EtcdStatus is how etcd is.
type EtcdStatus struct {
	Embedded bool
	Members  []EtcdMember
	Revision int64 // newest of the members that answer
	Free     int64 // on the disk of the embedded etcd, bytes; -1 if not known
}

// Full tells whether a member refuses writes because of its quota.
func (s EtcdStatus) Full() bool {
	return slices.ContainsFunc(s.Members, func(m EtcdMember) bool { return slices.Contains(m.Alarms, "NOSPACE") })
}

func (s *Store) etcd() (*etcdKV, error) {
	if s.server == nil {
		return nil, ErrNoEtcd
	}
	return s.server, nil
}

// EtcdStatus asks every member of etcd how it is. It takes a few seconds if one
// does not answer.
func (s *Store) EtcdStatus(ctx context.Context) (EtcdStatus, error) {
	e, err := s.etcd()
	if err != nil {
		return EtcdStatus{}, err
	}
	return e.status(ctx)
}

func (e *etcdKV) status(ctx context.Context) (EtcdStatus, error) {
	st := EtcdStatus{Embedded: e.stop != nil, Free: -1}
	if e.dir != "" {
		var fs syscall.Statfs_t
		if err := syscall.Statfs(e.dir, &fs); err == nil {
			st.Free = int64(fs.Bavail) * int64(fs.Bsize) //nolint:unconvert // not as wide on every machine
		}
	}
	endpoints, names := e.members(ctx)
	st.Members = e.probe(ctx, endpoints)
	for i := range st.Members {
		m := &st.Members[i]
		m.Name = cmp.Or(names[m.id], m.Name)
		st.Revision = max(st.Revision, m.revision)
	}
	return st, nil
}

// members returns where all members are, the endpoints if etcd doesn't say.
func (e *etcdKV) members(ctx context.Context) (endpoints []string, names map[uint64]string) {
	names = map[uint64]string{}
	ctx, cancel := context.WithTimeout(ctx, probeTime)
	defer cancel()
	resp, err := e.client.MemberList(ctx)
	if err != nil {
		return e.endpoints, names
	}
	for _, m := range resp.Members {
		names[m.ID] = m.Name
		if len(m.ClientURLs) > 0 {
			endpoints = append(endpoints, m.ClientURLs[0])
		}
	}
	// The embedded one advertises the same socket, and one whose addresses we
	// can't use for a cluster of one is reached as we were told.
	if len(resp.Members) == 1 || len(endpoints) == 0 {
		return e.endpoints, names
	}
	return endpoints, names
}

// probe asks members how they are, all at once.
func (e *etcdKV) probe(ctx context.Context, endpoints []string) []EtcdMember {
	all := make([]EtcdMember, len(endpoints))
	var wg sync.WaitGroup
	for i, endpoint := range endpoints {
		wg.Go(func() { all[i] = e.ask(ctx, endpoint) })
	}
	wg.Wait()
	return all
}

func (e *etcdKV) ask(ctx context.Context, endpoint string) EtcdMember {
	m := EtcdMember{Endpoint: endpoint}
	ctx, cancel := context.WithTimeout(ctx, probeTime)
	defer cancel()
	client, err := e.dial([]string{endpoint})
	if err != nil {
		m.Err = err
		return m
	}
	defer func() { _ = client.Close() }() // it was only asked
	st, err := client.Status(ctx, endpoint)
	if err != nil {
		if errors.Is(err, context.DeadlineExceeded) {
			err = fmt.Errorf("no answer within %v", probeTime)
		}
		m.Err = cmp.Or(e.knock(endpoint), err)
		return m
	}
	m.id, m.Version, m.Size, m.InUse, m.Quota = st.Header.MemberId, st.Version, st.DbSize, st.DbSizeInUse, st.DbSizeQuota
	m.Leader, m.Index, m.revision = st.Leader == st.Header.MemberId, st.RaftAppliedIndex, st.Header.Revision
	for _, text := range st.Errors {
		// Such as "memberID:1234 alarm:NOSPACE".
		if _, alarm, ok := strings.Cut(text, "alarm:"); ok {
			text = strings.TrimSpace(alarm)
		}
		if !slices.Contains(m.Alarms, text) {
			m.Alarms = append(m.Alarms, text)
		}
	}
	return m
}

// knock returns why an endpoint can't be connected to, which etcd's client
// keeps to itself; nil if it can.
func (e *etcdKV) knock(endpoint string) error {
	u, err := url.Parse(endpoint)
	if err != nil || u.Host == "" {
		return err // such as the path of a socket
	}
	conn, err := net.DialTimeout("tcp", u.Host, time.Second)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }() // nothing was said
	if u.Scheme != "https" {
		return nil
	}
	c := &tls.Config{MinVersion: tls.VersionTLS12}
	if e.tls != nil {
		c = e.tls.Clone()
	}
	c.ServerName = cmp.Or(c.ServerName, u.Hostname())
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	return tls.Client(conn, c).HandshakeContext(ctx)
}

// RepairEtcd makes room in etcd: it forgets old revisions, gives back what is
// free in each member's file, one member at a time and the leader last, and
// lets it take writes again. Nothing that is in force is lost. told is called
// with what was done, step by step.
func (s *Store) RepairEtcd(ctx context.Context, told func(string)) error {
	e, err := s.etcd()
	if err != nil {
		return err
	}
	before, err := e.status(ctx)
	if err != nil {
		return err
	}
	if err := e.compact(ctx, before.Revision); err != nil {
		return fmt.Errorf("forget old revisions: %w", err)
	}
	told(fmt.Sprintf("old revisions are forgotten, up to %d", before.Revision))
	members := slices.Clone(before.Members)
	slices.SortStableFunc(members, func(a, b EtcdMember) int {
		if a.Leader == b.Leader {
			return 0
		}
		if b.Leader {
			return -1
		}
		return 1
	})
	var errs []error
	for _, m := range members {
		after, err := e.defragment(ctx, m)
		if err != nil {
			errs = append(errs, fmt.Errorf("member %s: %w", cmp.Or(m.Name, m.Endpoint), err))
			continue
		}
		told(fmt.Sprintf("member %s: %d of %d bytes given back", cmp.Or(m.Name, m.Endpoint), max(m.Size-after, 0), m.Size))
	}
	if err := errors.Join(errs...); err != nil {
		return err // an alarm that is lifted with a full member comes back
	}
	n, err := e.disarm(ctx)
	if err != nil {
		return fmt.Errorf("lift the alarm: %w", err)
	}
	if n > 0 {
		told("writes are taken again")
	}
	return nil
}

func (e *etcdKV) compact(ctx context.Context, revision int64) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	_, err := e.client.Compact(ctx, revision, clientv3.WithCompactPhysical())
	if errors.Is(err, rpctypes.ErrCompacted) {
		return nil // as far as that already
	}
	if err != nil {
		return etcdError(err)
	}
	return nil
}

// defragment returns the size of the member's file afterwards.
func (e *etcdKV) defragment(ctx context.Context, m EtcdMember) (size int64, err error) {
	if m.Err != nil {
		return 0, m.Err
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	client, err := e.dial([]string{m.Endpoint})
	if err != nil {
		return 0, err
	}
	defer func() { _ = client.Close() }() // what it was for has come
	if _, err := client.Defragment(ctx, m.Endpoint); err != nil {
		return 0, etcdError(err)
	}
	st, err := client.Status(ctx, m.Endpoint)
	if err != nil {
		return 0, etcdError(err)
	}
	return st.DbSize, nil
}

// disarm lifts all alarms about space, and returns how many there were.
func (e *etcdKV) disarm(ctx context.Context) (n int, err error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	list, err := e.client.AlarmList(ctx)
	if err != nil {
		return 0, etcdError(err)
	}
	for _, a := range list.Alarms {
		if a.Alarm != etcdserverpb.AlarmType_NOSPACE {
			continue
		}
		if _, err := e.client.AlarmDisarm(ctx, &clientv3.AlarmMember{MemberID: a.MemberID, Alarm: a.Alarm}); err != nil {
			return n, etcdError(err)
		}
		n++
	}
	return n, nil
}

// Snapshot returns a backup of etcd as a stream: the database of one member,
// and the SHA-256 of it as the last 32 bytes. size is about how long it will
// be. The caller closes it.
func (s *Store) Snapshot(ctx context.Context) (r io.ReadCloser, size int64, err error) {
	e, err := s.etcd()
	if err != nil {
		return nil, 0, err
	}
	st, err := e.status(ctx)
	if err != nil {
		return nil, 0, err
	}
	// The member that has seen most: one that lags would give an old backup.
	best := slices.MaxFunc(st.Members, func(a, b EtcdMember) int { return cmp.Compare(a.Index, b.Index) })
	if best.Err != nil {
		return nil, 0, fmt.Errorf("%w: %s: %w", ErrUnavailable, best.Endpoint, best.Err)
	}
	client, err := e.dial([]string{best.Endpoint})
	if err != nil {
		return nil, 0, err
	}
	resp, err := client.SnapshotWithVersion(ctx)
	if err != nil {
		return nil, 0, errors.Join(etcdError(err), client.Close())
	}
	return snapshotStream{resp.Snapshot, client}, best.Size, nil
}

// snapshotStream ends its client too.
type snapshotStream struct {
	io.ReadCloser
	client *clientv3.Client
}

func (s snapshotStream) Close() error {
	err := s.ReadCloser.Close()
	_ = s.client.Close() // it was only for this
	return err
}
