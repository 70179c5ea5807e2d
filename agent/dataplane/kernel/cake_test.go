package kernel

import (
	"bytes"
	"embed"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io/fs"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/cakefleet/cakefleet/agent/dataplane/internal/nlmsg"
	"github.com/cakefleet/cakefleet/engine"
)

// testdata has messages about qdiscs as Linux 6.1 on a big-endian 32-bit MIPS
// gave them, and what tc(8) showed of the same: NAME.hex, NAME.txt, NAME.json.
// It is in the test's binary, because the lab has nothing else. In mq are
// messages about cake_mq with its queues, one a line, from Linux 7.2 on amd64,
// and what tc(8) 7.3 showed of all of them.
//
//go:embed testdata/*.hex testdata/*.txt testdata/*.json testdata/mq
var testdata embed.FS

// listing is the qdisc as tc -s and tc -j -s show it.
func listing(q qdisc) (text, json string) {
	var st engine.Stats
	st.Config, _ = decodeOptions(q.options.Attrs())
	decodeStats(q.stats, &st)
	hdr := engine.Header{Handle: fmt.Sprintf("%x:", q.handle>>16), Refcnt: int(q.refcnt)}
	if q.parent != parentRoot {
		hdr.Parent = fmt.Sprintf("%x:%x", q.parent>>16, q.parent&0xffff)
	}
	return string(st.AppendText(nil, hdr)), "[" + string(st.AppendJSON(nil, hdr)) + "]\n"
}

// recordings returns the messages in testdata by name.
func recordings(tb testing.TB) map[string][]byte {
	tb.Helper()
	files, err := fs.Glob(testdata, "testdata/*.hex")
	if err != nil || len(files) < 5 {
		tb.Fatalf("%d recordings: %v", len(files), err)
	}
	all := make(map[string][]byte, len(files))
	for _, f := range files {
		text, err := testdata.ReadFile(f)
		if err != nil {
			tb.Fatal(err)
		}
		all[strings.TrimSuffix(f, ".hex")] = unhex(tb, string(text))
	}
	return all
}

func unhex(tb testing.TB, text string) []byte {
	tb.Helper()
	b, err := hex.DecodeString(strings.TrimSpace(text))
	if err != nil {
		tb.Fatal(err)
	}
	return b
}

func wantListing(t *testing.T, name string, order nlmsg.Order, body []byte) {
	t.Helper()
	q, ok := decodeQdisc(order, nlmsg.Message{Type: unix.RTM_NEWQDISC, Body: body})
	if !ok {
		t.Fatal("not a qdisc")
	}
	text, json := listing(q)
	for ext, got := range map[string]string{".txt": text, ".json": json} {
		want, err := testdata.ReadFile(name + ext)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(string(want), got); diff != "" {
			t.Errorf("%s%s (-tc +ours):\n%s", name, ext, diff)
		}
	}
}

// TestFault086 decodes recordings in the byte order of the recording, whatever
// this machine's is, and the same in the other one.
func TestFault086(t *testing.T) {
	for name, body := range recordings(t) {
		wantListing(t, name, nlmsg.BigEndian(), body)
		for _, pad := range []bool{false, true} {
			tr := transcoder{from: nlmsg.BigEndian(), to: nlmsg.LittleEndian(), pad: pad}
			wantListing(t, name, nlmsg.LittleEndian(), tr.qdisc(body))
		}
	}
}

// TestFault132_Recorded decodes cake_mq as Linux 7.2 lists it, in the byte order
// of the recording and in the other one: tc(8) shows of it and of each queue what
// we read, and the sums of the queues are the kernel's.
func TestFault132_Recorded(t *testing.T) {
	for _, name := range []string{"plain-diffserv4", "odd-diffserv8"} {
		for _, order := range []nlmsg.Order{nlmsg.LittleEndian(), nlmsg.BigEndian()} {
			w := recordedMQ(t, name, order)
			text, head := listing(*w.root)
			lines := strings.SplitAfterN(text, "\n", 4) // what it has of its own
			text, head = mqKind(strings.Join(lines[:3], "")), mqKind(head)
			var queues strings.Builder
			for _, q := range w.queues {
				t, j := listing(q)
				text += t
				queues.WriteString("," + strings.TrimSuffix(strings.TrimPrefix(j, "["), "]\n"))
			}
			if diff := cmp.Diff(readMQ(t, name+".txt"), text); diff != "" {
				t.Errorf("%s, %v (-tc +ours):\n%s", name, order, diff)
			}
			own, rest, _ := strings.Cut(readMQ(t, name+".json"), `},{"kind":"cake",`)
			if !strings.HasPrefix(head, own) {
				t.Errorf("%s, %v: tc shows %s, we %s", name, order, own, head)
			}
			if diff := cmp.Diff(`,{"kind":"cake",`+rest, queues.String()+"]\n"); diff != "" {
				t.Errorf("%s, %v (-tc +ours):\n%s", name, order, diff)
			}
			wantSums(t, name, w)
		}
	}
}

