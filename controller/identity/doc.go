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
// Routers often boot with a clock that shows 1970. Certificates therefore begin
// where the authority's own does, and an agent verifies with the later of its
// clock and that time.
package identity
