package engine

// keyHash hashes the words that identify a flow or a host under a secret key,
// so that nobody outside can aim for a queue. It is NH of UMAC (RFC 4418, 5.2.2): a sum
// of products of keyed pairs of words, which no two inputs share with a
// probability above 2^-32 whatever they are, folded to 32 bits by one more keyed
// product. On MIPS a pair costs one multiplication; SipHash costs forty times
// as much.
//
// The key words are used by position: 0..3 for the words of an address (the
// pair 0,1 alone for IPv4), 4..9 for what is hashed beside the hosts, 10 and 11
// to fold.
type keyHash [12]uint32

// newKeyHash expands a seed into a key (SplitMix64).
func newKeyHash(seed uint64) (k keyHash) {
	for i := range k {
		seed += 0x9e3779b97f4a7c15
		z := seed
		z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
		z = (z ^ z>>27) * 0x94d049bb133111eb
		k[i] = uint32((z ^ z>>31) >> 32)
	}
	k[1] |= 1 // multiplies alone for IPv4: must not be 0
	return k
}

// mul is the full product; one MULTU on a 32-bit CPU.
func mul(x, y uint32) uint64 { return uint64(x) * uint64(y) }

// fold reduces a sum of products to 32 bits.
func (k *keyHash) fold(sum uint64) uint32 {
	sum = mul(uint32(sum)^k[10], uint32(sum>>32)^k[11])
	return uint32(sum) ^ uint32(sum>>32)
}

func (k *keyHash) host4(addr uint32) uint32 {
	return k.fold(mul(addr+k[0], k[1]))
}

func (k *keyHash) host6(w0, w1, w2, w3 uint32) uint32 {
	return k.fold(mul(w0+k[0], w1+k[1]) + mul(w2+k[2], w3+k[3]))
}

// flow hashes a flow of two hosts, given by their hashes, with the smaller one
// in front and the ports in the same order, so that both directions hash alike.
// rest is what else tells flows apart: the protocol and the flow label.
func (k *keyHash) flow(low, high, ports, rest uint32) uint32 {
	return k.fold(mul(low+k[4], high+k[5]) + mul(ports+k[6], rest+k[7]))
}

// extra mixes two more words into a hash: what few packets have, like a VLAN
// tag or a tunnel key.
func (k *keyHash) extra(hash, a, b uint32) uint32 {
	return k.fold(mul(hash+k[4], a+k[8]) + mul(b+k[9], k[1]))
}
