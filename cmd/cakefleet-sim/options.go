package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
)

const help = `cakefleet-sim plays routers against a real controller: the real session over
mutual TLS, with joins, pushes, answers and reports, and without packets. A router
costs this process one open file.

  cakefleet-sim -n 1000 --plan gold --for 5m
  cakefleet-sim -n 20000 --plan gold --sites 200 --state sim.routers
  cakefleet-sim --tokens tokens.txt --agents controller.example.net:8443

How routers join. With --plan, the simulator asks at the operators' door: it makes
subscribers sim-000000, sim-000001 and so on with that plan and a join token for
each, and removes all of them when it ends. With --state FILE they stay, and their
keys are kept in FILE, so that the next run connects at once. With --tokens FILE it
needs no operator: each line has a token that "cakefleetctl token create" printed.
Play against a controller of its own and not against the one that customers are on.
A controller lets 1000 routers join at once, then 200 a second of all and 50 a
second of one address, so that a large fleet is joined once and kept with --state.

How to size a controller. Start one on the machine that is to be sized, and this on
another, so that they don't take each other's CPU. Join the number of routers that
you will have (with --state), let it run for 10 minutes, and read what they cost at
the controller's --listen-admin, /metrics:

  process_resident_memory_bytes     divided by the sessions: memory of a router
  rate of process_cpu_seconds_total with reports: CPU of the calm fleet

Then measure what is not calm:
  a plan     cakefleetctl plan set gold --down 200mbit, and look at the lag here
  a storm    restart the controller: the time until all sessions are back
  a rollout  cakefleetctl rollout start, with --refuse, --clamp, --most or --sojourn
             here as what its gates have to find

What it was on two cores that did other things too, the simulator beside it; a
rollout has four waves, --soak 20s and two gates. Times are of a busy machine:

  routers  reports  calm CPU       memory  a whole rollout, beyond that
   2000    10 s     6 % of a core  154 MB   89 s, 0.6 s of CPU, 16 MB
  10000    10 s     7 % of a core  370 MB  104 s, 4.2 s of CPU, 44 MB
 100000    30 s    43 % of a core  3.5 GB  573 s, 71 s of CPU, 1.1 GB

The last is six controllers together, with an etcd outside, --soak 45s, and some
of the sessions still coming while it was measured.

A controller needs an open file for each router too (LimitNOFILE), and a large
fleet is best connected over a time: --ramp 5m.

Leave half of the CPU free: the storm after a power cut needs it. Divide what does
not fit into one machine among several controllers of one etcd; name their doors
with --agents, separated by commas.

What is shown each second, and in the end: sessions; pushes (desired states that
came) and acks (answers that a router runs it, also with other values), refusals;
reports; and lag, the time from the first router that got a revision to each other
that had a session then.

Options:
`

// options are what is played.
type options struct {
	agents      []string // doors for agents
	operators   string
	credentials string
	tokens      string // file
	state       string // file
	n, from     int
	prefix      string
	plan        string
	sites       int
	time        time.Duration // 0: until ctx ends
	ramp        time.Duration // over which the first sessions are opened
	sources     []net.IP

	refuse, clamp, offline share
	most                   engine.BitsPerSecond // that a router can do; 0: anything
	load, drop             share
	sojourn, sojourn99     time.Duration // median and 99th percentile
	reportEvery            time.Duration // 0: as the controller says; negative: never
	seed                   uint64
	model, version         string

	output string
	quiet  bool
}

// share is a part of all, 0 to 1.
type share float64

// String returns it as Set reads it.
func (s *share) String() string { return strconv.FormatFloat(float64(*s)*100, 'g', 6, 64) + "%" }

// Set reads a percentage.
func (s *share) Set(text string) error {
	number, ok := strings.CutSuffix(text, "%")
	v, err := strconv.ParseFloat(number, 64)
	if !ok || err != nil || !(v >= 0 && v <= 100) {
		return errors.New("must be a share such as 5%")
	}
	*s = share(v / 100)
	return nil
}

