package engine

import (
	"strconv"
	"time"
)

// ClassMinor returns the minor number of the class that stands for a flow
// queue: the tin in display order, and the queue in it.
func ClassMinor(displayTin, flow int) uint16 {
	return uint16(displayTin*FlowsPerTin + flow + 1)
}

// AppendText appends f as an entry of `tc -s class show`: class handle:minor
// (ClassMinor) of the qdisc with this handle ("8001:"). Times are relative to
// now; one that is still to come is negative.
func (f *FlowStats) AppendText(b []byte, now Time, handle string, minor uint16) []byte {
	b = appendClassID(append(b, "class cake "...), handle, minor)
	b = append(append(b, " parent "...), handle...)
	b = appendCount(append(b, " \n (dropped "...), uint64(f.Drops))
	b = appendSize(append(b, ", overlimits 0 requeues 0) \n backlog "...), uint64(f.Backlog))
	b = appendCount(append(b, ' '), uint64(f.Qlen))
	b = strconv.AppendInt(append(b, "p requeues 0\n  deficit "...), int64(f.Deficit), 10)
	b = appendCount(append(b, " count "...), uint64(f.Count))
	if f.Dropping {
		b = appendSigned(append(b, " dropping drop_next "...), now.Sub(f.DropNext))
	}
	b = appendCount(append(b, " blue_prob "...), uint64(f.PDrop))
	if f.PDrop != 0 {
		b = appendSigned(append(b, " blue_timer "...), now.Sub(f.BlueTime))
	}
	return append(b, '\n')
}

// AppendJSON appends f as an object of `tc -j -s class show`, which prints a
// list of them. As there, times that are still to come are left out.
func (f *FlowStats) AppendJSON(b []byte, now Time, handle string, minor uint16) []byte {
	b = appendClassID(append(b, `{"class":"cake","handle":"`...), handle, minor)
	b = append(append(b, `","parent":"`...), handle...)
	b = appendCount(append(b, `","stats":{"drops":`...), uint64(f.Drops))
	b = appendCount(append(b, `,"overlimits":0,"requeues":0,"backlog":`...), uint64(f.Backlog))
	b = appendCount(append(b, `,"qlen":`...), uint64(f.Qlen))
	b = strconv.AppendInt(append(b, `},"deficit":`...), int64(f.Deficit), 10)
	b = appendCount(append(b, `,"count":`...), uint64(f.Count))
	if f.Dropping {
		b = append(b, `,"dropping":true`...)
		if d := now.Sub(f.DropNext); d >= 0 {
			b = appendCount(append(b, `,"drop_next":`...), micros(d))
		}
	}
	b = appendCount(append(b, `,"blue_prob":`...), uint64(f.PDrop))
	if d := now.Sub(f.BlueTime); f.PDrop != 0 && d >= 0 {
		b = appendCount(append(b, `,"blue_timer":`...), micros(d))
	}
	return append(b, '}')
}

func appendClassID(b []byte, handle string, minor uint16) []byte {
	return strconv.AppendUint(append(b, handle...), uint64(minor), 16)
}

// appendSigned appends a time with its sign; tc prints the sign and then the
// number as if it had none.
func appendSigned(b []byte, d time.Duration) []byte {
	if d < 0 {
		return appendTime(append(b, '-'), -d)
	}
	return appendTime(b, d)
}
