package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"

	labkernel "github.com/cakefleet/cakefleet/deploy/lab/kernel"
)

// kernel is what a machine boots, and what goes with it.
type kernel struct {
	name    string
	arch    arch
	image   string
	modules string // a tree with them; empty: all is built in
	root    string // where the machine's programs are from; empty: there are none for it
}

// arch is a kind of machine.
type arch struct {
	program, pkg string // QEMU's, and the Debian package that it is in
	env          []string
	emulated     bool // on every computer
}

var (
	x86  = arch{"qemu-system-x86_64", "qemu-system-x86", []string{"GOOS=linux", "GOARCH=amd64", "CGO_ENABLED=0"}, false}
	mips = arch{"qemu-system-mips", "qemu-system-mips", []string{"GOOS=linux", "GOARCH=mips", "GOMIPS=softfloat", "CGO_ENABLED=0"}, true}
)

// toolsEnv names a folder with a program tc in bin for the lab's machine. Debian
// has none, and tests that compare with it do without.
const toolsEnv = "CAKEFLEET_LAB_TOOLS"

// findKernel finds a kernel, or has apt download it into a folder of the cache.
// Nothing is installed.
func findKernel(ctx context.Context, name, cache string) (k kernel, err error) {
	switch name {
	case "debian":
		k, err = debianKernel(ctx, apt{}, filepath.Join(cache, name), "/")
	case "sid":
		dir := filepath.Join(cache, name)
		var a apt
		if a, err = newApt(dir, name); err == nil {
			k, err = debianKernel(ctx, a, dir, "")
		}
	case "mips":
		k = kernel{arch: mips, root: os.Getenv(toolsEnv)}
		k.image, err = labkernel.Find(os.Getenv(labkernel.Env), "out/lab")
	default:
		err = errors.New("there is none of this name, only debian, sid and mips")
	}
	if err == nil {
		_, err = exec.LookPath(k.arch.program)
		if err != nil {
			err = fmt.Errorf("%s is missing: apt-get install %s", k.arch.program, k.arch.pkg)
		}
	}
	k.name = name
	return k, err
}

// debianKernel returns the newest kernel that apt knows of. The machine's
// programs are from root, or with none from the same archive.
func debianKernel(ctx context.Context, a apt, dir, root string) (kernel, error) {
	if runtime.GOARCH != "amd64" {
		return kernel{}, fmt.Errorf("it is for amd64, not %s", runtime.GOARCH)
	}
	k := kernel{arch: x86, root: root}
	image, err := a.fetch(ctx, dir, "linux-image-amd64", `^linux-(image|binary|modules)-`, wanted)
	if err != nil {
		return kernel{}, err
	}
	k.modules = image
	var images []string
	for _, place := range []string{"boot/vmlinuz-*", "usr/lib/modules/*/vmlinuz"} { // the first until trixie
		found, _ := filepath.Glob(filepath.Join(image, place)) // the patterns are good
		images = append(images, found...)
	}
	if len(images) != 1 {
		return kernel{}, fmt.Errorf("%s has %d images, want one", image, len(images))
	}
	k.image = images[0]
	if k.root == "" {
		k.root, err = a.fetch(ctx, dir, "iproute2", `^(lib|zlib)`, func(string) bool { return true })
	}
	return k, err
}

// moduleDirs are where the modules are, below "kernel", that tests may need;
// those that these need come with them.
var moduleDirs = []string{
	"crypto/", "drivers/char/virtio_console.", "drivers/net/dummy.", "drivers/net/ifb.", "drivers/net/ppp/", "drivers/net/slip/",
	"drivers/net/tun.", "drivers/net/veth.", "drivers/virtio/", "lib/", "net/802/", "net/8021q/", "net/bridge/", "net/core/",
	"net/ipv4/", "net/ipv6/", "net/llc/", "net/netfilter/", "net/netlink/", "net/sched/",
}

// wanted reports whether a file of a kernel's packages is needed.
func wanted(name string) bool {
	if strings.HasPrefix(name, "boot/vmlinuz-") || strings.HasPrefix(name, "usr/lib/modules/") && strings.HasSuffix(name, "/vmlinuz") {
		return true
	}
	_, below, ok := strings.Cut(name, "/kernel/")
	if !ok || !strings.Contains(name, "lib/modules/") {
		return false
	}
	for _, dir := range moduleDirs {
		if strings.HasPrefix(below, dir) {
			return true
		}
	}
	return false
}
