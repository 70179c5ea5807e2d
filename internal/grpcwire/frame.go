// Package grpcwire has gRPC as it goes over a connection: HTTP/2 frames, header
// blocks, messages and statuses, as bytes and without goroutines. It is for
// both ends of very many calm connections, where grpc-go's four goroutines and
// their buffers for each would be most of the memory: the agents' door of a
// controller, and simulated agents.
//
// It knows what gRPC needs of RFC 9113 and refuses the rest: a header block is
// one frame, nothing is pushed, priorities are ignored.
package grpcwire

import (
	"encoding/binary"
	"fmt"
)

// Preface is what a client sends first.
const Preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

// Sizes, bytes.
const (
	HeaderSize    = 9       // of a frame's header
	MaxPayload    = 1 << 14 // of a frame, unless the other end allows more
	InitialWindow = 1<<16 - 1
	MaxWindow     = 1<<31 - 1
	PrefixSize    = 5 // of a message
)

// Type is the type of a frame.
type Type uint8

// The types of RFC 9113, section 6.
const (
	TypeData Type = iota
	TypeHeaders
	TypePriority
	TypeReset
	TypeSettings
	TypePushPromise
	TypePing
	TypeGoAway
	TypeWindowUpdate
	TypeContinuation
)

// Flags of frames.
const (
	FlagEndStream  = 0x1
	FlagAck        = 0x1 // of SETTINGS and PING
	FlagEndHeaders = 0x4
	FlagPadded     = 0x8
	FlagPriority   = 0x20
)

// Code is a reason for the end of a stream or connection.
type Code uint32

// The codes of RFC 9113, section 7, that are used here.
const (
	NoError           Code = 0x0
	ProtocolError     Code = 0x1
	FlowControlError  Code = 0x3
	StreamClosed      Code = 0x5
	FrameSizeError    Code = 0x6
	RefusedStream     Code = 0x7
	Cancel            Code = 0x8
	CompressionError  Code = 0x9
	EnhanceYourCalm   Code = 0xb
	settingTableSize       = 0x1
	settingPush            = 0x2
	settingMaxStreams      = 0x3
	settingWindow          = 0x4
	settingMaxPayload      = 0x5
	settingMaxHeaders      = 0x6
	settingSize            = 6
	windowUpdateSize       = 4
	pingSize               = 8
	priorityFieldSize      = 5
)

// Error is a broken rule of the protocol that ends the connection.
type Error struct {
	Code Code
	Text string
}

// Error returns the text.
func (e *Error) Error() string { return "HTTP/2: " + e.Text }

// Broken returns an Error.
func Broken(code Code, format string, args ...any) *Error {
	return &Error{code, fmt.Sprintf(format, args...)}
}

// Frame is one frame. Payload is only valid as long as what it was read from.
type Frame struct {
	Type    Type
	Flags   uint8
	Stream  uint32
	Payload []byte
}

// Has reports whether a flag is set.
func (f Frame) Has(flag uint8) bool { return f.Flags&flag != 0 }

// Next returns the frame that b begins with and its length; 0 if b has not all
// of it yet.
func Next(b []byte) (f Frame, n int, err error) {
	if len(b) < HeaderSize {
		return Frame{}, 0, nil
	}
	f, size := ParseHeader([HeaderSize]byte(b))
	if size > MaxPayload {
		return Frame{}, 0, Broken(FrameSizeError, "frame of %d bytes, at most %d are allowed", size, MaxPayload)
	}
	if len(b) < HeaderSize+size {
		return Frame{}, 0, nil
	}
	f.Payload = b[HeaderSize : HeaderSize+size]
	return f, HeaderSize + size, nil
}

// ParseHeader returns a frame without its payload, and the payload's size.
func ParseHeader(h [HeaderSize]byte) (f Frame, size int) {
	return Frame{
		Type:   Type(h[3]),
		Flags:  h[4],
		Stream: binary.BigEndian.Uint32(h[5:]) & MaxWindow,
	}, int(h[0])<<16 | int(h[1])<<8 | int(h[2])
}

// AppendHeader appends the header of a frame with size bytes of payload.
func AppendHeader(b []byte, size int, t Type, flags uint8, stream uint32) []byte {
	b = append(b, byte(size>>16), byte(size>>8), byte(size), byte(t), flags)
	return binary.BigEndian.AppendUint32(b, stream)
}

// AppendData appends a frame that has all of a message. The message with its
// prefix must be at most MaxPayload bytes.
func AppendData(b []byte, stream uint32, message []byte, end bool) []byte {
	var flags uint8
	if end {
		flags = FlagEndStream
	}
	b = AppendHeader(b, PrefixSize+len(message), TypeData, flags, stream)
	b = append(b, 0)
	b = binary.BigEndian.AppendUint32(b, uint32(len(message)))
	return append(b, message...)
}

// AppendWindowUpdate appends a frame that allows n more bytes.
func AppendWindowUpdate(b []byte, stream uint32, n int) []byte {
	b = AppendHeader(b, windowUpdateSize, TypeWindowUpdate, 0, stream)
	return binary.BigEndian.AppendUint32(b, uint32(n))
}

