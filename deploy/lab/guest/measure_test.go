package main

import (
	"bytes"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/cakefleet/cakefleet/deploy/lab/row"
)

func TestAddPings(t *testing.T) {
	var in bytes.Buffer
	fmt.Fprintln(&in, 99, int64(time.Second)) // before the window
	for i := range 200 {
		fmt.Fprintln(&in, 100+i, (i+1)*1000)
	}
	fmt.Fprintln(&in, 300, -1)
	fmt.Fprintln(&in, 1000, int64(time.Second)) // behind it
	var got row.Result
	if err := addPings(&got, &in, 100, 1000); err != nil {
		t.Fatal(err)
	}
	want := row.Result{Pings: 201, PingsLost: 1, Ping50: 101_000, Ping90: 181_000, Ping99: 199_000, PingMax: 200_000}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	if err := addPings(&got, bytes.NewBufferString("torn"), 0, 1); err == nil {
		t.Error("a torn line is taken")
	}
}

func TestBetween(t *testing.T) {
	from := map[string]row.Thread{"1": {Name: "a", CPU: 5, Switches: 2}, "2": {Name: "b", CPU: 7, Switches: 3}}
	to := map[string]row.Thread{"1": {Name: "a", CPU: 9, Switches: 4}, "2": {Name: "b", CPU: 7, Switches: 3}, "3": {Name: "c", CPU: 40, Switches: 1}}
	want := []row.Thread{{Name: "c", CPU: 40, Switches: 1}, {Name: "a", CPU: 4, Switches: 2}}
	if d := cmp.Diff(want, between(from, to)); d != "" {
		t.Error(d)
	}
}
