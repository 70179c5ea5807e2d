package plan_test

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"reflect"
	"testing"

	"github.com/cakefleet/cakefleet/internal/plan"
)

// random returns a link with arbitrary values in every field.
func random(r *rand.Rand) plan.Link {
	var l plan.Link
	for _, c := range []any{&l.Down, &l.Up} {
		v := reflect.ValueOf(c).Elem()
		for _, f := range v.Fields() {
			switch {
			case f.Kind() == reflect.Bool:
				f.SetBool(r.IntN(2) == 0)
			case f.CanUint() && f.Kind() == reflect.Uint8:
				f.SetUint(r.Uint64N(10)) // also values that have no word
			case f.CanUint():
				f.SetUint(r.Uint64() >> r.UintN(64))
			case f.CanInt():
				f.SetInt(r.Int64() >> r.UintN(64))
			default:
				panic(f.Kind())
			}
		}
	}
	return l
}

// The hash is that of fmt's text, as it has been from the first version on, so
// that agents and controllers of all versions agree.
func TestHash(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		l := random(r)
		sum := sha256.Sum256(fmt.Appendf(nil, "%+v", l))
		if got, want := l.Hash(), hex.EncodeToString(sum[:16]); got != want {
			t.Fatalf("hash of %+v is %s, want %s", l, got, want)
		}
	}
}

// Every field of a link has a name and a text that reads back, and carries
// nothing but itself.
func TestSettings(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for range 200 {
		l := random(r)
		for _, c := range []any{&l.Down, &l.Up} {
			v := reflect.ValueOf(c).Elem()
			v.FieldByName("Rate").SetUint(1000 + r.Uint64N(1e9))
			for name, n := range map[string]uint64{"Tins": 6, "Flows": 8, "AckFilter": 3, "Framing": 3} {
				v.FieldByName(name).SetUint(r.Uint64N(n))
			}
		}
		var all plan.Settings
		for i := range plan.NumFields {
			name, text := plan.FieldName(i), plan.FieldText(&l, i)
			one, err := plan.ParseSettings(map[string]string{name: text})
			if err != nil {
				t.Fatal(err)
			}
			var to plan.Link
			one.Over(&to)
			if got := plan.FieldText(&to, i); got != text || one.Fields != 1<<i {
				t.Fatalf("%s %s became %s", name, text, got)
			}
			all = all.With(one)
			if rest := all.Without(1 << i); rest.Has(i) || rest.With(one) != all {
				t.Fatalf("%s is not taken away alone", name)
			}
		}
		if all.Link != l {
			t.Fatalf("all fields together are %+v, want %+v", all.Link, l)
		}
		back, err := plan.ParseSettings(all.Words())
		if err != nil || back != all {
			t.Fatalf("words read back as %+v: %v", back, err)
		}
	}
	if n := reflect.TypeFor[plan.Link]().Field(0).Type.NumField(); 2*n != plan.NumFields {
		t.Errorf("a link has %d fields, NumFields is %d", 2*n, plan.NumFields)
	}
}

func TestSettingsErrors(t *testing.T) {
	for name, value := range map[string]string{
		"down.speed": "1mbit", "rate": "1mbit", "left.rate": "1mbit", "down.rate": "0", "up.rate": "500", "up.tins": "many",
		"down.nat": "yes", "up.overhead": "99999", "up.rtt": "fast", "": "",
	} {
		if s, err := plan.ParseSettings(map[string]string{name: value}); err == nil {
			t.Errorf("%s %q became %v", name, value, s)
		}
	}
}

func BenchmarkHash(b *testing.B) {
	l := random(rand.New(rand.NewPCG(1, 2)))
	for b.Loop() {
		_ = l.Hash()
	}
}
