package main

import (
	"bufio"
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cakefleet/cakefleet/deploy/lab/row"
)

// traffic sets everything up, lets it settle, and measures one window. Of an
// idle order it is the same with a controller and without traffic.
func traffic(o row.Order) (*row.Result, error) {
	stations, err := setUpNetwork(o.GRO)
	if err != nil {
		return nil, err
	}
	agent, err := shape(o)
	if err != nil {
		return nil, err
	}
	var reports *reports
	if o.Kind == "idle" {
		if reports, err = startController(stations.echoer); err == nil {
			err = reports.await()
		}
		if err != nil {
			return nil, err
		}
	}
	count, err := mapCounters()
	if err != nil {
		return nil, err
	}
	m := meter{count: count, agent: agent}
	var pings bytes.Buffer
	start := func(into **exec.Cmd, cmd *exec.Cmd, run func(*exec.Cmd) error) {
		if err != nil {
			return
		}
		if err = run(cmd); err != nil {
			err = fmt.Errorf("start %v: %w", cmd.Args, err)
		}
		*into = cmd
	}
	if o.Kind == "traffic" {
		start(&m.soak, part("soak"), (*exec.Cmd).Start)
		echoer := echoer4
		if o.V6 {
			echoer = echoer6
		}
		start(&m.source, part("source"), (*exec.Cmd).Start)
		ping := part("ping", echoer)
		ping.Stdout = &pings
		start(&m.ping, ping, stations.pinger.Start)
	}
	if o.Busy {
		start(&m.busy, part("busy"), (*exec.Cmd).Start)
	}
	if err != nil {
		return nil, err
	}
	time.Sleep(o.Settle)
	from, err := m.read()
	if err != nil {
		return nil, err
	}
	profileBegin()
	time.Sleep(o.Window)
	profileEnd()
	to, err := m.read()
	if err != nil {
		return nil, err
	}
	r := to.since(from)
	turn := count.turnPicoseconds.Load()
	r.Soak = time.Duration(uint64(to.turns-from.turns) * turn / 1000)
	r.Busy = time.Duration(uint64(to.busyTurns-from.busyTurns) * turn / 1000)
	if dry := count.dryPackets.Load(); dry > 0 {
		r.Source = time.Duration(r.Packets() * count.dryNanoseconds.Load() / dry)
	}
	if reports != nil {
		r.Reports = reports.between(from.at, to.at)
		return r, nil
	}
	if r.Marks, err = countMarks(time.Second); err != nil {
		return nil, err
	}
	offered, delivered := r.DownOffered.Packets+r.UpOffered.Packets, r.DownDelivered.Packets+r.UpDelivered.Packets
	// The sparse flow's packets are delivered, too.
	delivered -= min(delivered, 2*uint64(r.Window/pingEvery))
	if offered > delivered {
		r.Drops = float64(offered-delivered) / r.Window.Seconds()
	}
	if err := m.ping.Process.Signal(unix.SIGTERM); err != nil {
		return nil, err
	}
	if err := m.ping.Wait(); err != nil {
		return nil, fmt.Errorf("ping: %w", err)
	}
	// Reading goes before everything: what it delayed does not count.
	return r, addPings(r, &pings, from.at+int64(readTime), to.at-int64(readTime))
}

// readTime is more than a reading takes; the machine does nothing else
// meanwhile.
const readTime = 100 * time.Millisecond

// profileBegin and profileEnd are found by their addresses.
//
//go:noinline
func profileBegin() { profiling.Store(true) }

//go:noinline
func profileEnd() { profiling.Store(false) }

var profiling atomic.Bool // keeps the two functions apart

// meter reads what has happened so far.
type meter struct {
	count                           *counters
	soak, source, ping, busy, agent *exec.Cmd // nil: not there
}

type reading struct {
	at                         int64 // monotonic ns
	ping                       time.Duration
	turns, busyTurns           uint32
	self                       time.Duration
	agent, system              map[string]row.Thread
	rss                        uint64
	down, up, lanSent, wanSent row.Count
}

