package main

import (
	"bufio"
	"context"
	"crypto/ed25519"
	"crypto/x509"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strconv"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	agentidentity "github.com/cakefleet/cakefleet/agent/identity"
	"github.com/cakefleet/cakefleet/controller/door"
	"github.com/cakefleet/cakefleet/controller/identity"
	"github.com/cakefleet/cakefleet/internal/testnet"
	"github.com/cakefleet/cakefleet/internal/wire"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

const (
	controllerAddress = echoer4 + ":8443"
	authorityDir      = "/tmp/authority"
	reportEvery       = 10 * time.Second
)

// controller serves the agents' door, the same that controllers have, and asks
// for a report every reportEvery. It changes nothing. For each report it writes
// a line with the monotonic time.
func controller() error {
	authority, err := identity.Open(authorityDir, time.Now())
	if err != nil {
		return err
	}
	tls, err := authority.AgentsTLS()
	if err != nil {
		return err
	}
	l, err := net.Listen("tcp", controllerAddress)
	if err != nil {
		return err
	}
	return door.New(door.Config{
		TLS: tls, Method: pb.SessionService_Connect_FullMethodName,
		Open: func(_ context.Context, s *door.Stream) (door.Session, error) { return &session{stream: s}, nil },
	}).Serve(l)
}

// session is an agent's.
type session struct {
	stream  *door.Stream
	greeted bool
}

func (s *session) Receive(m []byte) error {
	if _, ok := wire.CutReport(m); ok {
		fmt.Println(monotonic())
	}
	if s.greeted {
		return nil
	}
	s.greeted = true
	return s.stream.Send(&pb.ConnectResponse{Message: &pb.ConnectResponse_Settings{Settings: &pb.Settings{
		ReportInterval: durationpb.New(reportEvery), Differences: true,
	}}})
}

func (s *session) Writable() {}
func (s *session) Closed()   {}

// introduce makes a fleet and gives the agent that keeps its state in dir its
// identity there.
func introduce(dir string) error {
	if err := os.MkdirAll(authorityDir, 0o700); err != nil {
		return err
	}
	now := time.Now()
	authority, err := identity.Open(authorityDir, now)
	if err != nil {
		return err
	}
	public, key, err := ed25519.GenerateKey(nil)
	if err != nil {
		return err
	}
	const name = "lab"
	der, err := authority.SignRouter(public, name, now)
	if err != nil {
		return err
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		return err
	}
	ca, err := x509.ParseCertificate(authority.Certificate())
	if err != nil {
		return err
	}
	id := agentidentity.Identity{RouterID: name, Key: key, Leaf: leaf, Authorities: []*x509.Certificate{ca}}
	return id.Save(dir)
}

// reports are those that the controller has got.
type reports struct {
	first chan struct{} // closed with the first

	mu sync.Mutex
	at []int64 // monotonic ns
}

// startController starts the controller on a host.
func startController(host *testnet.Namespace) (*reports, error) {
	cmd := exec.Command(self, "controller")
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := host.Start(cmd); err != nil {
		return nil, fmt.Errorf("start %v: %w", cmd.Args, err)
	}
	r := &reports{first: make(chan struct{})}
	go func() {
		for sc := bufio.NewScanner(out); sc.Scan(); {
			at, err := strconv.ParseInt(sc.Text(), 10, 64)
			if err != nil {
				continue
			}
			r.mu.Lock()
			r.at = append(r.at, at)
			if len(r.at) == 1 {
				close(r.first)
			}
			r.mu.Unlock()
		}
	}()
	return r, nil
}

// await waits for the first report.
func (r *reports) await() error {
	const most = time.Minute
	select {
	case <-r.first:
		return nil
	case <-time.After(most):
		b, _ := os.ReadFile(agentLog)
		return fmt.Errorf("no report after %v; the agent says: %s", most, b)
	}
}

// between returns how many came between two times.
func (r *reports) between(from, to int64) (n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, at := range r.at {
		if at >= from && at < to {
			n++
		}
	}
	return n
}