// parse reads the command line; nil without an error: there is nothing to do.
func parse(args []string, stdout io.Writer) (*options, error) {
	o := &options{load: 0.3, drop: 0.001}
	f := flag.NewFlagSet("cakefleet-sim", flag.ContinueOnError)
	f.SetOutput(io.Discard) // errors are told once, by main
	var agents, sources string
	var onlyVersion bool
	f.StringVar(&agents, "agents", "127.0.0.1:8443", "`addresses` of the controllers' doors for agents, separated by commas")
	f.StringVar(&o.operators, "operators", env("CAKEFLEET_CONTROLLER", "127.0.0.1:8444"), "`address` of a controller's door for operators (also CAKEFLEET_CONTROLLER)")
	f.StringVar(&o.credentials, "credentials", env("CAKEFLEET_CREDENTIALS", defaultCredentials()), "`file` with an operator's certificate and key (also CAKEFLEET_CREDENTIALS)")
	f.StringVar(&o.plan, "plan", "", "`name` of the plan that the subscribers get, which are made at the operators' door")
	f.StringVar(&o.tokens, "tokens", "", "`file` with a join token in each line, instead; - is standard input")
	f.StringVar(&o.state, "state", "", "`file` that keeps the keys of the routers, which are secret, for the next run")
	f.IntVar(&o.n, "n", 100, "`number` of routers; with --tokens at most one for each token")
	f.IntVar(&o.from, "from", 0, "`number` of the first router, to divide a fleet among several processes")
	f.StringVar(&o.prefix, "prefix", "sim-", "what the ids of routers and subscribers begin with (`text`)")
	f.IntVar(&o.sites, "sites", 0, "`number` of values of the subscribers' label site; 0: no label")
	f.DurationVar(&o.time, "for", 0, "how `long` to play; 0: until Ctrl-C")
	f.DurationVar(&o.ramp, "ramp", 0, "`time` over which the routers open their first sessions; 0: all at once, which is a storm")
	f.StringVar(&sources, "source", "", "`addresses` of this machine to connect from, separated by commas, for more than one address has ports; on the loopback they are chosen")
	f.Var(&o.refuse, "refuse", "`share` of the routers that refuse every plan")
	f.Var(&o.clamp, "clamp", "`share` of the routers that run half of every rate")
	f.Func("most", "highest `rate` that a router can do, such as 500mbit; one above it is clamped (default any)", func(s string) (err error) {
		o.most, err = engine.ParseRate(s)
		return err
	})
	f.Var(&o.offline, "offline", "`share` of the routers that join and then stay away")
	f.Var(&o.load, "load", "`share` of the plan's rates that the homes use, as reports tell")
	f.Var(&o.drop, "drop", "`share` of packets that reports count as dropped")
	f.DurationVar(&o.sojourn, "sojourn", 2*time.Millisecond, "median `time` in the queue that reports tell")
	f.DurationVar(&o.sojourn99, "sojourn-p99", 10*time.Millisecond, "99th percentile of that `time`")
	f.DurationVar(&o.reportEvery, "report-interval", 0, "`time` between two reports of a router; 0: as the controller says; negative: none")
	f.Uint64Var(&o.seed, "seed", 1, "`number` that decides which routers refuse, clamp or stay away")
	f.StringVar(&o.model, "model", "simulated", "hardware `model` that routers say they are")
	f.StringVar(&o.version, "agent-version", "sim", "`version` that agents say they have")
	f.StringVar(&o.output, "o", "table", "how to print the summary: table or json (`format`)")
	f.BoolVar(&o.quiet, "quiet", false, "don't show the progress on standard error")
	f.BoolVar(&onlyVersion, "version", false, "print the version and end")
	f.Usage = func() {}
	switch err := f.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		f.SetOutput(stdout)
		fmt.Fprint(stdout, help)
		f.PrintDefaults()
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("%w; see --help", err)
	case onlyVersion:
		fmt.Fprintln(stdout, "cakefleet-sim", version)
		return nil, nil
	case f.NArg() > 0:
		return nil, fmt.Errorf("argument %q is not understood; see --help", f.Arg(0))
	}
	o.agents = split(agents)
	for _, text := range split(sources) {
		ip := net.ParseIP(text)
		if ip == nil {
			return nil, fmt.Errorf("--source %q: must be addresses of this machine, such as 192.0.2.7", text)
		}
		o.sources = append(o.sources, ip)
	}
	return o, o.validate()
}

