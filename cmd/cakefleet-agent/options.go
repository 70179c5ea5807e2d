package main

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/cakefleet/cakefleet/engine"
)

// maxIfaceName is IFNAMSIZ without the zero at its end.
const maxIfaceName = 15

// options are what the command line and the configuration file say.
type options struct {
	controller, iface       string
	stateDir, runDir        string
	token, tokenFile, caPin string
	serialNumber            string
	printKey                bool
	routerModel, dataplane  string
	maxRate                 engine.BitsPerSecond
	logLevel                string
	logJSON, version        bool
	takeover                bool
	probe                   string
	probeInterval           time.Duration
	importSQM               string
}

// help comes before the flags.
const help = `cakefleet-agent shapes a router's WAN link with CAKE as its controller desires,
and goes on without one. It needs root, and joins its fleet once, with a token:

  cakefleet-agent --controller isp.example:8443 --interface pppoe-wan --token TOKEN

SIGHUP reads the configuration file again; SIGTERM takes everything away. Flags:
`

// parseOptions reads the command line and the file that --config names. What
// the command line says wins.
func parseOptions(args []string, out io.Writer) (options, error) {
	var o options
	var config string
	f := flag.NewFlagSet("cakefleet-agent", flag.ContinueOnError)
	f.SetOutput(io.Discard) // one thing is wrong, and all flags would hide it
	f.Usage = func() {}
	f.StringVar(&config, "config", "", "`file` with lines \"name value\" for any of these flags; # begins a comment")
	f.StringVar(&o.controller, "controller", "", "`host:port` of the controller (port 8443 if left out)")
	f.StringVar(&o.iface, "interface", "", "WAN `interface` to shape, such as eth0 or pppoe-wan")
	f.StringVar(&o.stateDir, "state-dir", "/etc/cakefleet", "`directory` on flash for identity and last known good state")
	f.StringVar(&o.runDir, "run-dir", "/var/run/cakefleet", "`directory` in memory: what the next agent is to know if this one is not stopped; made if it is not there")
	f.StringVar(&o.token, "token", "", "join `token`, needed once, from cakefleetctl token create")
	f.StringVar(&o.tokenFile, "token-file", "", "`file` with the join token")
	f.StringVar(&o.caPin, "ca-pin", "", "`pin` of the fleet's authority, from cakefleetctl router pin: join without a token, an operator approves")
	f.StringVar(&o.serialNumber, "serial", "", "serial `number` to tell when joining (found out if left out)")
	f.BoolVar(&o.printKey, "print-key", false, "print the serial number and the fingerprint of this router's key, made if there is none, and exit")
	f.StringVar(&o.routerModel, "router-model", "", "hardware `model` to report (found out if left out)")
	f.StringVar(&o.dataplane, "dataplane", "auto", "what shapes: kernel (sch_cake), userspace, or auto: kernel where there is sch_cake")
	f.BoolVar(&o.takeover, "takeover", false, "replace a qdisc that somebody else has put on the interface, until the agent stops")
	f.Func("max-rate", "highest `rate` that this router can shape, such as 300mbit; higher ones are refused", func(s string) (err error) {
		o.maxRate, err = engine.ParseRate(s)
		return err
	})
	f.StringVar(&o.probe, "probe", "", "`host` to measure the delay to, idle and under load, whatever the controller says; off: none (default as the controller says)")
	f.DurationVar(&o.probeInterval, "probe-interval", 10*time.Second, "`time` between two echoes to the host of --probe, 1s to 1h")
	f.StringVar(&o.importSQM, "import-sqm", "", "print what the `file` of sqm-scripts, /etc/config/sqm, becomes here, and exit")
	f.StringVar(&o.logLevel, "log-level", "info", "trace, debug, info, warn or error")
	f.BoolVar(&o.logJSON, "log-json", false, "log JSON")
	f.BoolVar(&o.version, "version", false, "print the version and exit")
	if err := f.Parse(args); errors.Is(err, flag.ErrHelp) {
		fmt.Fprint(out, help)
		f.SetOutput(out)
		f.PrintDefaults()
		return o, err
	} else if err != nil {
		return o, fmt.Errorf("%w; see cakefleet-agent --help", err)
	}
	if f.NArg() > 0 {
		return o, fmt.Errorf("%q: flags only, each with two dashes", f.Arg(0))
	}
	if config != "" {
		if err := readConfig(f, config); err != nil {
			return o, err
		}
	}
	if o.version || o.importSQM != "" || o.printKey {
		return o, nil
	}
	return o, o.validate()
}

