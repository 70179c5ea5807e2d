// Package cakevec replays recorded runs of Linux's sch_cake (format cakevec-1)
// against the engine and compares every decision and counter.
//
// A file is gzip'd text, one record a line. C lines configure; E enqueues, Q
// dequeues and R changes, each followed by what the kernel decided: W (timer
// armed), X (dropped), P (queued where), D (delivered) or N (nothing). S, I, T,
// U and F lines are counters and internal variables. testdata/vectors/README.md
// of the engine describes them.
package cakevec
