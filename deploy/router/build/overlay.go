package main

import (
	"errors"
	"strings"
)

// Two things are wrong in Go's runtime for these machines.
//
// On linux/mips*, runtime.usleep computes the seconds of its timespec
// right and then stores the *microseconds* that remain where nanoseconds
// belong (and takes off seconds x 1000 instead of x 1000000). Every sleep of
// the runtime below a second is a thousand times too short, so that its
// monitor thread wakes some 15 000 times a second while any goroutine runs:
// 11 % of a 1000-MIPS core, 37 % of a 250-MIPS one. The same fault was mended
// for ppc64 (golang/go#56374) and s390x (golang/go#71714).
//
// On linux/mips, big-endian with 32 bits, the timespec of a futex has its
// nanoseconds as 32 bits in front of their padding. The kernel takes both as
// one number of 64 bits, whose upper half it drops: every such sleep loses its
// fraction of a second, and one below a second ends at once. The monitor thread
// of a program that does nothing then wakes 17 000 times a second: 8 % of a
// 500-MIPS core.
//
// A mend must not outlive its fault: mend refuses a file that it doesn't
// know, be it that Go mended it or that Go changed it.

// fault is what is wrong in a file of src/runtime.
type fault struct {
	file       string
	archs      []string // GOARCH
	head, end  string   // what the wrong part begins and ends with
	is, should string
}

var faults = []fault{
	{
		file: "sys_linux_mipsx.s", archs: []string{"mips", "mipsle"}, head: usleepHead, end: "\nTEXT ",
		is: `
	MOVW	R3, 24(R29)
	MOVW	$1000, R4
	MULU	R3, R4
	MOVW	LO, R4
	SUBU	R4, R5
	MOVW	R5, 28(R29)
`,
		should: `
	MOVW	R3, 24(R29)
	MOVW	$1000000, R4
	MULU	R3, R4
	MOVW	LO, R4
	SUBU	R4, R5
	MOVW	$1000, R4
	MULU	R5, R4
	MOVW	LO, R5
	MOVW	R5, 28(R29)
`,
	},
	{
		file: "sys_linux_mips64x.s", archs: []string{"mips64", "mips64le"}, head: usleepHead, end: "\nTEXT ",
		is: `
	MOVV	R3, 8(R29)
	MOVW	$1000, R4
	MULVU	R3, R4
	MOVV	LO, R4
	SUBVU	R4, R5
	MOVV	R5, 16(R29)
`,
		should: `
	MOVV	R3, 8(R29)
	MOVW	$1000000, R4
	MULVU	R3, R4
	MOVV	LO, R4
	SUBVU	R4, R5
	MOVW	$1000, R4
	MULVU	R5, R4
	MOVV	LO, R5
	MOVV	R5, 16(R29)
`,
	},
	{
		file: "defs_linux_mipsx.go", archs: []string{"mips"}, head: "\ntype timespec struct {", end: "\n}\n",
		is: `
	tv_sec  int64
	tv_nsec int32
	_       [4]byte // the C ABI aligns int64 to 8 bytes`,
		should: `
	tv_sec  int64
	_       [4]byte
	tv_nsec int32`,
	},
}

const usleepHead = "\nTEXT runtime·usleep(SB)"

// mend returns the file without the fault.
func mend(text string, f fault) (string, error) {
	before, rest, ok := strings.Cut(text, f.head)
	body, after, ok2 := strings.Cut(rest, f.end)
	if !ok || !ok2 || strings.Count(body, f.is) != 1 {
		return "", errors.New("it does not have the fault that is known: if this Go release has mended it, take it out of deploy/router/build/overlay.go")
	}
	return before + f.head + strings.Replace(body, f.is, f.should, 1) + f.end + after, nil
}
