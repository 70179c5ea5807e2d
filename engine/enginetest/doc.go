// Package enginetest drives an engine.Scheduler on a virtual clock: it makes
// traffic with real header bytes, carries it through a scheduler and tells what
// came of it. No time passes and no socket is opened.
//
// There are two ways to use it.
//
//   - A Workload is traffic that is fixed to the nanosecond and never reacts:
//     the seven of Workloads are what the cost of the engine is measured with,
//     and their counters are known for the C code of sch_cake. Drive offers one
//     to a Scheduler in the way the engine asks for, DriveKernel in the way the
//     Linux kernel calls a qdisc.
//   - A Sim is a closed loop: Sources send into a Scheduler, hear of each
//     packet's delivery, mark or drop one round trip later, and react. CBR,
//     Voice and TCP are the sources.
//
// Everything runs on the caller's goroutine and is repeatable: the same
// arguments and the same seeds give the same packets at the same times.
package enginetest
