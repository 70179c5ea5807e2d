package plan

import (
	"crypto/sha256"
	"encoding/hex"
	"strconv"

	"github.com/cakefleet/cakefleet/engine"
)

// Hash returns 32 hex digits that stand for everything in the link. Equal
// hashes mean equal links. Agents and controllers of all versions must agree on
// it: what is hashed is the text that fmt gives with %+v, which has every field
// with its name.
func (l Link) Hash() string {
	var room [768]byte
	b := append(room[:0], "{Down:"...)
	b = appendConfig(b, l.Down)
	b = append(b, " Up:"...)
	b = appendConfig(b, l.Up)
	b = append(b, '}')
	sum := sha256.Sum256(b)
	var text [32]byte
	hex.Encode(text[:], sum[:16])
	return string(text[:])
}

func appendConfig(b []byte, c engine.Config) []byte {
	word := func(name, value string) {
		b = append(b, name...)
		b = append(b, value...)
	}
	flag := func(name string, value bool) {
		b = append(b, name...)
		b = strconv.AppendBool(b, value)
	}
	number := func(name string, value int64) {
		b = append(b, name...)
		b = strconv.AppendInt(b, value, 10)
	}
	word("{Rate:", c.Rate.String())
	word(" Tins:", c.Tins.String())
	word(" Flows:", c.Flows.String())
	word(" AckFilter:", c.AckFilter.String())
	word(" Framing:", c.Framing.String())
	flag(" NAT:", c.NAT)
	flag(" Wash:", c.Wash)
	flag(" Ingress:", c.Ingress)
	flag(" Autorate:", c.Autorate)
	flag(" SplitGSO:", c.SplitGSO)
	flag(" Raw:", c.Raw)
	number(" Overhead:", int64(c.Overhead))
	number(" MPU:", int64(c.MPU))
	number(" MTU:", int64(c.MTU))
	word(" RTT:", c.RTT.String())
	word(" Target:", c.Target.String())
	number(" MemoryLimit:", int64(c.MemoryLimit))
	number(" Fwmark:", int64(c.Fwmark))
	return append(b, '}')
}
