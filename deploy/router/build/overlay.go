package main

import (
	"errors"
	"strings"
)

// On linux/mips*, Go's runtime.usleep computes the seconds of its timespec
// right and then stores the *microseconds* that remain where nanoseconds
// belong (and takes off seconds x 1000 instead of x 1000000). Every sleep of
// the runtime below a second is a thousand times too short, so that its
// monitor thread wakes some 15 000 times a second while any goroutine runs:
// 11 % of a 1000-MIPS core, 37 % of a 250-MIPS one. The same fault was mended
// for ppc64 (golang/go#56374) and s390x (golang/go#71714).
//
// The mend must not outlive the fault: mend refuses a file that it doesn't
// know, be it that Go mended it or that Go changed it.

// usleep is a function as it is and as it should be.
type usleep struct{ is, should string }

// mended has the files of src/runtime.
var mended = map[string]usleep{
	"sys_linux_mipsx.s": {
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
	"sys_linux_mips64x.s": {
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
}

// mend returns the file with its usleep mended.
func mend(text string, u usleep) (string, error) {
	const head = "\nTEXT runtime·usleep(SB)"
	before, rest, ok := strings.Cut(text, head)
	body, after, ok2 := strings.Cut(rest, "\nTEXT ")
	if !ok || !ok2 || strings.Count(body, u.is) != 1 {
		return "", errors.New("runtime.usleep is not the one that is known to be wrong: if this Go release has mended it, delete deploy/router/build/overlay.go and what uses it")
	}
	return before + head + strings.Replace(body, u.is, u.should, 1) + "\nTEXT " + after, nil
}
