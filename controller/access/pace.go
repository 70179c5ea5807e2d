package access

import (
	"sync"
	"time"
)

// How many calls an operator may make, through all doors of a controller. A
// billing system that pushes single subscribers has room; a loop that went wild
// leaves some to the others.
const (
	callRate  = 500 // calls a second
	callBurst = 2 * callRate

	// mostPaced bounds the memory; there are not so many operators.
	mostPaced = 4096
)

// pace counts calls by operator.
type pace struct {
	mu sync.Mutex
	by map[string]*paced // guarded by mu
}

// paced is a bucket that each call fills by one and time empties.
type paced struct {
	count float64
	last  time.Time
}

// allows tells whether an operator may make a call now, and counts it then.
func (p *pace) allows(name string, now time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	b := p.by[name]
	if b == nil {
		if p.by == nil || len(p.by) >= mostPaced {
			p.by = map[string]*paced{} // those who were removed are forgotten
		}
		b = &paced{last: now}
		p.by[name] = b
	}
	b.count = max(0, b.count-now.Sub(b.last).Seconds()*callRate)
	b.last = now
	if b.count+1 > callBurst {
		return false
	}
	b.count++
	return true
}
