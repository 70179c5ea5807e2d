package grpcwire

import (
	"io"
	"net"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Client is the calling end of a connection. One goroutine calls Recv; the rest
// may be called from any.
type Client struct {
	nc        net.Conn
	scheme    string
	authority string
	decoder   *Decoder
	read      []byte // of the latest frame
	credit    int    // bytes received since the last window update
	messages  map[uint32]*Messages
	pending   []Event

	mu      sync.Mutex
	next    uint32           // id of the next stream; guarded by mu
	window  int64            // that the other end allows on the connection; guarded by mu
	initial int64            // of new streams; guarded by mu
	windows map[uint32]int64 // of streams; guarded by mu
	out     []byte           // scratch; guarded by mu
}

// Event is what happened on a stream: a message, or its end. Message is valid
// until the next Recv.
type Event struct {
	Stream  uint32
	Message []byte
	End     error // io.EOF: with success; nil: it goes on
}

// creditAt is after how many bytes the other end is allowed as many more.
const creditAt = InitialWindow / 2

// maxMessage is the largest message that a client takes, bytes.
const maxMessage = 4 << 20

// NewClient begins a connection. The caller closes nc.
func NewClient(nc net.Conn, scheme, authority string) (*Client, error) {
	c := &Client{
		nc: nc, scheme: scheme, authority: authority, decoder: NewDecoder(), messages: map[uint32]*Messages{},
		next: 1, window: InitialWindow, initial: InitialWindow, windows: map[uint32]int64{},
	}
	none := uint32(0)
	b := append([]byte(nil), Preface...)
	_, err := nc.Write(AppendSettings(b, Settings{TableSize: &none, NoPush: true}))
	return c, err
}

// Open begins a call.
func (c *Client) Open(path string) (stream uint32, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	stream = c.next
	c.next += 2
	c.windows[stream] = c.initial
	c.out = AppendHeaders(c.out[:0], stream, RequestBlock(c.scheme, c.authority, path), false)
	return stream, c.flushLocked()
}

// Send sends a message; the last one if end. It is ErrBlocked if the other end
// does not read, and nothing is sent then.
func (c *Client) Send(stream uint32, message []byte, end bool) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := int64(PrefixSize + len(message))
	window, ok := c.windows[stream]
	switch {
	case !ok:
		return io.EOF
	case n > MaxPayload:
		return status.Errorf(codes.ResourceExhausted, "message of %d bytes", len(message))
	case n > min(c.window, window):
		return ErrBlocked
	}
	c.window -= n
	c.windows[stream] = window - n
	c.out = AppendData(c.out[:0], stream, message, end)
	return c.flushLocked()
}

// Cancel ends a call.
func (c *Client) Cancel(stream uint32) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.windows, stream)
	c.out = AppendReset(c.out[:0], stream, Cancel)
	return c.flushLocked()
}

// flushLocked writes what is in out, and doesn't keep a large buffer.
func (c *Client) flushLocked() error {
	_, err := c.nc.Write(c.out)
	if cap(c.out) > 1<<10 {
		c.out = nil
	}
	return err
}

func (c *Client) write(b []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, err := c.nc.Write(b)
	return err
}

// Recv returns the next event. An error is the end of the connection.
func (c *Client) Recv() (Event, error) {
	for {
		if len(c.pending) > 0 {
			e := c.pending[0]
			c.pending = c.pending[1:]
			return e, nil
		}
		f, err := c.frame()
		if err == nil {
			err = c.take(f)
		}
		if err != nil {
			return Event{}, err
		}
	}
}

// frame reads one frame.
func (c *Client) frame() (Frame, error) {
	if cap(c.read) < HeaderSize {
		c.read = make([]byte, 256)
	}
	head := c.read[:HeaderSize]
	if _, err := io.ReadFull(c.nc, head); err != nil {
		return Frame{}, err
	}
	f, size := ParseHeader([HeaderSize]byte(head))
	if size > MaxPayload {
		return Frame{}, Broken(FrameSizeError, "frame of %d bytes", size)
	}
	if cap(c.read) < size {
		c.read = make([]byte, size)
	}
	f.Payload = c.read[:size]
	_, err := io.ReadFull(c.nc, f.Payload)
	return f, err
}

func (c *Client) take(f Frame) error {
	switch f.Type {
	case TypeSettings:
		return c.settings(f)
	case TypePing:
		data, err := Ping(f)
		if err != nil || f.Has(FlagAck) {
			return err
		}
		return c.write(AppendPing(nil, true, data))
	case TypeWindowUpdate:
		n, err := Increment(f)
		if err != nil {
			return err
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		if f.Stream == 0 {
			c.window += n
		} else if w, ok := c.windows[f.Stream]; ok {
			c.windows[f.Stream] = w + n
		}
		return nil
	case TypeData:
		return c.data(f)
	case TypeHeaders:
		return c.headers(f)
	case TypeReset:
		code, err := ResetCode(f)
		if err != nil {
			return err
		}
		c.ended(f.Stream, status.Errorf(codes.Unavailable, "the other end broke the stream off: %#x", uint32(code)))
		return nil
	default: // GOAWAY too: the streams that there are go on
		return nil
	}
}

func (c *Client) settings(f Frame) error {
	s, err := ParseSettings(f)
	if err != nil || f.Has(FlagAck) {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if s.Window != nil {
		for id := range c.windows {
			c.windows[id] += int64(*s.Window) - c.initial
		}
		c.initial = int64(*s.Window)
	}
	_, err = c.nc.Write(AppendSettingsAck(nil))
	return err
}

func (c *Client) data(f Frame) error {
	p, err := Content(f)
	if err != nil {
		return err
	}
	m := c.messages[f.Stream]
	if m == nil {
		m = &Messages{}
		c.messages[f.Stream] = m
	}
	err = m.Take(p, maxMessage, func(message []byte) error {
		// One that is followed by others in its frame outlives the frame's
		// buffer no longer than the event it is in.
		c.pending = append(c.pending, Event{Stream: f.Stream, Message: message})
		return nil
	})
	if err != nil {
		return err
	}
	if c.credit += len(f.Payload); c.credit >= creditAt {
		b := AppendWindowUpdate(nil, 0, c.credit)
		if !f.Has(FlagEndStream) {
			// More than this stream took if there are several: a window that is
			// too large is no harm here.
			b = AppendWindowUpdate(b, f.Stream, c.credit)
		}
		c.credit = 0
		if err := c.write(b); err != nil {
			return err
		}
	}
	if f.Has(FlagEndStream) {
		c.ended(f.Stream, status.Error(codes.Internal, "the answer ended without a status"))
	}
	return nil
}

func (c *Client) headers(f Frame) error {
	if !f.Has(FlagEndHeaders) {
		return Broken(EnhanceYourCalm, "a header block in several frames")
	}
	block, err := Content(f)
	if err != nil {
		return err
	}
	h, err := c.decoder.Decode(block)
	if err != nil {
		return err
	}
	if f.Has(FlagEndStream) {
		c.ended(f.Stream, h.Err())
	}
	return nil
}

func (c *Client) ended(stream uint32, why error) {
	c.mu.Lock()
	_, open := c.windows[stream]
	delete(c.windows, stream)
	c.mu.Unlock()
	delete(c.messages, stream)
	if open {
		c.pending = append(c.pending, Event{Stream: stream, End: why})
	}
}
