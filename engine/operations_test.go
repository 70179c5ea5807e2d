package engine

import (
	"slices"
	"testing"
	"time"
)

// FuzzOperations lets a caller do what he should not: packets of lengths that
// make no sense, a clock that jumps and runs backwards, any change at any time.
// Nothing of it may make a Scheduler panic, stall, lose a packet or lose count.
// The first byte of script chooses options, then four bytes are one operation.
func FuzzOperations(f *testing.F) {
	f.Add([]byte{0, 0, 1, 2, 3, 1, 0, 0, 0, 2, 9, 0, 0, 1, 0, 0, 0})
	f.Add([]byte{1, 3, 0, 0, 0, 4, 1, 0xff, 7, 0, 1, 2, 3, 0, 4, 5, 6, 2, 0xff, 0, 0, 1, 0, 0, 0})
	f.Add([]byte{2, 0, 0xff, 0xff, 0xff, 0, 1, 0xff, 0xff, 3, 5, 0, 0, 1, 0, 0, 0, 5, 0, 0, 0})
	f.Fuzz(func(t *testing.T, script []byte) {
		if len(script) < 1 || len(script) > 2000 {
			return
		}
		configs := operationConfigs()
		options := Options{Seed: 9, Handle: 0x80010000}
		if script[0]&1 != 0 {
			options.Compat, options.Stepwise = CompatKernel, true
		}
		now := []Time{0, 1e9, -1e18, 1 << 61}[script[0]>>1&3]
		s, err := New(now, configs[int(script[0]>>3)%len(configs)], options)
		if err != nil {
			t.Fatal(err)
		}
		in, out, big := 0, 0, 0
		backwards := false
		for op := range slices.Chunk(script[1:], 4) {
			if len(op) < 4 {
				break
			}
			a, b, c := op[1], op[2], op[3]
			switch op[0] % 6 {
			case 0: // a packet
				p := flowPacket(uint32(a) % 16)
				p.SrcHash, p.DstHash = uint32(b%4), uint32(c%4)
				p.TOS = c
				p.Len = [...]uint32{1514, 64, 0, 1, 65535, 1 << 20, 300, 42}[b%8]
				p.Truesize = [...]uint32{2304, 768, 0, 1, 1 << 20, 1<<32 - 1, 2304, 2304}[c%8]
				p.NetOff = [...]uint16{14, 14, 0, 18, 65535, 14, 14, 14}[c>>3%8]
				p.Priority, p.Mark = 0x80010000|uint32(b), uint32(c)<<8
				p.Header = segment{sport: uint16(a % 16), ack: uint32(b) << 24, payload: int(c & 1)}.header()
				n := 1
				if a >= 0xf0 {
					p.Segs = [...]uint16{2, 45, 65535, 1}[a&3]
					if p.Segs == 65535 {
						if big++; big > 1 || options.Compat != 0 {
							p.Segs = 300
						}
					}
					p.GSOSize, p.HeaderLen = [...]uint16{1448, 0, 65535, 1}[b&3], [...]uint16{66, 0, 8192, 1}[b>>2&3]
					if s.Config().SplitGSO && p.Segs > 1 {
						n = int(p.Segs)
					}
				}
				in += n
				s.Enqueue(now, p)
			case 1:
				for range 1 + int(a%8) {
					if _, ok := s.Dequeue(now); ok {
						out++
					}
					out += len(s.Drops())
				}
				continue
			case 2: // forward
				now += Time(uint32(a)+1) << (b % 40)
			case 3:
				if err := s.Reconfigure(now, configs[int(a)%len(configs)]); err != nil {
					t.Fatal(err)
				}
			case 4: // backwards
				now -= Time(uint32(a)+1) << (b % 40)
				backwards = true
			case 5:
				s.Reset(now)
			}
			if op[0]%6 != 2 && op[0]%6 != 4 {
				out += len(s.Drops())
			}
		}
		if options.Compat == 0 && !backwards {
			if err := CheckInvariants(s); err != nil {
				t.Fatal(err)
			}
		}
		var st Stats
		s.Stats(now, &st)
		if in != out+s.Len() {
			t.Fatalf("%d packets in, %d out, %d queued", in, out, s.Len())
		}
		for range 1_000_000 {
			if s.Len() == 0 {
				break
			}
			now = max(now, s.NextSend())
			if _, ok := s.Dequeue(now); !ok && len(s.Drops()) == 0 {
				now++
			}
		}
		if s.Len() != 0 {
			t.Fatalf("%d packets stay, next at %d, now %d", s.Len(), s.NextSend(), now)
		}
	})
}

// operationConfigs are the extremes of what Validate lets through.
func operationConfigs() []Config {
	d := DefaultConfig()
	low, high, small, cake3, auto, ingress := d, d, d, d, d, d
	low.Rate, low.MTU, low.RTT, low.Target = 8, 65535, (1<<32-1)*time.Microsecond, (1<<32-1)*time.Microsecond
	low.Tins, low.AckFilter, low.Overhead, low.MPU, low.Framing, low.Raw = Diffserv8, AckFilterAggressive, 256, 256, ATM, false
	high.Rate, high.MTU, high.RTT, high.Target = MaxRate, 68, time.Microsecond, time.Microsecond
	high.Tins, high.Flows, high.Overhead, high.Framing, high.Raw, high.Wash = Precedence, DualSrcHost, -64, PTM, false, true
	small.MemoryLimit, small.Rate, small.Flows, small.Tins, small.AckFilter = 1, 1e6, FlowBlind, BestEffort, AckFilterNormal
	cake3.Tins, cake3.Rate, cake3.Flows, cake3.Fwmark, cake3.MemoryLimit = Cake3, 10e6, DualDstHost, 0xff00, 100_000
	auto.Autorate, auto.Rate, auto.Tins, auto.AckFilter, auto.Ingress = true, 1e6, Diffserv4, AckFilterNormal, true
	ingress.Ingress, ingress.Rate, ingress.SplitGSO, ingress.MemoryLimit = true, 5e6, false, 1<<32-1
	return []Config{d, low, high, small, cake3, auto, ingress}
}
