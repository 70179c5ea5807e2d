package main

import (
	"context"
	"flag"
	"fmt"
	"net"
	"net/url"
	"strconv"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/server/v3/embed"
	"google.golang.org/protobuf/proto"

	"github.com/cakefleet/cakefleet/internal/grpcwire"
)

const (
	watchMethod = "/etcdserverpb.Watch/Watch"
	putMethod   = "/etcdserverpb.KV/Put"
	txnMethod   = "/etcdserverpb.KV/Txn"
)

// etcdServer is an etcd of one member.
func etcdServer(args []string) error {
	f := flag.NewFlagSet("etcd-server", flag.ExitOnError)
	dir := f.String("dir", "", "")
	client := f.String("client", "", "")
	peer := f.String("peer", "", "")
	if err := f.Parse(args); err != nil {
		return err
	}
	cfg := embed.NewConfig()
	cfg.Dir, cfg.LogLevel, cfg.LogOutputs = *dir, "error", []string{"stderr"}
	cfg.ListenClientUrls = []url.URL{{Scheme: "http", Host: *client}}
	cfg.AdvertiseClientUrls = cfg.ListenClientUrls
	cfg.ListenPeerUrls = []url.URL{{Scheme: "http", Host: *peer}}
	cfg.AdvertisePeerUrls = cfg.ListenPeerUrls
	cfg.InitialCluster = "default=http://" + *peer
	server, err := embed.StartEtcd(cfg)
	if err != nil {
		return err
	}
	return <-server.Err()
}

func etcdClient(d *net.Dialer, address string) (*grpcwire.Client, error) {
	raw, err := d.Dial("tcp", address)
	if err != nil {
		return nil, err
	}
	return grpcwire.NewClient(raw, "http", address)
}

func send(c *grpcwire.Client, method string, m proto.Message, end bool) error {
	raw, err := proto.Marshal(m)
	if err != nil {
		return err
	}
	stream, err := c.Open(method)
	if err != nil {
		return err
	}
	return c.Send(stream, raw, end)
}

// etcdChild plays agents that watch a key each and put their answer.
func etcdChild(args []string) error {
	f := flag.NewFlagSet("etcd", flag.ExitOnError)
	address := f.String("address", "", "")
	from := f.Int("from", 0, "")
	count := f.Int("count", 0, "")
	source := f.Int("source", 1, "")
	if err := f.Parse(args); err != nil {
		return err
	}
	var t tally
	dialer := &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 2, byte(*source))}}
	go func() {
		for i := range *count {
			c, err := etcdClient(dialer, *address)
			if err != nil {
				fmt.Println(err)
				return
			}
			id := routerID(*from + i)
			create := &etcdserverpb.WatchRequest{RequestUnion: &etcdserverpb.WatchRequest_CreateRequest{
				CreateRequest: &etcdserverpb.WatchCreateRequest{Key: []byte("desired/" + id)},
			}}
			if err := send(c, watchMethod, create, false); err != nil {
				fmt.Println(err)
				return
			}
			go func() {
				ack := &etcdserverpb.PutRequest{Key: []byte("status/" + id), Value: make([]byte, statusSize)}
				for {
					e, err := c.Recv()
					if err != nil {
						return
					}
					m := &etcdserverpb.WatchResponse{}
					if e.Message == nil || e.Stream != 1 || proto.Unmarshal(e.Message, m) != nil {
						continue
					}
					switch {
					case m.GetCreated():
						t.add(func(a *answer) { a.Connected++ })
					case len(m.GetEvents()) > 0:
						if send(c, putMethod, ack, true) != nil {
							return
						}
						t.answered()
					}
				}
			}()
		}
	}()
	return t.serve(nil)
}

// benchEtcd does the same job with etcd alone: a key and a watch for each
// agent, and a key for its answer.
func benchEtcd(ctx context.Context, o options) (p pushed, err error) {
	var pids []int
	var all crowd
	defer func() { all.stop() }()
	from, count := o.groups()
	var writers []*grpcwire.Client
	for i := range from {
		address, err := freeAddress()
		if err != nil {
			return p, err
		}
		peer, err := freeAddress()
		if err != nil {
			return p, err
		}
		server, err := startChild(ctx, "etcd-server", "--dir", fmt.Sprintf("%s/etcd-%d", o.dir, i), "--client", address, "--peer", peer)
		if err != nil {
			return p, err
		}
		defer func() {
			_ = server.cmd.Process.Kill() // its data go with the directory
			_ = server.cmd.Wait()         // likewise
		}()
		pids = append(pids, server.cmd.Process.Pid)
		var w *grpcwire.Client
		for range 200 {
			if w, err = etcdClient(&net.Dialer{}, address); err == nil {
				break
			}
			time.Sleep(50 * time.Millisecond)
		}
		if err != nil {
			return p, err
		}
		writers = append(writers, w)
		time.Sleep(2 * time.Second) // until there is a leader
		kid, err := startChild(ctx, "etcd", "--address", address,
			"--from", strconv.Itoa(from[i]), "--count", strconv.Itoa(count[i]), "--source", strconv.Itoa(1+i))
		if err != nil {
			return p, err
		}
		all = append(all, kid)
	}
	empty, err := used(pids...)
	if err != nil {
		return p, err
	}
	if err := all.until(ctx, "all watch", 10*time.Minute, func(a answer) bool { return a.Connected >= o.n }); err != nil {
		return p, err
	}
	p, err = rounds(ctx, o, all, pids, func(int) error {
		for i, w := range writers {
			if err := putAll(w, from[i], count[i]); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return p, err
	}
	u, err := used(pids...)
	p.memory = float64(u.resident-empty.resident) / float64(o.n)
	return p, err
}

// putAll writes a desired state for each agent, 64 in a transaction.
func putAll(c *grpcwire.Client, from, count int) error {
	const batch = 50 // fits into a frame
	for at := 0; at < count; at += batch {
		txn := &etcdserverpb.TxnRequest{}
		for i := at; i < min(at+batch, count); i++ {
			txn.Success = append(txn.Success, &etcdserverpb.RequestOp{Request: &etcdserverpb.RequestOp_RequestPut{
				RequestPut: &etcdserverpb.PutRequest{Key: []byte("desired/" + routerID(from+i)), Value: make([]byte, desiredSize)},
			}})
		}
		if err := send(c, txnMethod, txn, true); err != nil {
			return err
		}
		for {
			e, err := c.Recv()
			if err != nil {
				return err
			}
			if e.End != nil {
				break
			}
		}
	}
	return nil
}
