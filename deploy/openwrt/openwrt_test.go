// Package openwrt has the files of the OpenWrt package; its test runs the
// service script in a shell, with what procd and UCI would answer.
package openwrt

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// stubs stand for /lib/functions.sh and procd. Options are variables.
const stubs = `
config_load() { :; }
config_get() { eval "$1=\$opt_$3"; }
config_get_bool() { eval "$1=\${opt_$3:-$4}"; }
procd_open_instance() { echo open; }
procd_close_instance() { echo close; }
procd_set_param() { echo "$@"; }
procd_send_signal() { echo signal "$@"; }
running() { [ -n "$is_running" ]; }
stop() { echo stop; }
start() { echo start; }
`

func run(t *testing.T, options, call string) (out, conf string) {
	t.Helper()
	dir := t.TempDir()
	script := filepath.Join("cakefleet-agent", "files", "cakefleet-agent.init")
	cmd := exec.Command("sh", "-eu", "-c", stubs+"is_running=; for o in controller interface token ca_pin serial dataplane max_rate probe probe_interval log_level; do eval opt_$o=; done\n"+options+"\n. ./"+script+"\n"+call)
	path := filepath.Join(dir, "etc", "agent.conf")
	cmd.Env = append(os.Environ(), "CAKEFLEET_STATE="+filepath.Join(dir, "state"), "CAKEFLEET_CONF="+path)
	b, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, b)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return string(b), ""
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the configuration with the token has mode %v (%v)", info.Mode(), err)
	}
	return string(b), strings.ReplaceAll(string(text), dir, "DIR")
}

func TestService(t *testing.T) {
	if out, conf := run(t, "opt_controller=c:1", "start_service"); out != "" || conf != "" {
		t.Errorf("it is not enabled: %s%s", out, conf)
	}
	const options = "opt_enabled=1 opt_takeover=1 opt_controller=isp.example:8443 opt_interface=pppoe-wan opt_token=cf1.a.b.c opt_max_rate=300mbit opt_ca_pin=PIN opt_serial=SN1 opt_probe=2001:db8::1 opt_probe_interval=30s"
	out, conf := run(t, options, "start_service")
	want := "state-dir DIR/state\ncontroller isp.example:8443\ninterface pppoe-wan\ntoken cf1.a.b.c\nca-pin PIN\nserial SN1\nmax-rate 300mbit\nprobe 2001:db8::1\nprobe-interval 30s\ntakeover\n"
	if conf != want {
		t.Errorf("configuration is\n%swant\n%s", conf, want)
	}
	for _, line := range []string{"open\ncommand /usr/sbin/cakefleet-agent --config ", "respawn 3600 5 0\n", "close\n"} {
		if !strings.Contains(out, line) {
			t.Errorf("%q is not in\n%s", line, out)
		}
	}
	if out, conf := run(t, options+" is_running=1", "reload_service"); !strings.HasPrefix(out, "signal cakefleet-agent * HUP") || conf != want {
		t.Errorf("reload: %s%s", out, conf)
	}
	if out, _ := run(t, options, "reload_service"); out != "stop\nstart\n" {
		t.Errorf("reload of what does not run: %s", out)
	}
}

// What identifies the router and what it ran last must outlive an upgrade of
// the firmware.
func TestFleet078_KeptByUpgrades(t *testing.T) {
	b, err := os.ReadFile("cakefleet-agent/files/cakefleet-agent.keep")
	if err != nil || strings.TrimSpace(string(b)) != "/etc/cakefleet/" {
		t.Errorf("kept is %q (%v)", b, err)
	}
	makefile, err := os.ReadFile("cakefleet-agent/Makefile")
	if err != nil || !strings.Contains(string(makefile), "./files/cakefleet-agent.keep $(1)/lib/upgrade/keep.d/cakefleet-agent") {
		t.Errorf("the package does not install what is kept (%v):\n%s", err, makefile)
	}
}

// All of the identity is in the folder that upgrades keep, on either image of
// a router that has two; nothing of it is where a reset leaves it.
func TestFleet042_IdentityIsInTheKeptFolder(t *testing.T) {
	_, conf := run(t, "opt_enabled=1 opt_controller=c:1 opt_interface=wan", "start_service")
	if !strings.HasPrefix(conf, "state-dir DIR/state\n") {
		t.Errorf("the state is elsewhere:\n%s", conf)
	}
	script, err := os.ReadFile("cakefleet-agent/files/cakefleet-agent.init")
	if err != nil || !strings.Contains(string(script), "\nSTATE=${CAKEFLEET_STATE:-/etc/cakefleet}\n") {
		t.Errorf("the state is not in /etc/cakefleet, which is kept (%v)", err)
	}
}