// readConfig sets the flags that the file names and the command line does not.
func readConfig(f *flag.FlagSet, path string) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("configuration: %w", err)
	}
	given := map[string]bool{"config": true}
	f.Visit(func(fl *flag.Flag) { given[fl.Name] = true })
	n := 0
	for line := range strings.Lines(string(text)) {
		n++
		line, _, _ = strings.Cut(line, "#")
		if line = strings.TrimSpace(line); line == "" {
			continue
		}
		name, value, _ := strings.Cut(line, " ")
		value = strings.TrimSpace(value)
		fl := f.Lookup(name)
		if fl == nil || name == "config" {
			return fmt.Errorf("%s line %d: %q is not a setting", path, n, name)
		}
		if b, ok := fl.Value.(interface{ IsBoolFlag() bool }); ok && b.IsBoolFlag() && value == "" {
			value = "true"
		}
		if value == "" {
			return fmt.Errorf("%s line %d: %s needs a value", path, n, name)
		}
		if given[name] {
			continue
		}
		if err := fl.Value.Set(value); err != nil {
			return fmt.Errorf("%s line %d: %s: %w", path, n, name, err)
		}
	}
	return nil
}

func (o *options) validate() error {
	switch {
	case o.controller == "":
		return errors.New("which controller? say --controller HOST:PORT")
	case o.iface == "":
		return errors.New("which WAN interface? say --interface NAME")
	case len(o.iface) > maxIfaceName || strings.ContainsAny(o.iface, "/: \t") || o.iface == "." || o.iface == "..":
		return fmt.Errorf("--interface %q: no interface has such a name: 1 to %d characters, no slash, colon or space; ip link lists them", o.iface, maxIfaceName)
	case o.token != "" && o.tokenFile != "":
		return errors.New("--token and --token-file: give one of them")
	case hclog.LevelFromString(o.logLevel) == hclog.NoLevel:
		return fmt.Errorf("--log-level %q: must be trace, debug, info, warn or error", o.logLevel)
	case o.probeInterval < time.Second || o.probeInterval > time.Hour:
		return fmt.Errorf("--probe-interval %v: must be 1s to 1h", o.probeInterval)
	case !slices.Contains([]string{"auto", "userspace", "kernel"}, o.dataplane):
		return fmt.Errorf("--dataplane %q: must be auto, userspace or kernel", o.dataplane)
	}
	host, port, err := net.SplitHostPort(o.controller)
	if err != nil {
		host, port = strings.Trim(o.controller, "[]"), "8443"
	}
	if host == "" || port == "" {
		return fmt.Errorf("--controller %q: must be HOST:PORT", o.controller)
	}
	o.controller = net.JoinHostPort(host, port)
	return nil
}

// reload reads the options again and returns whether they are others. Ones
// that make no sense change nothing.
func reload(o *options, args []string, log hclog.Logger) bool {
	again, err := parseOptions(args, io.Discard)
	switch {
	case err != nil:
		log.Error("configuration is not taken over", "error", err)
		return false
	case again == *o:
		log.Info("configuration has not changed")
		return false
	}
	log.Info("configuration has changed: starting anew")
	log.SetLevel(hclog.LevelFromString(again.logLevel))
	*o = again
	return true
}

// joinToken returns the join token, read anew so that a file may come later.
func (o options) joinToken() (string, error) {
	if o.tokenFile == "" {
		return o.token, nil
	}
	b, err := os.ReadFile(o.tokenFile)
	if errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("join token: %w", err)
	}
	return strings.TrimSpace(string(b)), err
}

// model returns how the hardware calls itself.
func (o options) model() string {
	return cmp.Or(o.routerModel, firstLine(
		"/tmp/sysinfo/model",                       // OpenWrt
		"/proc/device-tree/model",                  // most boards
		"/sys/devices/virtual/dmi/id/product_name", // PCs
	), "unknown")
}

// serial returns the serial number: the board's, or else the hardware address
// of the first Ethernet port, which is what most routers have on their label.
func (o options) serial() string {
	s := cmp.Or(o.serialNumber, firstLine(
		"/proc/device-tree/serial-number",
		"/sys/devices/virtual/dmi/id/product_serial",
		"/sys/class/net/eth0/address",
	))
	return strings.ToUpper(strings.NewReplacer(":", "", " ", "-", "/", "-", ",", "-").Replace(s))
}

// firstLine returns what the first of the files has that has anything.
func firstLine(paths ...string) string {
	for _, path := range paths {
		if b, err := os.ReadFile(path); err == nil {
			if s := strings.TrimSpace(strings.TrimRight(string(b), "\x00")); s != "" {
				return s
			}
		}
	}
	return ""
}