func (m *meter) read() (r reading, err error) {
	if err := urgent(true); err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, urgent(false)) }()
	get := func(c *exec.Cmd) (d time.Duration) {
		if c == nil || err != nil {
			return 0
		}
		d, err = processTime(c.Process.Pid)
		return d
	}
	if m.agent != nil {
		if r.agent, err = threads(m.agent.Process.Pid); err != nil {
			return r, err
		}
		if r.rss, err = residentSet(m.agent.Process.Pid); err != nil {
			return r, err
		}
	}
	if r.system, err = kernelThreads(); err != nil {
		return r, err
	}
	r.ping = get(m.ping)
	var errs [3]error
	r.self, errs[0] = processTime(os.Getpid())
	r.lanSent, errs[1] = sent(lanName)
	r.wanSent, errs[2] = sent(wanName)
	r.down, r.up = m.count.down(), m.count.up()
	r.turns, r.busyTurns, r.at = m.count.turns.Load(), m.count.busyTurns.Load(), monotonic()
	return r, errors.Join(err, errors.Join(errs[:]...))
}

func (r reading) since(from reading) *row.Result {
	out := &row.Result{
		Window:        time.Duration(r.at - from.at),
		Ping:          r.ping - from.ping + r.self - from.self,
		DownOffered:   r.down.Sub(from.down),
		UpOffered:     r.up.Sub(from.up),
		DownDelivered: r.lanSent.Sub(from.lanSent),
		UpDelivered:   r.wanSent.Sub(from.wanSent),
		AgentRSS:      r.rss,
	}
	out.Threads = between(from.agent, r.agent)
	for _, t := range out.Threads {
		out.Agent += t.CPU
		out.AgentSwitches += t.Switches
	}
	out.System = between(from.system, r.system)
	return out
}

// between returns what threads did between two readings, without those that
// did nothing, the busiest first.
func between(from, to map[string]row.Thread) []row.Thread {
	var out []row.Thread
	for id, t := range to {
		was := from[id]
		t.CPU -= was.CPU
		t.Switches -= was.Switches
		if t.Switches > 0 {
			out = append(out, t)
		}
	}
	slices.SortFunc(out, func(a, b row.Thread) int { return cmp.Compare(b.CPU, a.CPU) })
	return out
}

// kernelThreads are all but this program's processes and the agent.
func kernelThreads() (map[string]row.Thread, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	out := map[string]row.Thread{}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		if exe, _ := os.Readlink("/proc/" + e.Name() + "/exe"); exe != "" {
			continue
		}
		comm, err := os.ReadFile("/proc/" + e.Name() + "/comm")
		if err != nil {
			continue // it has ended
		}
		ts, err := threads(pid)
		if err != nil {
			continue
		}
		for id, t := range ts {
			t.Name = strings.TrimSpace(string(comm))
			out[id] = t
		}
	}
	return out, nil
}

// processTime is the time that all threads of a process have run, to the
// nanosecond and without the interrupts in between.
func processTime(pid int) (time.Duration, error) {
	ts, err := threads(pid)
	if err != nil {
		return 0, err
	}
	var d time.Duration
	for _, t := range ts {
		d += t.CPU
	}
	return d, nil
}

// threads reads every thread of a process.
func threads(pid int) (map[string]row.Thread, error) {
	dir := "/proc/" + strconv.Itoa(pid) + "/task"
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("threads of process %d: %w", pid, err)
	}
	out := map[string]row.Thread{}
	for _, e := range entries {
		// Of schedstat the first number is ns on the CPU, of the third how
		// often it was switched to.
		b, err := os.ReadFile(filepath.Join(dir, e.Name(), "schedstat"))
		if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) {
			continue
		}
		if err != nil {
			return nil, err
		}
		f := strings.Fields(string(b))
		if len(f) < 3 {
			return nil, fmt.Errorf("schedstat of thread %s: %q", e.Name(), b)
		}
		ran, err1 := strconv.ParseInt(f[0], 10, 64)
		switches, err2 := strconv.ParseUint(f[2], 10, 64)
		if err := errors.Join(err1, err2); err != nil {
			return nil, err
		}
		out[e.Name()] = row.Thread{Name: e.Name(), CPU: time.Duration(ran), Switches: switches}
	}
	return out, nil
}

