package wan

import "golang.org/x/sys/unix"

func setReceiveBuffer(fd, bytes int) error {
	return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, bytes)
}
