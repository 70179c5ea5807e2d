package enginetest_test

import (
	"encoding/hex"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/engine/enginetest"
)

// TestFirstPackets shows when the first packets of W3 arrive and the headers of
// one of each kind, checked by hand against the definition.
func TestFirstPackets(t *testing.T) {
	w, err := enginetest.WorkloadByName("W3")
	if err != nil {
		t.Fatal(err)
	}
	g := w.Generator()
	var at []engine.Time
	var sizes []uint32
	var frames []string
	for range 12 {
		at = append(at, g.At()-enginetest.Start)
		var p engine.Packet
		frames = append(frames, hex.EncodeToString(g.Next(&p)[enginetest.EthernetHeader:]))
		sizes = append(sizes, p.Len)
	}
	wantAt := []engine.Time{0, 7000, 13000, 138000, 263000, 319500, 388000, 513000, 632000, 638000, 763000, 888000}
	if diff := cmp.Diff(wantAt, at); diff != "" {
		t.Errorf("arrivals (-want +got):\n%s", diff)
	}
	wantSizes := []uint32{1514, 90, 66, 66, 66, 90, 66, 66, 90, 66, 66, 66}
	if diff := cmp.Diff(wantSizes, sizes); diff != "" {
		t.Errorf("sizes (-want +got):\n%s", diff)
	}
	wantFrames := []string{
		// TCP 10.0.0.1:40000 -> 198.51.100.1:443, CS1, 1500 bytes
		"4520" + "05dc" + "00004000" + "4006" + "00c7" + "0a000001" + "c6336401" +
			"9c4001bb" + "00000000" + "00000000" + "5010ffff" + "00000000",
		// UDP 10.0.1.1:50000 -> 203.0.113.1:3478, EF, 76 bytes
		"45b8" + "004c" + "00004000" + "4011" + "f2e6" + "0a000101" + "cb007101" +
			"c3500d96" + "0038" + "0000",
		// TCP 10.0.2.1:30000 -> 192.0.2.1:443, acknowledges 3896, timestamps 0
		"4500" + "0034" + "00004000" + "4006" + "6cc2" + "0a000201" + "c0000201" +
			"753001bb" + "00000000" + "00000f38" + "8010ffff" + "00000000" + "0101080a" + "00000000" + "00000000",
	}
	if diff := cmp.Diff(wantFrames, frames[:3]); diff != "" {
		t.Errorf("headers (-want +got):\n%s", diff)
	}
}

// TestIPv6Headers looks at a bulk flow of the fourth kind.
func TestIPv6Headers(t *testing.T) {
	w, err := enginetest.WorkloadByName("W1")
	if err != nil {
		t.Fatal(err)
	}
	g := w.Generator()
	var p engine.Packet
	var frame string
	for bulk := 0; bulk < 12; { // bulk flow 11: the second IPv6 one, with ECT(0)
		frame = hex.EncodeToString(g.Next(&p))
		if p.Len == 1514 {
			bulk++
		}
	}
	want := "020000000002" + "020000000001" + "86dd" + "60200000" + "05b4" + "0640" +
		"20010db8000000010000000000000004" + "20010db8ffff0000000000000000000c" +
		"9c4b01bb" + "00000000" + "00000000" + "5010ffff" + "00000000"
	if diff := cmp.Diff(want, frame); diff != "" {
		t.Errorf("frame (-want +got):\n%s", diff)
	}
}
