package subimport_test

import (
	"bytes"
	"encoding/binary"
	"encoding/csv"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"
	"testing"
	"unicode/utf16"

	"github.com/google/go-cmp/cmp"

	"github.com/cakefleet/cakefleet/controller/subimport"
	"github.com/cakefleet/cakefleet/internal/plan"
)

func wide(s string, order binary.AppendByteOrder) []byte {
	var b []byte
	for _, u := range utf16.Encode([]rune(s)) {
		b = order.AppendUint16(b, u)
	}
	return b
}

// Every way that a spreadsheet or a billing system writes one table gives the
// same rows.
func TestParseFormats(t *testing.T) {
	const table = "id,plan,site,note\n4711,gold,Zürich,\"a, b\"\n\n0815,silver,,\"say \"\"hi\"\"\"\n"
	want := []subimport.Row{
		{Line: 2, ID: "4711", Plan: "gold", Labels: map[string]string{"site": "Zürich", "note": "a, b"}},
		{Line: 4, ID: "0815", Plan: "silver", Labels: map[string]string{"note": `say "hi"`}},
	}
	semicolons := "id;plan;site;note\n4711;gold;Zürich;a, b\n\n0815;silver;;\"say \"\"hi\"\"\"\n"
	for _, c := range []struct {
		name  string
		data  []byte
		shift int // lines before the table
	}{
		{"plain", []byte(table), 0},
		{"no newline at the end", []byte(strings.TrimSuffix(table, "\n")), 0},
		{"byte order mark", []byte("\ufeff" + table), 0},
		{"crlf", []byte(strings.ReplaceAll(table, "\n", "\r\n")), 0},
		{"cr", []byte(strings.ReplaceAll(table, "\n", "\r")), 0},
		{"semicolons", []byte(semicolons), 0},
		{"tabs", []byte(strings.ReplaceAll(semicolons, ";", "\t")), 0},
		{"sep line", []byte("sep=;\r\n" + semicolons), 1},
		{"empty lines before", []byte("\n \r\n" + table), 2},
		{"utf-16 little-endian with mark", wide("\ufeff"+table, binary.LittleEndian), 0},
		{"utf-16 big-endian with mark", wide("\ufeff"+table, binary.BigEndian), 0},
		{"utf-16 little-endian", wide(table, binary.LittleEndian), 0},
		{"utf-16 big-endian", wide(table, binary.BigEndian), 0},
		{"spaces around values", []byte("id , plan, site ,note\n 4711 ,gold ,  Zürich, \"a, b\" \n ,  , ,\n0815, silver , ,\"say \"\"hi\"\"\" \n"), 0},
		{"columns in capitals", []byte(strings.Replace(table, "id,plan,site", "ID,Plan,Site", 1)), 0},
		{"empty columns at the end", []byte(strings.ReplaceAll(table, "\n", ",,\n")), 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := subimport.Parse(c.data)
			for i := range f.Rows {
				f.Rows[i].Line -= c.shift
			}
			if d := cmp.Diff(subimport.File{Labels: []string{"site", "note"}, Rows: want}, f); d != "" {
				t.Error(d)
			}
		})
	}
}

func TestParseErrors(t *testing.T) {
	for _, c := range []struct {
		name, file string
		want       []string // line, column, part of the message
	}{
		{"empty", "", []string{"0::file is empty"}},
		{"only spaces", " \r\n\n", []string{"0::file is empty"}},
		{"no plan column", "id,site\n1,x\n", []string{"1:plan:column plan is missing; the first line names id, site"}},
		{"column twice", "id,plan,site,Site\n", []string{"1:site:columns 3 and 4 have the same name"}},
		{"column without a name", "id,,plan\n", []string{"1::column 2 has no name"}},
		{"label that can't be one", "id,plan,Site Name\n", []string{"1:site name:position 5"}},
		{"columns missing", "id,plan,site\n1,gold\n", []string{"2::line has 2 columns, the first line has 3"}},
		{"too many columns", "id,plan\n1,gold,x\n", []string{"2::line has 3 columns, the first line has 2"}},
		{"id twice", "id,plan\n1,gold\n2,gold\n1,gold\n1,iron\n", []string{"4:id:subscriber 1 is on line 2", "5:id:subscriber 1 is on line 2"}},
		{"empty id and plan", "id,plan,site\n,,x\n", []string{"2:id:id is empty", "2:plan:name is empty"}},
		{"space inside an id", "id,plan\n47 11,gold\n", []string{"2:id:position 3"}},
		{"every bad line, and no other", "id,plan\n1,gold\n2,Gold\n3,gold\n4/5,gold\n5,gold\n", []string{"3:plan:position 1", "5:id:position 2"}},
		{"open quote spoils one line", "id,plan\n\"1,gold\n2,gold\n3,GOLD\n", []string{"2::not closed", "4:plan:position 1"}},
		{"value on two lines", "id,plan,site\n1,gold,\"a\nb\"\n", []string{"2::not closed", "3::in the middle"}},
		{"bare quote", "id,plan\n1\"2,gold\n", []string{"2::in the middle"}},
		{"text after a quote", "id,plan\n\"1\"2,gold\n", []string{"2::in the middle"}},
		{"not utf-8", "id,plan,site\n1,gold,Z\xfcrich\n", []string{"2::is not UTF-8 after \"1,gold,Z\" (byte 0xfc)"}},
		{"zero byte", "id,plan,site\n1,gold,a\x00\n", []string{"2:site:byte 2 that can't be printed"}},
		{"label too long", "id,plan,site\n1,gold," + strings.Repeat("x", 257) + "\n", []string{"2:site:257 bytes"}},
		{"half a character", "\xff\xfei\x00d", []string{"0::cut off"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := subimport.Parse([]byte(c.file))
			if len(f.Errors) != len(c.want) {
				t.Fatalf("errors %+v, want %q", f.Errors, c.want)
			}
			for i, e := range f.Errors {
				part := strings.SplitN(c.want[i], ":", 3)
				if fmt.Sprint(e.Line) != part[0] || e.Column != part[1] || !strings.Contains(e.Message, part[2]) {
					t.Errorf("error %d is %+v, want %q", i, e, c.want[i])
				}
			}
		})
	}
}

