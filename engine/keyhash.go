package engine

import "math/bits"

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

// fold reduces a sum of products to 32 bits, never 0.
func (k *keyHash) fold(hi, lo uint32) uint32 {
	hi, lo = bits.Mul32(lo^k[10], hi^k[11])
	return max(hi^lo, 1)
}

func (k *keyHash) host4(addr uint32) uint32 {
	return k.fold(bits.Mul32(addr+k[0], k[1]))
}

func (k *keyHash) host6(w0, w1, w2, w3 uint32) uint32 {
	hi, lo := bits.Mul32(w0+k[0], w1+k[1])
	hi, lo = add64(hi, lo, w2+k[2], w3+k[3])
	return k.fold(hi, lo)
}

// flow hashes a flow of two hosts, given by their hashes. Both directions hash
// alike: hosts and ports are put in order together. label and proto are what
// else tells flows apart; the label has at most 24 bits.
func (k *keyHash) flow(src, dst, ports, label uint32, proto uint8) uint32 {
	if src > dst || src == dst && ports>>16 > ports&0xffff {
		src, dst = dst, src
		ports = ports>>16 | ports<<16
	}
	hi, lo := bits.Mul32(src+k[4], dst+k[5])
	hi, lo = add64(hi, lo, ports+k[6], (label<<8|uint32(proto))+k[7])
	return k.fold(hi, lo)
}

// extra mixes two more words into a hash: what few packets have, like a VLAN
// tag or a tunnel key.
func (k *keyHash) extra(hash, a, b uint32) uint32 {
	hi, lo := bits.Mul32(hash+k[4], a+k[8])
	hi, lo = add64(hi, lo, b+k[9], k[1])
	return k.fold(hi, lo)
}

// add64 returns hi:lo + x*y.
func add64(hi, lo, x, y uint32) (uint32, uint32) {
	h, l := bits.Mul32(x, y)
	l, carry := bits.Add32(lo, l, 0)
	h, _ = bits.Add32(hi, h, carry)
	return h, l
}