// wantSums wants the sums of the queues to be what the kernel has in cake_mq
// itself, and those of the tins what tc shows.
func wantSums(t *testing.T, name string, w *world) {
	t.Helper()
	var got, want engine.Stats
	new(running).pollUp(w, &got)
	decodeStats(w.root.stats, &want)
	if got.SentPackets != want.SentPackets || got.SentBytes != want.SentBytes || got.Drops != want.Drops || got.Overlimits != want.Overlimits {
		t.Errorf("%s: sums %+v, the kernel's %+v", name, got, want)
	}
	var shown []struct {
		Tins []struct {
			Packets uint64 `json:"sent_packets"`
			Marks   uint64 `json:"ecn_mark"`
		}
	}
	if err := json.Unmarshal([]byte(readMQ(t, name+".json")), &shown); err != nil {
		t.Fatal(err)
	}
	var packets, marks [engine.MaxTins]uint64
	for _, q := range shown {
		for i, tin := range q.Tins {
			packets[i] += tin.Packets
			marks[i] += tin.Marks
		}
	}
	for i, tin := range got.Tins {
		if tin.Packets != packets[i] || tin.Marks != marks[i] {
			t.Errorf("%s, tin %d: %d packets and %d marks, tc shows %d and %d", name, i, tin.Packets, tin.Marks, packets[i], marks[i])
		}
	}
}

// mqKind is a listing of cake as one of cake_mq.
func mqKind(text string) string {
	return strings.NewReplacer("qdisc cake ", "qdisc cake_mq ", `"kind":"cake"`, `"kind":"cake_mq"`).Replace(text)
}

func readMQ(t *testing.T, file string) string {
	t.Helper()
	b, err := testdata.ReadFile("testdata/mq/" + file)
	if err != nil {
		t.Fatal(err)
	}
	return olderText(string(b))
}

// recordedMQ is a recording of cake_mq in a byte order.
func recordedMQ(t *testing.T, name string, order nlmsg.Order) *world {
	t.Helper()
	w := new(world)
	for line := range strings.FieldsSeq(readMQ(t, name+".hex")) {
		body := unhex(t, line)
		if order != nlmsg.LittleEndian() {
			body = transcoder{from: nlmsg.LittleEndian(), to: order}.qdisc(body)
		}
		q, ok := decodeQdisc(order, nlmsg.Message{Type: unix.RTM_NEWQDISC, Body: body})
		if !ok {
			t.Fatalf("not a qdisc: %x", body)
		}
		if q.parent == parentRoot {
			w.root = &q
		} else {
			w.queues = append(w.queues, q)
		}
	}
	if !isCake(w.root) || w.root.kind != "cake_mq" || len(w.queues) != 4 {
		t.Fatalf("%s: %+v with %d queues", name, w.root, len(w.queues))
	}
	return w
}

// TestFault129 decodes 64-bit values that are aligned to 4 bytes only, with
// and without the PAD attribute that kernels put in front of them.
func TestFault129(t *testing.T) {
	for name, body := range recordings(t) {
		for _, pad := range []bool{false, true} {
			tr := transcoder{from: nlmsg.BigEndian(), to: nlmsg.BigEndian(), pad: pad}
			again := tr.qdisc(body)
			if !pad && !bytes.Equal(again, body) {
				t.Errorf("%s: taken apart and put together it is another", name)
			}
			if pad && len(again) <= len(body) {
				t.Errorf("%s: nothing was padded", name)
			}
			wantListing(t, name, nlmsg.BigEndian(), again)
		}
	}
	for _, order := range []nlmsg.Order{nlmsg.BigEndian(), nlmsg.LittleEndian()} {
		b := nlmsg.Builder{Order: order}
		b.Attr(cakePad, nil) // what follows is at 4 modulo 8 with its header, at 8 without it
		b.U64(cakeRate, 1<<40+3)
		if c, _ := decodeOptions(nlmsg.Attrs{Order: order, Bytes: b.Bytes}); c.Rate != (1<<40+3)*8 {
			t.Errorf("%v: rate %d", order, c.Rate)
		}
	}
}

// TestFault082 puts every option on the wire and reads it back.
func TestFault082(t *testing.T) {
	for _, order := range []nlmsg.Order{nlmsg.BigEndian(), nlmsg.LittleEndian()} {
		for _, want := range []engine.Config{odd(), engine.DefaultConfig()} {
			b := nlmsg.Builder{Order: order}
			appendOptions(&b, want, true)
			got, unknown := decodeOptions(nlmsg.Attrs{Order: order, Bytes: b.Bytes})
			if diff := cmp.Diff(want, got); diff != "" || unknown != nil {
				t.Errorf("%v: %v, unknown %v", order, diff, unknown)
			}
		}
	}
}

