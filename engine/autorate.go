package engine

// reconfigurePause is the least time between two changes of the rate by
// autorate, ns.
const reconfigurePause = 250e6

// autorate estimates the rate at which packets come in, for a bottleneck
// upstream whose rate is not known: bytes over the windows between the ends of
// bursts. All times in ns.
type autorate struct {
	gap          uint64 // average gap between packets
	peak         uint64 // bytes/s, the estimate
	windowBytes  uint64
	windowBegin  Time
	last         Time // packet
	reconfigured Time
}

// ewma moves avg towards x by 2^-shift.
func ewma(avg, x uint64, shift uint) uint64 { return avg - avg>>shift + x>>shift }

// ewma2 moves avg fast where fast says so, else slowly.
func ewma2(avg, x uint64, fast bool) uint64 {
	if fast {
		return ewma(avg, x, 2)
	}
	return ewma(avg, x, 8)
}

// measure takes in the arrival of p at now, and sets the rate after each
// window. What the ACK filter dropped has been taken off the window already.
func (s *Scheduler) measure(now Time, p *Packet) {
	a := &s.auto
	if !s.cfg.Autorate {
		a.windowBytes, a.last = 0, now
		return
	}
	a.windowBytes += uint64(p.Len)
	if int64(a.windowBytes) < 0 && s.compat&CompatAutorate == 0 {
		a.windowBytes = 0 // filtered ACKs of the window before
	}
	gap := min(uint64(now-a.last), 1e9)
	a.gap = ewma2(a.gap, gap, gap > a.gap)
	a.last = now
	if gap <= a.gap {
		return
	}
	window := uint64(now - a.windowBegin)
	if window == 0 {
		return
	}
	r := a.windowBytes * 1e9 / window
	a.peak = ewma2(a.peak, r, r > a.peak)
	a.windowBytes, a.windowBegin = 0, now
	if now > a.reconfigured+reconfigurePause {
		s.bytesPerSec = a.peak * 15 >> 4
		if s.compat&CompatAutorate == 0 {
			a.reconfigured = now
		}
		s.reconfigure()
	}
}
