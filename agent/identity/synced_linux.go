package identity

import "golang.org/x/sys/unix"

// What the kernel says of its clock while nobody keeps it right (adjtimex(2)).
const (
	statusUnsynced = 0x40 // STA_UNSYNC
	stateError     = 5    // TIME_ERROR
)

// synced returns whether something, such as ntpd, keeps the kernel's clock
// right and says so.
func synced() bool {
	var t unix.Timex
	state, err := unix.Adjtimex(&t)
	return err == nil && state != stateError && t.Status&statusUnsynced == 0
}
