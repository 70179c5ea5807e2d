package auto_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/hashicorp/go-hclog"

	"github.com/cakefleet/cakefleet/agent/dataplane"
	"github.com/cakefleet/cakefleet/agent/dataplane/auto"
	"github.com/cakefleet/cakefleet/agent/dataplane/dataplanetest"
)

func TestOpen(t *testing.T) {
	for _, c := range []struct {
		name          string
		first, second error
		want          string
	}{
		{"both", nil, nil, "kernel"},
		{"unsupported", dataplane.ErrUnsupported, nil, "userspace"},
		{"broken", errors.New("no memory"), nil, "userspace"},
		{"none", dataplane.ErrUnsupported, errors.New("no queue"), ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			opened := 0
			open := func(err error) func() (dataplane.Dataplane, error) {
				return func() (dataplane.Dataplane, error) {
					if err != nil {
						return nil, err
					}
					opened++
					return new(dataplanetest.Fake), nil
				}
			}
			d, name, err := auto.Open([]auto.Candidate{{"kernel", open(c.first)}, {"userspace", open(c.second)}}, hclog.NewNullLogger())
			if name != c.want || (d != nil) != (err == nil) || (err == nil) != (c.want != "") {
				t.Errorf("got %q, %v", name, err)
			}
			if err == nil && opened != 1 {
				t.Errorf("%d were opened", opened)
			}
			if c.want == "" && (!errors.Is(err, dataplane.ErrUnsupported) || !strings.Contains(err.Error(), "userspace: no queue")) {
				t.Errorf("error is %v", err)
			}
		})
	}
}