// A line that is bad is named, and only it.
func TestFleet016_OneBadLineOfTenThousand(t *testing.T) {
	var b strings.Builder
	b.WriteString("id,plan\n")
	for i := range 10_000 {
		name := "gold"
		if i == 7_000 {
			name = "no such plan"
		}
		fmt.Fprintf(&b, "%d,%s\n", i, name)
	}
	d := subimport.Compare(subimport.Parse([]byte(b.String())), stored("gold"), subimport.Options{})
	if len(d.Errors) != 1 || d.Errors[0].Line != 7_002 || len(d.Changes) != 0 {
		t.Errorf("%d errors, the first %+v, and %d changes", len(d.Errors), d.Errors[:1], len(d.Changes))
	}
}

// Two validators of one file that disagree about spaces are the fault; here
// there is one, and spaces around a value change nothing.
func TestFleet009_SpacesAroundValues(t *testing.T) {
	tight := subimport.Parse([]byte("id,plan,site\n500,gold,north\n"))
	loose := subimport.Parse([]byte(" id ,plan , site\n 500,  gold, north  \n"))
	if d := cmp.Diff(tight, loose); d != "" {
		t.Error(d)
	}
}

type records struct {
	plans       []string
	subscribers map[string]plan.Subscriber
	routers     map[string]string // router of a subscriber
}

func (r records) Plan(name string) (plan.Plan, bool) {
	return plan.Plan{Name: name}, slices.Contains(r.plans, name)
}

func (r records) Subscriber(id string) (s plan.Subscriber, ok bool) {
	s, ok = r.subscribers[id]
	return s, ok
}

func (r records) Subscribers(string) iter.Seq[plan.Subscriber] {
	return func(yield func(plan.Subscriber) bool) {
		for _, id := range slices.Sorted(maps.Keys(r.subscribers)) {
			if !yield(r.subscribers[id]) {
				return
			}
		}
	}
}

func (r records) RoutersOfSubscriber(id string) iter.Seq[plan.Router] {
	return func(yield func(plan.Router) bool) {
		if router, ok := r.routers[id]; ok {
			yield(plan.Router{ID: router, Subscriber: id})
		}
	}
}

func stored(plans ...string) records {
	return records{plans: plans, subscribers: map[string]plan.Subscriber{}}
}

func TestCompare(t *testing.T) {
	same := plan.Subscriber{ID: "same", Plan: "gold", Labels: map[string]string{"site": "north"}, Revision: 3}
	moves := plan.Subscriber{ID: "moves", Plan: "gold", Labels: map[string]string{"site": "north", "vip": "yes"}, Revision: 4}
	leaves := plan.Subscriber{ID: "leaves", Plan: "gold", Revision: 5}
	from := stored("gold", "silver")
	for _, s := range []plan.Subscriber{same, moves, leaves} {
		from.subscribers[s.ID] = s
	}
	f := subimport.Parse([]byte("id,plan,site\nnew,gold,south\nsame,gold,north\nmoves,silver,\n"))
	moved := plan.Subscriber{ID: "moves", Plan: "silver", Labels: map[string]string{"vip": "yes"}}
	want := subimport.Diff{
		Changes: []subimport.Change{
			{Kind: subimport.Added, After: plan.Subscriber{ID: "new", Plan: "gold", Labels: map[string]string{"site": "south"}}},
			{Kind: subimport.Changed, Before: moves, After: moved},
		},
		Added: 1, Changed: 1, Unchanged: 1,
	}
	if d := cmp.Diff(want, subimport.Compare(f, from, subimport.Options{})); d != "" {
		t.Errorf("without removal: %s", d)
	}
	want.Removed = 1
	want.Changes = append(want.Changes, subimport.Change{Kind: subimport.Removed, Before: leaves})
	if d := cmp.Diff(want, subimport.Compare(f, from, subimport.Options{RemoveMissing: true})); d != "" {
		t.Errorf("with removal: %s", d)
	}
	if moves.Labels["site"] != "north" {
		t.Error("the stored labels were changed")
	}
}

