package api

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"

	"github.com/grpc-ecosystem/grpc-gateway/v2/runtime"
	"github.com/grpc-ecosystem/grpc-gateway/v2/utilities"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// strictQuery refuses parameters that a call does not have. The gateway leaves
// them out, and then dryrun=true instead of dry_run=true stores the change.
type strictQuery struct{ runtime.DefaultQueryParser }

// checkQueries makes strictQuery the gateway's, which has one for the process.
var checkQueries = sync.OnceFunc(func() { runtime.NewServeMux(runtime.SetQueryParameterParser(&strictQuery{})) })

// Parse is that of runtime.QueryParameterParser.
func (p *strictQuery) Parse(m proto.Message, values url.Values, filter *utilities.DoubleArray) error {
	for key := range values {
		if !hasField(m.ProtoReflect().Descriptor(), key) {
			return fmt.Errorf("query parameter %q: this call has none of that name; /openapi.json says which it has", key)
		}
	}
	return p.DefaultQueryParser.Parse(m, values, filter)
}

// hasField says whether a key of a query, such as labels[site] or link.down,
// names a field of a message.
func hasField(d protoreflect.MessageDescriptor, key string) bool {
	path, _, _ := strings.Cut(key, "[")
	for name := range strings.SplitSeq(path, ".") {
		if d == nil {
			return false
		}
		field := d.Fields().ByTextName(name)
		if field == nil {
			field = d.Fields().ByJSONName(name)
		}
		if field == nil {
			return false
		}
		d = field.Message()
	}
	return true
}

// queriedBody is a body with the names of the query parameters beside it.
type queriedBody struct {
	io.ReadCloser
	names []string
}

// withQuery lets strictJSON see the query of a call.
func withQuery(req *http.Request) {
	names := slices.Sorted(maps.Keys(req.URL.Query()))
	if req.Body == nil || len(names) == 0 {
		return
	}
	req.Body = &queriedBody{req.Body, names}
}

// strictJSON refuses what the gateway leaves unread: anything behind the body's
// value, and the query of a call whose body is the whole request.
type strictJSON struct{ runtime.JSONPb }

// NewDecoder is that of runtime.Marshaler.
func (j *strictJSON) NewDecoder(r io.Reader) runtime.Decoder {
	d := json.NewDecoder(r)
	inner := runtime.DecoderWrapper{Decoder: d, UnmarshalOptions: j.UnmarshalOptions}
	return runtime.DecoderFunc(func(v any) error {
		if b, ok := r.(*queriedBody); ok {
			if _, whole := v.(proto.Message); whole {
				return fmt.Errorf("query parameter %q: this call takes its fields in the body", b.names[0])
			}
		}
		if err := inner.Decode(v); err != nil {
			return err
		}
		if _, err := d.Token(); !errors.Is(err, io.EOF) {
			return fmt.Errorf("body: something follows its JSON value at byte %d; one value is wanted", d.InputOffset())
		}
		return nil
	})
}