func (o *options) validate() error {
	for _, a := range append([]string{o.operators}, o.agents...) {
		if _, _, err := net.SplitHostPort(a); err != nil {
			return fmt.Errorf("address %q: must be HOST:PORT, such as 127.0.0.1:8443", a)
		}
	}
	switch {
	case len(o.agents) == 0:
		return errors.New("--agents: say the door of a controller, such as 127.0.0.1:8443")
	case o.n < 1 || o.n > 1_000_000 || o.from < 0 || o.from > 10_000_000:
		return fmt.Errorf("-n %d from %d: must be 1 to 1000000 routers, from 0 to 10000000", o.n, o.from)
	case o.output != "table" && o.output != "json":
		return fmt.Errorf("-o %q: must be table or json", o.output)
	case o.ramp < 0:
		return fmt.Errorf("--ramp %v: is below 0", o.ramp)
	case o.time < 0:
		return fmt.Errorf("--for %v: is below 0", o.time)
	case o.sojourn <= 0 || o.sojourn99 < o.sojourn || o.sojourn99 > 17*time.Second:
		return fmt.Errorf("--sojourn %v and --sojourn-p99 %v: must be above 0, the second not below the first, and at most 17s", o.sojourn, o.sojourn99)
	case o.refuse+o.clamp+o.offline > 1:
		return fmt.Errorf("--refuse %v, --clamp %v and --offline %v are more than all routers", &o.refuse, &o.clamp, &o.offline)
	case o.tokens != "" && o.plan != "":
		return errors.New("--tokens and --plan don't go together: with tokens, the operator has made the subscribers")
	case o.tokens == "" && o.plan == "" && o.state == "":
		return errors.New("say how the routers join: --plan NAME makes them at the operators' door, --tokens FILE has a token for each, --state FILE has those of an earlier run")
	case o.sites < 0:
		return fmt.Errorf("--sites %d: is below 0", o.sites)
	}
	return plan.ValidateName("router", o.id(o.n-1))
}

// id returns the id of the i-th router, and of its subscriber.
func (o *options) id(i int) string { return fmt.Sprintf("%s%06d", o.prefix, o.from+i) }

// spareFiles is what the process needs beside one for each router.
const spareFiles = 64

// resources tells what this machine would run out of, before anything is made.
func (o *options) resources() error {
	var files syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &files); err != nil {
		return fmt.Errorf("limit on open files: %w", err)
	}
	if need := uint64(o.n) + spareFiles; need > files.Cur {
		return fmt.Errorf("%d routers need %d open files, and this process may have %d: raise the limit (as root: ulimit -n %d; under systemd: LimitNOFILE=%d), or play %d here and the rest in more processes with --from",
			o.n, need, files.Cur, need, need, max(int(files.Cur)-spareFiles, 1))
	}
	ports := ephemeral()
	if have := ports * max(len(o.sources), 1) * len(o.agents); !o.loopback() && o.n > have {
		return fmt.Errorf("%d routers need as many ports, and there are %d to each controller from one address: give more addresses of this machine with --source, or widen net.ipv4.ip_local_port_range", o.n, ports)
	}
	return nil
}

// ephemeral returns how many ports Linux gives out.
func ephemeral() int {
	b, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
	var low, high int
	if err == nil {
		_, err = fmt.Sscan(string(b), &low, &high)
	}
	if err != nil || high <= low {
		return 16384 // what RFC 6335 sets aside
	}
	return high - low + 1
}

// loopback tells whether all controllers are on the IPv4 loopback, where any of
// its addresses may be a source.
func (o *options) loopback() bool {
	for _, a := range o.agents {
		host, _, _ := net.SplitHostPort(a)
		if ip := net.ParseIP(host); ip == nil || ip.To4() == nil || !ip.IsLoopback() {
			return false
		}
	}
	return true
}

// source returns where the i-th of many connections comes from; nil: anywhere.
func (o *options) source(i, each int) net.Addr {
	switch {
	case len(o.sources) > 0:
		return &net.TCPAddr{IP: o.sources[i%len(o.sources)]}
	case o.loopback():
		k := 1 + i/each
		return &net.TCPAddr{IP: net.IPv4(127, 0, byte(k>>8), byte(k))}
	}
	return nil
}

func split(list string) (all []string) {
	for w := range strings.SplitSeq(list, ",") {
		if w = strings.TrimSpace(w); w != "" {
			all = append(all, w)
		}
	}
	return all
}

func env(name, otherwise string) string {
	if v := os.Getenv(name); v != "" {
		return v
	}
	return otherwise
}

func defaultCredentials() string {
	home, err := os.UserHomeDir()
	if err != nil {
		return "operator.pem"
	}
	return filepath.Join(home, ".config", "cakefleet", "operator.pem")
}
