package grpcwire

import (
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
	"time"

	"golang.org/x/net/http2/hpack"
	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// maxString is the longest name or value of a header, bytes.
const maxString = 8 << 10

// Messages puts the messages of one stream together. The zero value is ready.
type Messages struct {
	rest []byte // of a message that is not all there; nil most of the time
}

// Take calls fn with every message that is complete with data. A message is
// only valid within fn, and is at most limit bytes.
func (m *Messages) Take(data []byte, limit int, fn func(message []byte) error) error {
	if m.rest != nil {
		data = append(m.rest, data...)
		m.rest = nil
	}
	for len(data) >= PrefixSize {
		size := binary.BigEndian.Uint32(data[1:])
		if data[0] != 0 {
			return status.Error(codes.Unimplemented, "compressed messages are not understood")
		}
		if int64(size) > int64(limit) {
			return status.Errorf(codes.ResourceExhausted, "message of %d bytes, at most %d are allowed", size, limit)
		}
		if len(data) < PrefixSize+int(size) {
			break
		}
		if err := fn(data[PrefixSize : PrefixSize+int(size)]); err != nil {
			return err
		}
		data = data[PrefixSize+int(size):]
	}
	if len(data) > 0 {
		m.rest = append([]byte(nil), data...)
	}
	return nil
}

// Whole reports whether there is no message that is half here.
func (m *Messages) Whole() bool { return m.rest == nil }

// Headers are those of a request or an answer that gRPC looks at.
type Headers struct {
	Method, Path, ContentType string // of a request
	GRPCTimeout               string // of a request; see Timeout
	HTTPStatus                string // of an answer
	GRPCStatus, Message       string // of trailers
	Details                   []byte // of trailers: google.rpc.Status
}

// Decoder reads the header blocks of one connection.
type Decoder struct {
	h    *hpack.Decoder
	into *Headers
}

// NewDecoder returns a decoder whose table the other end may fill with up to
// 4096 bytes unless settings say less.
func NewDecoder() *Decoder {
	d := &Decoder{}
	d.h = hpack.NewDecoder(4096, d.field)
	d.h.SetMaxStringLength(maxString)
	return d
}

// Decode returns the headers of a block.
func (d *Decoder) Decode(block []byte) (h Headers, err error) {
	d.into = &h
	_, err = d.h.Write(block)
	if errClose := d.h.Close(); err == nil {
		err = errClose
	}
	d.into = nil
	if err != nil {
		return h, Broken(CompressionError, "headers: %v", err)
	}
	return h, nil
}

func (d *Decoder) field(f hpack.HeaderField) {
	switch h := d.into; f.Name {
	case ":method":
		h.Method = f.Value
	case ":path":
		h.Path = f.Value
	case ":status":
		h.HTTPStatus = f.Value
	case "content-type":
		h.ContentType = f.Value
	case "grpc-timeout":
		h.GRPCTimeout = f.Value
	case "grpc-status":
		h.GRPCStatus = f.Value
	case "grpc-message":
		h.Message = f.Value
	case "grpc-status-details-bin":
		h.Details, _ = base64.RawStdEncoding.DecodeString(strings.TrimRight(f.Value, "="))
	}
}

// block returns a header block that changes no table.
func block(fields ...string) []byte {
	var b strings.Builder
	e := hpack.NewEncoder(&b)
	for i := 0; i < len(fields); i += 2 {
		// A sensitive field is never put in the table.
		_ = e.WriteField(hpack.HeaderField{Name: fields[i], Value: fields[i+1], Sensitive: !static[fields[i]]})
	}
	return []byte(b.String())
}

// static are the fields that are in the static table with all values used here.
var static = map[string]bool{":method": true, ":scheme": true, ":status": true}

// RequestBlock returns the header block of a call of a method.
func RequestBlock(scheme, authority, path string) []byte {
	return block(":method", "POST", ":scheme", scheme, ":path", path, ":authority", authority,
		"content-type", "application/grpc", "te", "trailers")
}

// ResponseBlock returns the header block of an answer that has messages.
func ResponseBlock() []byte {
	return block(":status", "200", "content-type", "application/grpc")
}

// TrailersBlock returns the header block that ends a call; alone: there was
// none before.
func TrailersBlock(s *status.Status, alone bool) []byte {
	var fields []string
	if alone {
		fields = append(fields, ":status", "200", "content-type", "application/grpc")
	}
	fields = append(fields, "grpc-status", strconv.Itoa(int(s.Code())))
	if s.Message() != "" {
		fields = append(fields, "grpc-message", escape(s.Message()))
	}
	if p := s.Proto(); len(p.GetDetails()) > 0 {
		if raw, err := proto.Marshal(p); err == nil {
			fields = append(fields, "grpc-status-details-bin", base64.RawStdEncoding.EncodeToString(raw))
		}
	}
	return block(fields...)
}

// Err returns the error that trailers stand for; io.EOF for success.
func (h Headers) Err() error {
	code, err := strconv.ParseUint(h.GRPCStatus, 10, 32)
	if err != nil {
		return status.Errorf(codes.Internal, "the call ended with HTTP status %q and gRPC status %q", h.HTTPStatus, h.GRPCStatus)
	}
	if code == 0 {
		return io.EOF
	}
	if h.Details != nil {
		p := &spb.Status{}
		if err := proto.Unmarshal(h.Details, p); err == nil && p.GetCode() == int32(code) {
			return status.FromProto(p).Err()
		}
	}
	return status.Error(codes.Code(code), unescape(h.Message))
}

// Timeout returns how long the caller waits, if it said so.
func (h Headers) Timeout() (t time.Duration, ok bool) {
	n := len(h.GRPCTimeout)
	if n < 2 || n > 9 {
		return 0, false
	}
	v, err := strconv.ParseUint(h.GRPCTimeout[:n-1], 10, 32)
	unit, known := units[h.GRPCTimeout[n-1]]
	if err != nil || !known {
		return 0, false
	}
	if time.Duration(v) > math.MaxInt64/unit {
		return math.MaxInt64, true
	}
	return time.Duration(v) * unit, true
}

var units = map[byte]time.Duration{
	'n': time.Nanosecond, 'u': time.Microsecond, 'm': time.Millisecond, 'S': time.Second, 'M': time.Minute, 'H': time.Hour,
}

// escape writes a grpc-message: printable ASCII stays, the rest is %XX.
func escape(s string) string {
	var b strings.Builder
	for _, c := range []byte(s) {
		if c >= ' ' && c <= '~' && c != '%' {
			b.WriteByte(c)
		} else {
			fmt.Fprintf(&b, "%%%02X", c)
		}
	}
	return b.String()
}

func unescape(s string) string {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '%' && i+2 < len(s) {
			if v, err := strconv.ParseUint(s[i+1:i+3], 16, 8); err == nil {
				b.WriteByte(byte(v))
				i += 2
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

// AppendHeaders appends a header block as one frame.
func AppendHeaders(b []byte, stream uint32, block []byte, end bool) []byte {
	flags := uint8(FlagEndHeaders)
	if end {
		flags |= FlagEndStream
	}
	return append(AppendHeader(b, len(block), TypeHeaders, flags, stream), block...)
}

// ErrBlocked means that the other end has not read enough to be sent more.
var ErrBlocked = errors.New("flow control: the other end does not read")
