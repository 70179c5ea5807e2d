// Package fleet knows who is connected and what each router runs, and decides
// what each of them is sent.
//
// # Words
//
// A push is one desired state on its way to a router, named by a nonce that
// counts up within a session. A push is in flight until the router has answered
// its nonce. A router runs a desired state if it named its hash as applied and
// the hash that it read back from its data plane is the same.
//
// # How it decides
//
// The pure part is machine: what was sent, what was said, and for a time and a
// desired state the next push or how long to wait. There is no queue. A change
// only wakes the session, which then asks for the newest desired state, so that
// a router that is slow to take one gets the newest next and delays nobody.
//
//   - What a router runs is not sent again.
//   - What a router refused is held back until the desired state has another
//     revision or hash, through reconnects too.
//   - What was sent and not answered is asked again with a new nonce, ever more
//     rarely. It is never guessed as applied.
//   - What would move a router back from a state that the store does not know
//     is not sent until somebody says so.
//   - The first change is sent at once, the next ones ever later, up to
//     maxGap, as long as they keep coming.
//
// # Concurrency
//
// All methods may be called from any goroutine. A Session belongs to the
// stream that opened it; when the same router opens a newer one, the older
// ends and can change nothing any more. What a session has to say goes to its
// Listener, so that one that is calm needs no goroutine.
//
// # What the caller owes
//
// Wake after every change of a router's desired state, Remove after its
// deletion, and Close for every Session.
package fleet