// residentSet is in bytes.
func residentSet(pid int) (uint64, error) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/statm")
	if err != nil {
		return 0, err
	}
	f := strings.Fields(string(b))
	if len(f) < 2 {
		return 0, fmt.Errorf("statm of process %d: %q", pid, b)
	}
	pages, err := strconv.ParseUint(f[1], 10, 64)
	return pages * uint64(os.Getpagesize()), err
}

// sent is what an interface has sent.
func sent(link string) (c row.Count, err error) {
	for _, v := range []struct {
		name string
		to   *uint64
	}{{"tx_packets", &c.Packets}, {"tx_bytes", &c.Bytes}} {
		b, err := os.ReadFile("/sys/class/net/" + link + "/statistics/" + v.name)
		if err != nil {
			return c, err
		}
		if *v.to, err = strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64); err != nil {
			return c, err
		}
	}
	return c, nil
}

// addPings reads what the sparse flow's process wrote and keeps what was sent
// between two times.
func addPings(r *row.Result, in *bytes.Buffer, from, to int64) error {
	var took []time.Duration
	for sc := bufio.NewScanner(in); sc.Scan(); {
		var at, rtt int64
		if _, err := fmt.Sscan(sc.Text(), &at, &rtt); err != nil {
			return fmt.Errorf("ping: line %q: %w", sc.Text(), err)
		}
		switch {
		case at < from || at >= to:
		case rtt < 0:
			r.PingsLost++
		default:
			took = append(took, time.Duration(rtt))
		}
	}
	r.Pings = len(took) + r.PingsLost
	if len(took) == 0 {
		return nil
	}
	slices.Sort(took)
	at := func(p int) time.Duration { return took[min(len(took)*p/100, len(took)-1)] }
	r.Ping50, r.Ping90, r.Ping99, r.PingMax = at(50), at(90), at(99), took[len(took)-1]
	return nil
}

// countMarks counts the packets with CE that the router sends, a second. It
// looks at every packet, so it has a time of its own.
func countMarks(over time.Duration) (float64, error) {
	// For a raw socket the filter begins at the Ethernet header.
	filter := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_B | unix.BPF_ABS, K: 0xfffff000 + 4}, // SKF_AD_OFF + SKF_AD_PKTTYPE
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.PACKET_OUTGOING, Jf: 9},
		{Code: unix.BPF_LD | unix.BPF_H | unix.BPF_ABS, K: 12},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: 0x0800, Jf: 3},
		{Code: unix.BPF_LD | unix.BPF_B | unix.BPF_ABS, K: 15},
		{Code: unix.BPF_ALU | unix.BPF_AND | unix.BPF_K, K: 3},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: 3, Jt: 3, Jf: 4},
		{Code: unix.BPF_LD | unix.BPF_B | unix.BPF_ABS, K: 15},
		{Code: unix.BPF_ALU | unix.BPF_AND | unix.BPF_K, K: 0x30},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: 0x30, Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: 64},
		{Code: unix.BPF_RET | unix.BPF_K, K: 0},
	}
	var marks uint32
	var fds []int
	defer func() {
		for _, fd := range fds {
			unix.Close(fd)
		}
	}()
	for _, dev := range []string{lanName, wanName} {
		i, err := index(dev)
		if err != nil {
			return 0, err
		}
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return 0, fmt.Errorf("open packet socket: %w", err)
		}
		fds = append(fds, fd)
		prog := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
		if err := unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &prog); err != nil {
			return 0, fmt.Errorf("attach filter: %w", err)
		}
		if err := unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: bigEndian16(unix.ETH_P_ALL), Ifindex: i}); err != nil {
			return 0, fmt.Errorf("bind to %s: %w", dev, err)
		}
	}
	time.Sleep(over)
	for _, fd := range fds {
		st, err := unix.GetsockoptTpacketStats(fd, unix.SOL_PACKET, unix.PACKET_STATISTICS)
		if err != nil {
			return 0, fmt.Errorf("packet statistics: %w", err)
		}
		marks += st.Packets // those that found no room are in it
	}
	return float64(marks) / over.Seconds(), nil
}
