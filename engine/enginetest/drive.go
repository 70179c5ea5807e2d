package enginetest

import "github.com/cakefleet/cakefleet/engine"

// Watch is told of every packet that leaves the Scheduler. A nil function is
// not called.
type Watch struct {
	Delivered func(now engine.Time, d engine.Delivery)
	Dropped   func(now engine.Time, d engine.Drop)
}

// Drive offers the first n packets of w to s in the engine's own calling
// pattern: Dequeue is called at the times that NextSend names and at no other,
// so it hardly ever comes back empty-handed. The Standing packets are not
// counted in n. It returns the time of the last arrival.
func Drive(s *engine.Scheduler, w Workload, n int, watch Watch) engine.Time {
	d := NewDriver(s, w, watch)
	return d.Run(n)
}

// DriveKernel offers the first n packets of w to s as Linux does to a qdisc:
// after every arrival, and whenever the watchdog timer fires, Dequeue is called
// until it returns nothing. It returns the time of the last event.
func DriveKernel(s *engine.Scheduler, w Workload, n int, watch Watch) engine.Time {
	d := NewDriver(s, w, watch)
	now := Start
	for enqueued := 0; enqueued < n; {
		arrival := d.traffic.At()
		if timer := s.NextSend(); !d.lockstep && timer <= arrival {
			now = max(now, timer)
		} else {
			now = arrival
			d.enqueue(now)
			enqueued++
		}
		for d.dequeue(now) && !d.lockstep {
			continue
		}
	}
	return now
}

// Driver offers a Workload to a Scheduler piece by piece.
type Driver struct {
	scheduler *engine.Scheduler
	traffic   *Generator
	lockstep  bool
	watch     Watch
	packet    engine.Packet // reused, as a data plane would
}

// NewDriver returns a Driver at the beginning of w, whose Standing packets it has
// enqueued.
func NewDriver(s *engine.Scheduler, w Workload, watch Watch) *Driver {
	d := &Driver{scheduler: s, traffic: w.Generator(), lockstep: w.Lockstep, watch: watch}
	for range w.Standing {
		d.enqueue(d.traffic.At())
	}
	return d
}

// Run offers the next n packets as Drive does.
func (d *Driver) Run(n int) engine.Time {
	s := d.scheduler
	var now engine.Time
	for range n {
		arrival := d.traffic.At()
		if d.lockstep {
			now = arrival
			d.enqueue(now)
			d.dequeue(now)
			continue
		}
		for {
			next := s.NextSend()
			if next > arrival {
				break
			}
			now = max(now, next)
			d.dequeue(now)
		}
		now = arrival
		d.enqueue(now)
	}
	return now
}

func (d *Driver) enqueue(now engine.Time) {
	frame := d.traffic.Next(&d.packet)
	d.scheduler.Dissect(frame[EthernetHeader:], &d.packet)
	d.traffic.Place(&d.packet)
	d.scheduler.Enqueue(now, &d.packet)
	if drops := d.scheduler.Drops(); len(drops) > 0 {
		d.tell(now, drops)
	}
}

func (d *Driver) dequeue(now engine.Time) bool {
	out, ok := d.scheduler.Dequeue(now)
	if ok && d.watch.Delivered != nil {
		d.watch.Delivered(now, out)
	}
	if drops := d.scheduler.Drops(); len(drops) > 0 {
		d.tell(now, drops)
	}
	return ok
}

func (d *Driver) tell(now engine.Time, drops []engine.Drop) {
	if d.watch.Dropped == nil {
		return
	}
	for _, drop := range drops {
		d.watch.Dropped(now, drop)
	}
}
