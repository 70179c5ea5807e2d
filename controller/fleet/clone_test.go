package fleet

import (
	"fmt"
	"testing"
	"time"

	"github.com/cakefleet/cakefleet/internal/plan"
)

// A letter is a boot that says hello, a digit an address; the time between two
// is given. The last one, and none before, proves that there are two devices.
func TestClones(t *testing.T) {
	for name, c := range map[string]struct {
		hellos []string
		every  time.Duration
		clone  bool
	}{
		"two take turns":                    {[]string{"a1", "b2", "a1", "b2"}, time.Second, true},
		"three take turns":                  {[]string{"a1", "b2", "c3", "a1", "b2"}, time.Second, true},
		"one of them restarts":              {[]string{"a1", "b2", "a1", "c2", "a1"}, time.Second, true},
		"slowly":                            {[]string{"a1", "b2", "a1", "b2"}, 15 * time.Minute, true},
		"NAT gives other addresses":         {[]string{"a1", "a2", "a3", "a1", "a2", "a3"}, time.Second, false},
		"restarts":                          {[]string{"a1", "b1", "c1", "d1", "e1", "f1", "g1"}, time.Second, false},
		"restarts and reconnects":           {[]string{"a1", "a2", "b2", "b1", "b2", "c1", "c2"}, time.Second, false},
		"a slow connection of the old boot": {[]string{"a1", "b1", "a1", "b1"}[:3], time.Second, false},
		"too rare to be both alive":         {[]string{"a1", "b2", "a1", "b2"}, 2 * time.Hour, false},
	} {
		t.Run(name, func(t *testing.T) {
			var b boots
			var was plan.Device
			now := time.Now()
			for i, h := range c.hellos {
				is := plan.Device{BootID: h[:1], Address: h[1:]}
				got := b.hello(now, was, is)
				if last := i == len(c.hellos)-1; (got != nil) != (c.clone && last) {
					t.Errorf("hello %d (%s): %v", i, h, got)
				}
				if got != nil && (got.Devices[0] != was || got.Devices[1] != is) {
					t.Errorf("devices %v", got.Devices)
				}
				was, now = is, now.Add(c.every)
			}
		})
	}
}

// A router that restarts for ever costs a few boots of memory.
func TestBootsAreBounded(t *testing.T) {
	var b boots
	now := time.Now()
	for i := range 10_000 {
		b.hello(now, plan.Device{BootID: fmt.Sprint(i)}, plan.Device{BootID: fmt.Sprint(i + 1)})
		now = now.Add(time.Second)
		if n := len(b.m.followed); n > maxBoots {
			t.Fatalf("%d boots are remembered", n)
		}
	}
}
