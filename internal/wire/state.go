package wire

import (
	"fmt"

	"google.golang.org/protobuf/proto"

	"github.com/cakefleet/cakefleet/internal/plan"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// EncodeDesired returns d for a file. Fields of later versions survive neither
// way; what this version doesn't know it can't run.
func EncodeDesired(d plan.Desired) ([]byte, error) {
	return proto.Marshal(FromDesired(d, 0))
}

// DecodeDesired is the inverse of EncodeDesired.
func DecodeDesired(b []byte) (plan.Desired, error) {
	var m pb.Desired
	if err := proto.Unmarshal(b, &m); err != nil {
		return plan.Desired{}, fmt.Errorf("desired state: %w", err)
	}
	return ToDesired(&m)
}
