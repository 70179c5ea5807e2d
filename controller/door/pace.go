package door

import "time"

// How pace looks for the rate.
const (
	paceEvery = 250 * time.Millisecond // between two looks
	// paceLate is how long even the fastest answer to a hello takes when more
	// come in than the CPU can serve. One takes half a millisecond when nobody
	// waits for the CPU; the best of a look counts, so that a burst is no queue.
	paceLate = 50 * time.Millisecond
	// Of the most: what the rate never goes below, so that nobody is locked out by
	// what else the machine does, and by how much it grows every paceEvery. It grows
	// in a calm, too: what was found is soon not true any more, agents are told to
	// come back over a time that is as long as the rate is low, and one that is too
	// high is found out within a second.
	paceLeast, paceStep = 1.0 / 20, 1.0 / 40
	// What is left of the rate after a look that found answers late.
	paceLess = 0.8
)

// pace finds the rate of handshakes that the CPU can do, up to a most. What
// is admitted beyond it gets no faster but waits for the CPU in the middle of
// handshakes, which then take too long and are done again: far fewer come in
// than the CPU could serve. It is pure: times are passed in.
//
// The time until a hello is answered is the sign, not how much CPU is used: it
// also grows when other programs want the CPU, and not for a peer that is slow.
type pace struct {
	most, rate float64
	looked     time.Time
	best       time.Duration // of the answers since; only if there were some
	answers    int
	unanswered int // hellos now

	totals  Admission
	totaled time.Time // up to when; zero: nothing was admitted yet
}

// Admission is what a door has admitted since it began.
type Admission struct {
	Admitted uint64
	// Offered is how many would have been admitted if always somebody had
	// waited: the rate over time.
	Offered float64
	// Limited is how long somebody had to wait for the rate.
	Limited time.Duration
}

func newPace(most float64) pace { return pace{most: most, rate: most} }

// heard notes that a hello came.
func (p *pace) heard() { p.unanswered++ }

// answered notes that a hello was answered after a time, or will not be.
func (p *pace) answered(took time.Duration, ok bool) {
	p.unanswered--
	if !ok {
		return
	}
	if p.answers == 0 || took < p.best {
		p.best = took
	}
	p.answers++
}

// hold notes that somebody waits for the rate for a time.
func (p *pace) hold(wait time.Duration) {
	p.totals.Limited += wait
}

// total brings the totals up to a time.
func (p *pace) total(now time.Time) Admission {
	if since := now.Sub(p.totaled); !p.totaled.IsZero() && since > 0 {
		p.totals.Offered += p.rate * since.Seconds()
	}
	p.totaled = now
	return p.totals
}

// look adapts the rate when it is time to.
func (p *pace) look(now time.Time) {
	if p.looked.IsZero() {
		p.looked = now
	}
	since := now.Sub(p.looked)
	if since < paceEvery {
		return
	}
	p.total(now)
	if p.answers > 0 && p.best > paceLate || p.answers == 0 && p.unanswered > 0 {
		p.rate = max(p.rate*paceLess, p.most*paceLeast)
	} else {
		p.rate = min(p.rate+p.most*paceStep*float64(since)/float64(paceEvery), p.most)
	}
	p.looked, p.best, p.answers = now, 0, 0
}
