// Package identity says who is who in a fleet: the authority that every
// certificate comes from, the certificates of the controller, of operators and
// of routers, and the join tokens that a router trades for its first one.
//
// There is one authority for one fleet. Both doors of the controller show a
// certificate for the name "cakefleet-controller", whatever address they listen
// on; every client trusts the authority and nothing else. What a client may do
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
// The authority itself is not replaced by anything here: when it ends, so does
// the fleet's trust, and a controller warns of it a month before.
//
// Routers often boot with a clock that shows 1970. Certificates therefore begin
// where the authority's own does, and an agent verifies with the later of its
// clock and that time.
package identity
