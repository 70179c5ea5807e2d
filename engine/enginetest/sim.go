package enginetest

import (
	"container/heap"
	"time"

	"github.com/cakefleet/cakefleet/engine"
)

// Source sends packets into a Sim and hears what became of them. Its methods are
// called with a clock that never goes back.
type Source interface {
	// Next returns when Act is to be called; engine.Never while the source only
	// waits to hear of packets.
	Next() engine.Time
	// Act does what is due at now; it calls send for each packet, with the
	// length of its frame in bytes.
	Act(now engine.Time, send func(size int))
	// Delivered says that a packet of size bytes has arrived and the news has
	// come back. ce: it was marked as having met congestion.
	Delivered(now engine.Time, size int, ce bool)
	// Dropped says that a packet of size bytes has been found missing.
	Dropped(now engine.Time, size int)
}

// Event is one line of a Sim's trace: what became of one packet.
type Event struct {
	At      engine.Time
	Flow    int // as returned by Add
	Size    int // bytes of the frame
	Sojourn time.Duration
	CE      bool
	Dropped bool
	Tin     int // not known of a dropped packet
	Reason  engine.DropReason
}

// Totals is what became of the packets of one flow so far.
type Totals struct {
	SentPackets, SentBytes           uint64
	DeliveredPackets, DeliveredBytes uint64
	DroppedPackets, DroppedBytes     uint64
	Marks                            uint64
	MaxSojourn, SumSojourn           time.Duration
}

// MeanSojourn is the mean time that the delivered packets spent in the queue.
func (t Totals) MeanSojourn() time.Duration {
	if t.DeliveredPackets == 0 {
		return 0
	}
	return t.SumSojourn / time.Duration(t.DeliveredPackets)
}

// Sim connects Sources to one Scheduler. The zero value with Scheduler set is
// ready for use.
type Sim struct {
	Scheduler *engine.Scheduler
	// Trace, if set, is called for every packet that leaves the Scheduler.
	Trace func(Event)

	now     engine.Time
	flows   []*simFlow
	packets []packetInFlight
	free    []uint32 // handles to use again
	news    news
	order   uint64
}

type simFlow struct {
	source Source
	rtt    time.Duration
	frame  map[int][]byte // header bytes for each size that the source sends
	flow   Flow
	totals Totals
}

type packetInFlight struct {
	flow int
	size int
}

// Add adds a source whose packets are those of f; news of them takes rtt to come
// back. It returns the flow's number, which counts from 0.
func (s *Sim) Add(f Flow, rtt time.Duration, source Source) int {
	s.flows = append(s.flows, &simFlow{source: source, rtt: rtt, flow: f, frame: map[int][]byte{}})
	return len(s.flows) - 1
}

// Totals returns what became of the packets of one flow so far.
func (s *Sim) Totals(flow int) Totals { return s.flows[flow].totals }

// ResetTotals forgets what happened so far, for instance a start-up phase.
func (s *Sim) ResetTotals() {
	for _, f := range s.flows {
		f.totals = Totals{}
	}
}

// Now returns the simulation's clock.
func (s *Sim) Now() engine.Time { return s.now }

// Run goes on until the clock shows end.
func (s *Sim) Run(end engine.Time) {
	for {
		flow, at := s.nextSource()
		if len(s.news) > 0 && s.news[0].at <= at {
			flow, at = -1, s.news[0].at
		}
		if next := s.Scheduler.NextSend(); next != engine.Never {
			if next = max(s.now, next); next <= at && next <= end {
				s.now = next
				s.dequeue()
				continue
			}
		}
		if at > end {
			s.now = end
			return
		}
		s.now = max(s.now, at)
		if flow < 0 {
			s.deliverNews()
			continue
		}
		s.flows[flow].source.Act(s.now, func(size int) { s.send(flow, size) })
	}
}

func (s *Sim) nextSource() (flow int, at engine.Time) {
	at = engine.Never
	for i, f := range s.flows {
		if next := f.source.Next(); next < at {
			flow, at = i, next
		}
	}
	return flow, at
}

func (s *Sim) send(flow, size int) {
	f := s.flows[flow]
	frame, ok := f.frame[size]
	if !ok {
		frame = f.flow.AppendFrame(nil, size)
		f.frame[size] = frame
	}
	p := engine.Packet{
		Handle: s.handle(packetInFlight{flow, size}),
		Len:    uint32(size), Truesize: truesize(uint32(size)), NetOff: EthernetHeader,
	}
	f.totals.SentPackets++
	f.totals.SentBytes += uint64(size)
	s.Scheduler.DissectEthernet(frame, &p)
	s.Scheduler.Enqueue(s.now, &p)
	s.drops()
}

func (s *Sim) handle(p packetInFlight) uint32 {
	if n := len(s.free); n > 0 {
		h := s.free[n-1]
		s.free = s.free[:n-1]
		s.packets[h] = p
		return h
	}
	s.packets = append(s.packets, p)
	return uint32(len(s.packets) - 1)
}

func (s *Sim) dequeue() {
	d, ok := s.Scheduler.Dequeue(s.now)
	s.drops()
	if !ok {
		return
	}
	p := s.release(d.Handle)
	t := &s.flows[p.flow].totals
	t.DeliveredPackets++
	t.DeliveredBytes += uint64(p.size)
	t.SumSojourn += d.Sojourn
	t.MaxSojourn = max(t.MaxSojourn, d.Sojourn)
	if d.CE {
		t.Marks++
	}
	s.tell(p, Event{Flow: p.flow, Size: p.size, Sojourn: d.Sojourn, CE: d.CE, Tin: int(d.Tin)})
}

func (s *Sim) drops() {
	for _, d := range s.Scheduler.Drops() {
		p := s.release(d.Handle)
		t := &s.flows[p.flow].totals
		t.DroppedPackets++
		t.DroppedBytes += uint64(p.size)
		s.tell(p, Event{Flow: p.flow, Size: p.size, Dropped: true, Reason: d.Reason})
	}
}

func (s *Sim) release(handle uint32) packetInFlight {
	s.free = append(s.free, handle)
	return s.packets[handle]
}

func (s *Sim) tell(p packetInFlight, e Event) {
	e.At = s.now
	if s.Trace != nil {
		s.Trace(e)
	}
	s.order++
	heap.Push(&s.news, newsItem{at: s.now.Add(s.flows[p.flow].rtt), order: s.order, event: e})
}

func (s *Sim) deliverNews() {
	item, _ := heap.Pop(&s.news).(newsItem)
	e := item.event
	if source := s.flows[e.Flow].source; e.Dropped {
		source.Dropped(s.now, e.Size)
	} else {
		source.Delivered(s.now, e.Size, e.CE)
	}
}

// news is what the sources have yet to hear, earliest first.
type news []newsItem

type newsItem struct {
	at    engine.Time
	order uint64 // what happened first is heard first
	event Event
}

func (n news) Len() int { return len(n) }
func (n news) Less(i, j int) bool {
	return n[i].at < n[j].at || n[i].at == n[j].at && n[i].order < n[j].order
}
func (n news) Swap(i, j int) { n[i], n[j] = n[j], n[i] }

// Push is for package heap.
func (n *news) Push(x any) {
	item, _ := x.(newsItem)
	*n = append(*n, item)
}

// Pop is for package heap.
func (n *news) Pop() any {
	last := (*n)[len(*n)-1]
	*n = (*n)[:len(*n)-1]
	return last
}
