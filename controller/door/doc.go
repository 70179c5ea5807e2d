// Package door serves gRPC over mTLS to very many calm connections: the agents'
// door. A connection between two messages has no goroutine and no buffer; what
// it costs is its TLS state and some hundred bytes, where grpc-go has four
// goroutines with their stacks. What it speaks is plain gRPC, and any gRPC
// client can call it.
//
// # Words
//
// A connection waits in the room until it is admitted, does its handshake on a
// goroutine of its own, and is watched by epoll from then on. A turn is what one
// worker does with one connection that can be read: some reads, the frames in
// them, and one write of all answers.
//
// # What it serves
//
// Unary methods of services that were registered, each call on a goroutine of
// its own, and one kind of session: a bidirectional stream whose messages are
// handed to a Session and which is answered through its Stream.
//
// # Limits
//
// Admission bounds the CPU of handshakes: at most Rate connections each second
// leave the room, in the order in which they came, and fewer while those that
// did are late to be answered: the rate is what this machine can serve now, and
// the most is a bound on what it is to serve. A room that is full closes what
// comes, which costs next to nothing and tells an agent to come back later.
// Frames and bytes of a connection have a budget each. A message, a header
// block and the number of streams are bounded. A peer that doesn't read is sent
// what its windows allow and no more, and nobody waits for it. One that is
// silent is pinged, and closed if it doesn't answer.
//
// # Concurrency
//
// All methods may be called from any goroutine. Session's methods are called by
// one at a time, but Closed may come while Receive runs.
package door