// AppendReset appends a frame that ends a stream.
func AppendReset(b []byte, stream uint32, code Code) []byte {
	b = AppendHeader(b, 4, TypeReset, 0, stream)
	return binary.BigEndian.AppendUint32(b, uint32(code))
}

// AppendPing appends a ping, or the answer to one.
func AppendPing(b []byte, ack bool, data [pingSize]byte) []byte {
	var flags uint8
	if ack {
		flags = FlagAck
	}
	b = AppendHeader(b, pingSize, TypePing, flags, 0)
	return append(b, data[:]...)
}

// AppendGoAway appends the end of a connection, on which streams up to last
// were served.
func AppendGoAway(b []byte, last uint32, code Code, text string) []byte {
	b = AppendHeader(b, 8+len(text), TypeGoAway, 0, 0)
	b = binary.BigEndian.AppendUint32(b, last)
	b = binary.BigEndian.AppendUint32(b, uint32(code))
	return append(b, text...)
}

// Settings are one end's limits; a field that is nil is not said.
type Settings struct {
	TableSize  *uint32 // of header compression
	MaxStreams *uint32
	Window     *uint32 // of new streams
	MaxHeaders *uint32
	NoPush     bool
}

// AppendSettings appends the settings.
func AppendSettings(b []byte, s Settings) []byte {
	var room [5 * settingSize]byte
	p := room[:0]
	add := func(id uint16, v *uint32) {
		if v != nil {
			p = binary.BigEndian.AppendUint16(p, id)
			p = binary.BigEndian.AppendUint32(p, *v)
		}
	}
	add(settingTableSize, s.TableSize)
	if s.NoPush {
		add(settingPush, new(uint32))
	}
	add(settingMaxStreams, s.MaxStreams)
	add(settingWindow, s.Window)
	add(settingMaxHeaders, s.MaxHeaders)
	return append(AppendHeader(b, len(p), TypeSettings, 0, 0), p...)
}

// AppendSettingsAck appends the answer to settings.
func AppendSettingsAck(b []byte) []byte { return AppendHeader(b, 0, TypeSettings, FlagAck, 0) }

// ParseSettings returns the other end's settings of which we take note.
func ParseSettings(f Frame) (s Settings, err error) {
	if f.Stream != 0 || len(f.Payload)%settingSize != 0 || f.Has(FlagAck) && len(f.Payload) != 0 {
		return s, Broken(FrameSizeError, "settings that don't fit: %d bytes on stream %d", len(f.Payload), f.Stream)
	}
	for p := f.Payload; len(p) > 0; p = p[settingSize:] {
		v := binary.BigEndian.Uint32(p[2:])
		switch binary.BigEndian.Uint16(p) {
		case settingTableSize:
			s.TableSize = &v
		case settingMaxStreams:
			s.MaxStreams = &v
		case settingWindow:
			if v > MaxWindow {
				return s, Broken(FlowControlError, "initial window of %d bytes", v)
			}
			s.Window = &v
		case settingMaxPayload:
			if v < MaxPayload {
				return s, Broken(ProtocolError, "largest frame of %d bytes", v)
			}
		}
	}
	return s, nil
}

// Increment returns how many bytes a WINDOW_UPDATE allows.
func Increment(f Frame) (int64, error) {
	if len(f.Payload) != windowUpdateSize {
		return 0, Broken(FrameSizeError, "window update of %d bytes", len(f.Payload))
	}
	n := binary.BigEndian.Uint32(f.Payload) & MaxWindow
	if n == 0 {
		return 0, Broken(ProtocolError, "window update by nothing")
	}
	return int64(n), nil
}

// Ping returns the data of a ping.
func Ping(f Frame) (data [pingSize]byte, err error) {
	if len(f.Payload) != pingSize || f.Stream != 0 {
		return data, Broken(FrameSizeError, "ping of %d bytes on stream %d", len(f.Payload), f.Stream)
	}
	return [pingSize]byte(f.Payload), nil
}

// ResetCode returns the code of a RST_STREAM.
func ResetCode(f Frame) (Code, error) {
	if len(f.Payload) != 4 {
		return 0, Broken(FrameSizeError, "reset of %d bytes", len(f.Payload))
	}
	return Code(binary.BigEndian.Uint32(f.Payload)), nil
}

// Content returns the payload of a DATA or HEADERS frame without padding and
// priority.
func Content(f Frame) ([]byte, error) {
	p, pad := f.Payload, 0
	if f.Has(FlagPadded) {
		if len(p) < 1 {
			return nil, Broken(FrameSizeError, "padding without a length")
		}
		p, pad = p[1:], int(p[0])
	}
	if f.Type == TypeHeaders && f.Has(FlagPriority) {
		if len(p) < priorityFieldSize {
			return nil, Broken(FrameSizeError, "priority is cut short")
		}
		p = p[priorityFieldSize:]
	}
	if pad > len(p) {
		return nil, Broken(ProtocolError, "%d bytes of padding in %d", pad, len(p))
	}
	return p[:len(p)-pad], nil
}
