#!/bin/sh
# usage: mips-overlay.sh DIR
#
# On linux/mips and linux/mipsle the runtime of Go 1.26 gives the kernel the
# microseconds of runtime.usleep as nanoseconds. Its monitor thread then wakes
# a thousand times too often and takes a tenth to a third of a router's CPU.
# (ppc64 and s390x had the same fault: golang/go#56374, golang/go#71714.)
#
# This writes a mended copy of the one file and DIR/overlay.json, for
# `go build -overlay`. It stops where the installed Go has another file than
# the one it knows, so that a Go that was mended is noticed.
set -eu

dir=${1:?usage: mips-overlay.sh DIR}
mkdir -p "$dir"
dir=$(cd "$dir" && pwd)
src=$(go env GOROOT)/src/runtime/sys_linux_mipsx.s

# In usleep: a second has a million microseconds, not a thousand, and what is
# left of them after the seconds, in R5, is multiplied to nanoseconds.
awk '
	/^TEXT /                                  { usleep = /runtime·usleep\(SB\)/ }
	usleep && $0 == "\tMOVW\t$1000, R4"       { sub(/1000/, "1000000"); seconds++ }
	                                          { print }
	usleep && $0 == "\tSUBU\tR4, R5"          { print "\tMOVW\t$1000, R4"; print "\tMULU\tR4, R5"; print "\tMOVW\tLO, R5"; rests++ }
	END                                       { exit seconds != 1 || rests != 1 }
' "$src" >"$dir/sys_linux_mipsx.s" || {
	echo "mips-overlay: $src is not the file that this mends; if the installed Go is mended, drop this step" >&2
	exit 1
}
printf '{"Replace": {"%s": "%s"}}\n' "$src" "$dir/sys_linux_mipsx.s" >"$dir/overlay.json"
