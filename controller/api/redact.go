package api

import (
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/cakefleet/cakefleet/controller/identity"
)

// hidden stands in place of what a viewer must not see.
const hidden = "(hidden)"

// DefaultViewerLabels are the labels of subscribers that viewers see: where
// somebody is in the network, and not who it is.
var DefaultViewerLabels = []string{"site", "ap", "region", "pop", "olt", "tower", "sector", "model", "segment"}

// privacy hides personal fields from viewers, whatever call has them in its
// answer. The id of a subscriber stays: without it nobody could say whose line
// is bad, and to find out who that is takes the billing system.
type privacy struct {
	labels map[string]bool // that viewers see
	has    sync.Map        // protoreflect.FullName of a message to whether there is anything to hide in it
}

func newPrivacy(labels []string) *privacy {
	p := &privacy{labels: map[string]bool{}}
	for _, l := range labels {
		p.labels[l] = true
	}
	return p
}

// The personal fields. A text becomes hidden, of labels those that a viewer
// doesn't see, and everything else is left out.
var personal = map[protoreflect.FullName]bool{
	"cakefleet.v1.Subscriber.labels": true,
	"cakefleet.v1.Router.labels":     true,
	"cakefleet.v1.SessionState.peer": true,
	"cakefleet.v1.Device.address":    true,
}

// forCaller returns what a caller may see of an answer.
func (p *privacy) forCaller(c identity.Caller, answer any) any {
	m, ok := answer.(proto.Message)
	if !ok || c.Role != identity.Viewer || !p.mayHave(m.ProtoReflect().Descriptor(), nil) {
		return answer
	}
	m = proto.Clone(m) // parts of it may be in use elsewhere
	p.hide(m.ProtoReflect())
	return m
}

// mayHave tells whether there may be anything personal in messages of a type.
func (p *privacy) mayHave(d protoreflect.MessageDescriptor, above []protoreflect.FullName) bool {
	if known, ok := p.has.Load(d.FullName()); ok {
		return known.(bool)
	}
	for _, name := range above {
		if name == d.FullName() {
			return false // what contains itself; the first one decides
		}
	}
	above = append(above, d.FullName())
	found := false
	for i := range d.Fields().Len() {
		f := d.Fields().Get(i)
		of := f.Message()
		if f.IsMap() {
			of = f.MapValue().Message()
		}
		found = found || personal[f.FullName()] || of != nil && p.mayHave(of, above)
	}
	if found || len(above) == 1 {
		p.has.Store(d.FullName(), found)
	}
	return found
}

func (p *privacy) hide(m protoreflect.Message) {
	m.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case personal[f.FullName()] && f.IsMap() && f.MapKey().Kind() == protoreflect.StringKind && f.MapValue().Kind() == protoreflect.StringKind:
			v.Map().Range(func(k protoreflect.MapKey, _ protoreflect.Value) bool {
				if !p.labels[k.String()] {
					v.Map().Set(k, protoreflect.ValueOfString(hidden))
				}
				return true
			})
		case personal[f.FullName()] && f.Kind() == protoreflect.StringKind && !f.IsList():
			m.Set(f, protoreflect.ValueOfString(hidden))
		case personal[f.FullName()]:
			m.Clear(f)
		case f.IsMap():
			if f.MapValue().Message() != nil {
				v.Map().Range(func(_ protoreflect.MapKey, v protoreflect.Value) bool { p.hide(v.Message()); return true })
			}
		case f.Message() != nil && f.IsList():
			for i := range v.List().Len() {
				p.hide(v.List().Get(i).Message())
			}
		case f.Message() != nil:
			p.hide(v.Message())
		}
		return true
	})
}

// privateStream is a stream whose answers are for one caller.
type privateStream struct {
	grpc.ServerStream
	privacy *privacy
	caller  identity.Caller
}

// SendMsg sends what the caller may see of an answer.
func (s *privateStream) SendMsg(m any) error {
	return s.ServerStream.SendMsg(s.privacy.forCaller(s.caller, m))
}