func TestCompareRefuses(t *testing.T) {
	from := stored("gold")
	from.subscribers["1"] = plan.Subscriber{ID: "1", Plan: "gold"}
	from.routers = map[string]string{"1": "r1"}
	var labels strings.Builder
	for i := range 65 {
		fmt.Fprintf(&labels, ",l%d", i)
	}
	for _, c := range []struct{ name, file, want string }{
		{"removal of who is served", "id,plan\n2,gold\n", "router r1 serves it"},
		{"removal of everybody", "id,plan\n", "file has no subscriber"},
		{"unknown plan", "id,plan\n1,brass\n", "plan brass does not exist"},
		{"too many labels", "id,plan" + labels.String() + "\n1,gold" + strings.Repeat(",x", 65) + "\n", "65 labels"},
	} {
		d := subimport.Compare(subimport.Parse([]byte(c.file)), from, subimport.Options{RemoveMissing: true})
		if len(d.Errors) != 1 || !strings.Contains(d.Errors[0].Message, c.want) || len(d.Changes) != 0 {
			t.Errorf("%s: %+v, want one error with %q", c.name, d, c.want)
		}
	}
}

func TestDescribe(t *testing.T) {
	got := subimport.Describe(plan.Subscriber{Plan: "gold", Labels: map[string]string{"site": "north", "region": "x"}})
	if got != "plan gold, region x, site north" {
		t.Error(got)
	}
}

// FuzzParse checks that no file breaks the parser, that what it accepts would
// be stored as it is, and that it reads what encoding/csv reads.
func FuzzParse(f *testing.F) {
	for _, s := range []string{
		"id,plan\n1,gold\n", "\ufeffid;plan;site\r\n1;gold;\"a;b\"\r\n", "sep=;\nid;plan\n", "id,plan,x\n1,gold,\"say \"\"hi\"\"\"\n",
		"\xff\xfei\x00d\x00,\x00p\x00l\x00a\x00n\x00\n\x001\x00,\x00g\x00\n\x00", "id,plan\n\"1,gold\n", "id\tplan\n1\tgold\n1\tgold\n",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		file := subimport.Parse(data)
		lines := bytes.Count(data, []byte{'\n'}) + bytes.Count(data, []byte{'\r'}) + 1
		for _, e := range file.Errors {
			if e.Message == "" || e.Line < 0 || e.Line > lines {
				t.Errorf("error %+v in a file of %d lines", e, lines)
			}
		}
		if len(file.Errors) > 0 {
			return
		}
		ids := map[string]bool{}
		for _, r := range file.Rows {
			if err := (plan.Subscriber{ID: r.ID, Plan: r.Plan}).Validate(); err != nil {
				t.Errorf("line %d was accepted: %v", r.Line, err)
			}
			for k, v := range r.Labels {
				if err := plan.ValidateLabel(k, v); err != nil || v != strings.TrimSpace(v) {
					t.Errorf("line %d was accepted with %q: %v", r.Line, v, err)
				}
			}
			if ids[r.ID] {
				t.Errorf("subscriber %s was accepted twice", r.ID)
			}
			ids[r.ID] = true
		}
		// Without the tolerance for spaces, separators and encodings, the two
		// readers agree.
		if bytes.ContainsAny(data, " \r\t;\x00\ufeff\v\f\u0085\u00a0") || bytes.HasPrefix(data, []byte("sep=")) || !bytes.HasPrefix(data, []byte("id,plan\n")) {
			return
		}
		r := csv.NewReader(bytes.NewReader(data))
		r.FieldsPerRecord = -1
		all, err := r.ReadAll()
		if err != nil {
			t.Fatalf("encoding/csv refuses it: %v", err)
		}
		var want []string
		for _, rec := range all[1:] {
			if strings.Join(rec, "") != "" {
				want = append(want, strings.TrimSpace(rec[0]))
			}
		}
		var got []string
		for _, row := range file.Rows {
			got = append(got, row.ID)
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Error(d)
		}
	})
}