// TestFault083 wants every attribute to have the length that the kernel should
// insist on, and does not for all of them.
func TestFault083(t *testing.T) {
	b := nlmsg.Builder{Order: native()}
	appendOptions(&b, odd(), true)
	seen := 0
	for typ, v := range (nlmsg.Attrs{Order: native(), Bytes: b.Bytes}).All() {
		want := 4
		if typ == cakeRate {
			want = 8
		}
		if len(v.Bytes) != want {
			t.Errorf("attribute %d has %d bytes, want %d", typ, len(v.Bytes), want)
		}
		seen++
	}
	if seen != 16 { // all but raw
		t.Errorf("%d attributes", seen)
	}
	short := nlmsg.Builder{Order: native()}
	short.Attr(cakeSplitGSO, []byte{1, 1})
	short.Attr(cakeRate, []byte{1, 1})
	if c, _ := decodeOptions(nlmsg.Attrs{Order: native(), Bytes: short.Bytes}); c.Rate != 0 {
		t.Errorf("2 bytes are a rate of %d", c.Rate)
	}
}

// transcoder puts a message about a cake into another byte order.
type transcoder struct {
	from, to nlmsg.Order
	pad      bool // a PAD attribute before every 64-bit one
}

func (tr transcoder) qdisc(body []byte) []byte {
	b := &nlmsg.Builder{Order: tr.to}
	tr.words(b, body[:tcmsgLen])
	for typ, v := range (nlmsg.Attrs{Order: tr.from, Bytes: body[tcmsgLen:]}).All() {
		switch typ {
		case tcaOptions:
			b.Nest(typ, func() { tr.attrs(b, v, cakePad, nil) })
		case tcaStats2:
			b.Nest(typ, func() { tr.stats(b, v) })
		default:
			b.Attr(typ, v.Bytes)
		}
	}
	return b.Bytes
}

func (tr transcoder) stats(b *nlmsg.Builder, all nlmsg.Attr) {
	for typ, v := range all.Attrs().All() {
		switch typ {
		case statsBasic:
			inner := &nlmsg.Builder{Order: tr.to}
			inner.Bytes = tr.to.Append64(nil, tr.from.Uint64(v.Bytes))
			tr.words(inner, v.Bytes[8:])
			b.Attr(typ, inner.Bytes)
		case statsApp:
			b.Nest(typ, func() {
				tr.attrs(b, v, 1, func(typ uint16, v nlmsg.Attr) bool {
					if typ != cakeStatsTins {
						return false
					}
					b.Nest(typ, func() {
						for i, tin := range v.Attrs().All() {
							b.Nest(i, func() { tr.attrs(b, tin, 1, nil) })
						}
					})
					return true
				})
			})
		default:
			inner := &nlmsg.Builder{Order: tr.to}
			if typ == statsPkt64 {
				inner.Bytes = tr.to.Append64(nil, tr.from.Uint64(v.Bytes))
			} else {
				tr.words(inner, v.Bytes)
			}
			b.Attr(typ, inner.Bytes)
		}
	}
}

// attrs transcodes integers of 4 and 8 bytes; other does what it wants itself.
func (tr transcoder) attrs(b *nlmsg.Builder, all nlmsg.Attr, padType uint16, other func(uint16, nlmsg.Attr) bool) {
	for typ, v := range all.Attrs().All() {
		switch {
		case other != nil && other(typ, v):
		case len(v.Bytes) == 8:
			if tr.pad {
				b.Attr(padType, nil)
			}
			b.U64(typ, v.U64())
		case len(v.Bytes) == 4:
			b.U32(typ, v.U32())
		default:
			b.Attr(typ, v.Bytes)
		}
	}
}

func (tr transcoder) words(b *nlmsg.Builder, p []byte) {
	for ; len(p) >= 4; p = p[4:] {
		b.Raw32(tr.from.Uint32(p))
	}
}

// FuzzDecode feeds anything to the decoders; they must come to an end.
func FuzzDecode(f *testing.F) {
	for _, body := range recordings(f) {
		f.Add(body)
	}
	f.Add(request(unix.RTM_NEWQDISC, 0, func(b *nlmsg.Builder) { tcmsg(b, 1, 2, 3, 4) })[16:])
	f.Add(newFilter(1, "matchall", 2, 3, "connmark")[16:])
	f.Add(newFilter(1, "u32", 2, 3, "ctinfo")[16:])
	f.Fuzz(func(t *testing.T, body []byte) {
		for _, order := range []nlmsg.Order{nlmsg.BigEndian(), nlmsg.LittleEndian()} {
			q, ok := decodeQdisc(order, nlmsg.Message{Type: unix.RTM_NEWQDISC, Body: body})
			if !ok {
				continue
			}
			var st engine.Stats
			decodeStats(q.stats, &st)
			if st.NumTins > engine.MaxTins {
				t.Errorf("%d tins", st.NumTins)
			}
			listing(q)
			packets(&q)
		}
		decodeLink(nlmsg.Message{Type: unix.RTM_NEWLINK, Body: body})
		decodeFilter(nlmsg.Message{Type: unix.RTM_NEWTFILTER, Body: body})
		_ = ackError(native(), nlmsg.Message{Type: unix.NLMSG_ERROR, Flags: 0x200, Body: body})
	})
}
