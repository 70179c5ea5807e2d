package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// What a router has for the agent, in bytes: see the README on the router's
// budget. Beyond the limit there is no release; the aim is where it should be.
const (
	diskLimit = 12_500_000
	diskAim   = 10_500_000

	// In the firmware's own file system: squashfs with xz and blocks of 256 KiB,
	// as OpenWrt makes it.
	flashLimit = 3_000_000
	flashAim   = 2_500_000
)

// TestFleet076_Budget builds the agent for the smallest router and weighs it.
func TestFleet076_Budget(t *testing.T) {
	dir := t.TempDir()
	if err := run(dir, "budget", agentPackage, true, []string{"mips"}); err != nil {
		t.Fatal(err)
	}
	agent := filepath.Join(dir, "cakefleet-agent-mips")
	weigh(t, "on disk", agent, diskLimit, diskAim)

	mksquashfs, err := exec.LookPath("mksquashfs")
	if err != nil {
		t.Skipf("skipped: the size in flash: %v (squashfs-tools)", err)
	}
	image := filepath.Join(dir, "image")
	out, err := exec.Command(mksquashfs, agent, image, "-comp", "xz", "-b", "256K", "-no-progress", "-processors", "1").CombinedOutput()
	if err != nil {
		t.Fatalf("mksquashfs: %v\n%s", err, out)
	}
	weigh(t, "in flash", image, flashLimit, flashAim)
}

func weigh(t *testing.T, what, path string, limit, aim int64) {
	t.Helper()
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	n := info.Size()
	t.Logf("%s: %d bytes, limit %d, aim %d", what, n, limit, aim)
	if n > limit {
		t.Errorf("%s it takes %d bytes, the limit is %d", what, n, limit)
	}
}
