package nfqueue

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// eventfd returns an eventfd, and functions that make it readable and not.
func eventfd(t *testing.T) (fd int, set, clear func()) {
	t.Helper()
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	return fd, func() {
			if _, err := unix.Write(fd, []byte{0, 0, 0, 1, 0, 0, 0, 0}); err != nil {
				t.Error(err)
			}
		}, func() {
			var b [8]byte
			_, _ = unix.Read(fd, b[:]) // nothing to read is fine too
		}
}

// TestParking wakes a parked goroutine in both ways, many times: a wake-up that
// gets lost between two waits hangs it.
func TestParking(t *testing.T) {
	fd, packet, read := eventfd(t)
	wake, call, answer := eventfd(t)
	var p parking
	if err := p.open(wake); err != nil {
		t.Fatal(err)
	}
	defer p.set.Close()

	const rounds = 2000
	next, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for i := range rounds {
			fds := [2]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}, {Fd: int32(wake), Events: unix.POLLIN}}
			for ready := 0; ready == 0; ready, _ = poll(fds[:], 0, false) {
				if !p.wait(fd) {
					t.Error("the poller can't be used")
					break
				}
			}
			if got := fds[0].Revents != 0; got != (i%2 == 0) {
				t.Errorf("round %d: a packet is there: %v", i, got)
			}
			read()
			answer()
			next <- struct{}{}
		}
	}()
	for i := range rounds {
		if i%10 == 0 { // it is parked by then, most likely; else it is about to be
			time.Sleep(time.Millisecond)
		}
		if i%2 == 0 {
			packet()
		} else {
			call()
		}
		select {
		case <-next:
		case <-time.After(time.Minute):
			t.Fatalf("round %d: nobody wakes", i)
		}
	}
	<-done

	// Not parked, a packet is none of the poller's business.
	packet()
	if n, errno := poll(p.fds[:], 0, false); n != 0 || errno != 0 {
		t.Errorf("the set is ready without a wait: %d, %v", n, errno)
	}
	if n := testing.AllocsPerRun(100, func() { p.wait(fd) }); n != 0 {
		t.Errorf("%v allocations a wait, want none", n)
	}
}