func BenchmarkParse(b *testing.B) {
	var file bytes.Buffer
	file.WriteString("id,plan,site,region\n")
	const n = 100_000
	for i := range n {
		fmt.Fprintf(&file, "%08d,gold,site-%d,north\n", i, i%500)
	}
	b.SetBytes(int64(file.Len()))
	b.ReportAllocs()
	for b.Loop() {
		if f := subimport.Parse(file.Bytes()); len(f.Rows) != n || len(f.Errors) != 0 {
			b.Fatalf("%d rows, %d errors", len(f.Rows), len(f.Errors))
		}
	}
}

// JSON says the same as a table; every bad subscriber has its line, and a file
// that is cut off is no good at all.
func TestParseJSON(t *testing.T) {
	want := []subimport.Row{
		{Line: 2, Record: 1, ID: "4711", Plan: "gold", Labels: map[string]string{"site": "Zürich", "floor": "2"}},
		{Line: 4, Record: 2, ID: "0815", Plan: "silver", Clear: []string{"note", "site"}},
	}
	const list = "[\n {\"id\":4711,\"plan\":\"gold\",\"labels\":{\"site\":\"Zürich\",\"floor\":2}},\n\n {\"plan\":\"silver\",\n\"id\":\" 0815\",\"labels\":{\"site\":null,\"note\":\"\"}}]"
	for _, file := range []string{list, "\ufeff" + list + "\n", `{"subscribers":` + list + "}"} {
		f := subimport.Parse([]byte(file))
		if d := cmp.Diff(want, f.Rows); d != "" || len(f.Errors) != 0 {
			t.Errorf("%q: %v %s", file, f.Errors, d)
		}
	}
	for _, c := range []struct {
		name, file string
		broken     bool
		want       []subimport.LineError
	}{
		{"several bad", "[{\"id\":\"1\",\"plan\":\"gold\"},\n{\"id\":\"1\",\"plan\":\"gold\"},\n{\"id\":\"\",\"plan\":\"gold\"},\n{\"id\":\"2\",\"speed\":1},\n7]", false, []subimport.LineError{
			{Line: 2, Record: 2, Column: "id", Message: "subscriber 1 is on record 1, line 1 already"},
			{Line: 3, Record: 3, Column: "id", Message: "subscriber id is empty"},
			{Line: 4, Record: 4, Column: "speed", Message: "is no field of a subscriber; what is free goes into labels"},
			{Line: 4, Record: 4, Column: "plan", Message: "is missing"},
			{Line: 5, Record: 5, Message: "a subscriber is an object with id, plan and labels, not a number"},
		}},
		{"all on one line, and all that is wrong with each", `[{"id":[],"plan":7,"down":"fast"},{"id":"1","plan":"gold","labels":{"a":{},"b":[]},"x":1},{"id":"2","plan":"gold"},{"id":"2","plan":"gold"},null,{"ID":"3","labels":5}]`, false, []subimport.LineError{
			{Line: 1, Record: 1, Column: "down", Message: `down.rate: rate "fast": not a number`},
			{Line: 1, Record: 1, Column: "id", Message: "must be a text or a number"},
			{Line: 1, Record: 1, Column: "plan", Message: "can't be a number"},
			{Line: 1, Record: 2, Column: "x", Message: "is no field of a subscriber; what is free goes into labels"},
			{Line: 1, Record: 2, Column: "a", Message: "must be a text or a number"},
			{Line: 1, Record: 2, Column: "b", Message: "must be a text or a number"},
			{Line: 1, Record: 4, Column: "id", Message: "subscriber 2 is on record 3, line 1 already"},
			{Line: 1, Record: 5, Message: "a subscriber is an object with id, plan and labels, not null"},
			{Line: 1, Record: 6, Column: "labels", Message: "must be an object, not a number"},
			{Line: 1, Record: 6, Column: "plan", Message: "is missing"},
		}},
		{"cut off", "[{\"id\":\"1\",\"plan\":\"gold\"},\n{\"id\"", true, []subimport.LineError{{Message: "file ends in the middle, after record 1; it seems to be cut off"}}},
		{"no list", "{\"id\":\"1\"}", true, []subimport.LineError{{Message: "an array of subscribers is wanted, or an object whose only field is subscribers"}}},
		{"bad comma", "[{\"id\":\"1\",\"plan\":\"gold\"}\n{}]", true, nil},
	} {
		f := subimport.Parse([]byte(c.file))
		if f.Broken != c.broken || len(f.Errors) == 0 {
			t.Errorf("%s: broken %t, errors %v", c.name, f.Broken, f.Errors)
		}
		if d := cmp.Diff(c.want, f.Errors); d != "" && c.want != nil {
			t.Errorf("%s: %s", c.name, d)
		}
	}
}
