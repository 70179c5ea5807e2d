// Package identity says who is who in a fleet: the authority that every
// certificate comes from, the certificates of the controller, of operators and
// of routers, and the join tokens that a router trades for its first one.
//
// There is one authority for one fleet, and two while one takes the place of the
// other. Both doors of the controller show a
// certificate for the name "cakefleet-controller", whatever address they listen
// on; every client trusts the authority, or both, and nothing else. What a client may do
// is decided by the URI in its certificate: cakefleet://router/<id> or
// cakefleet://operator/<name>.
//
// # How a router joins
//
// Whoever proves a key with a signing request gets a certificate for the router
// whose record names that key. It makes an answer that was lost, a certificate
// that ended while the router had no power, and a renewal one case. The key of a
// record comes from one of three:
//
//   - a join token, which is used once, ends, and is stored as a hash;
//   - an announced serial number with the fingerprint of the router's key, which
//     was made where the router was prepared;
//   - an operator, who approves the fingerprint of a router that waits.
//
// A serial alone gives nothing: it is printed on the box, and the next one is
// this one plus one. It only tells an operator what is announced for it. In each
// case the router knows the fleet by the pin before it says anything.
//
// # How it is put out
//
// A revocation is of a key, outlives the router's record, and is asked for with
// every push and every certificate. Two devices with one key are told by their
// boots, which take turns, and both are kept out until an operator has decided.
// None of this changes what a router shapes.
//
// # How the authority is replaced
//
// When the authority ends, so does the fleet's trust, and a controller warns of
// it a month before. Another one takes its place in two steps, each of which is
// one compare-and-swap of the record "ca" in the store, which all controllers
// follow by watch:
//
//	rotate   B is made beside A. Doors show certificates of A, and A once more as
//	         signed by B: who trusts either comes in. B signs what is new: routers'
//	         and operators' certificates; tokens and pins name B.
//	retire   B is the fleet's. Doors show and trust B alone.
//
// In between, every session tells its router the name of the set {A, B} until
// that has confirmed it. The router renews its certificate, which brings both
// authorities, writes certificate, key and authorities as one file, and then
// confirms: the controller writes it down (record "trust" of the router), so that
// any controller knows. retire is refused while a router with a key that is not
// revoked has not confirmed. A router that is away knows A, which the doors show
// until then. After retire the set is {B}, and routers forget A the same way. One
// that knows B and still has a certificate of A is refused by the handshake, and
// gets another one by its key.
//
// The store has B's certificate, and B's key sealed with a key that is derived
// from A's: who reads the store alone has no key, and who has A's key is a
// controller already. A controller that was down opens it at its start. When the
// doors show B, each controller makes it the authority of its data folder (Adopt).
// So a crash between any two writes leaves all of them with A or with both, and
// the worst that a router meets is a controller that lags: it asks again. A key of
// A that was stolen together with the store opens B: the way out of that is a
// start with --replace-authority.
//
// Sessions with a certificate of the retired authority go on until they end, half
// a day at most; their keys are known and can be revoked as any others.
//
// Routers often boot with a clock that shows 1970. Certificates therefore begin
// where the authority's own does, and an agent verifies with the later of its
// clock and that time.
package identity
