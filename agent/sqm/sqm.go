// Package sqm reads /etc/config/sqm, the configuration of OpenWrt's
// sqm-scripts, and says what of it cakefleet would do. It only reads text.
package sqm

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/cakefleet/cakefleet/engine"
	"github.com/cakefleet/cakefleet/internal/plan"
)

// Queue is what sqm-scripts does on one interface.
type Queue struct {
	Section   string // its name in the file; empty if it has none
	Line      int    // where it begins
	Interface string
	Enabled   bool
	Link      plan.Link
	Notes     []string // what is not carried over, or not exactly, each with its line
}

// Parse reads a configuration. An error names the line; what makes sense but
// can't be carried over is in Notes.
func Parse(text string) ([]Queue, error) {
	sections, err := parseUCI(strings.TrimPrefix(text, "\ufeff")) // what some editors put in front
	if err != nil {
		return nil, err
	}
	var all []Queue
	for i := range sections {
		s := &sections[i]
		if s.typ != "queue" {
			continue
		}
		q, err := convert(s)
		if err != nil {
			return nil, err
		}
		for _, o := range all {
			if o.Interface == q.Interface && o.Enabled && q.Enabled {
				return nil, fmt.Errorf("line %d: interface %s has a queue already, in line %d", q.Line, q.Interface, o.Line)
			}
		}
		all = append(all, q)
	}
	if len(all) == 0 {
		return nil, errors.New("there is no queue in it: a queue begins with a line such as config queue 'eth1', as in /etc/config/sqm")
	}
	return all, nil
}

// reader converts one section.
type reader struct {
	s     *section
	q     Queue
	known map[string]bool
	notes []note
	err   error
}

type note struct {
	line int
	text string
}

func convert(s *section) (Queue, error) {
	r := &reader{s: s, q: Queue{Section: s.name, Line: s.line}, known: map[string]bool{}}
	r.convert()
	if r.err != nil {
		return Queue{}, r.err
	}
	for _, o := range s.options {
		if !r.known[o.name] || o.list {
			r.note(o.line, "%s %q has no counterpart", o.name, o.value)
		}
	}
	slices.SortStableFunc(r.notes, func(a, b note) int { return a.line - b.line })
	for _, n := range r.notes {
		r.q.Notes = append(r.q.Notes, fmt.Sprintf("line %d: %s", n.line, n.text))
	}
	return r.q, nil
}

func (r *reader) convert() {
	r.q.Enabled = r.flag("enabled", false)
	r.q.Interface = r.text("interface", r.s.name)
	if r.q.Interface == "" {
		r.fail("interface", "the queue has no interface")
		return
	}
	down, up := r.rate("download"), r.rate("upload")
	script := strings.TrimSuffix(r.text("script", "simple.qos"), ".qos")
	qdisc := r.text("qdisc", "fq_codel")
	wash := r.flag("squash_dscp", true)
	ignore := r.flag("squash_ingress", true)
	tins := r.script(script, qdisc, ignore)
	layer := r.linkLayer()

	// As the scripts put it together: what comes later wins.
	downWords := "bandwidth " + down + layer + tins[0]
	if wash {
		downWords += " wash"
	}
	upWords := "bandwidth " + up + layer + tins[1]
	cake := runsCake(script) || qdisc == "cake" && !ownScript(script)
	r.q.Link.Down = r.words(downWords, "iqdisc_opts", cake)
	r.q.Link.Up = r.words(upWords, "eqdisc_opts", cake)
	if r.err == nil {
		if err := r.q.Link.Validate(); err != nil {
			r.fail("interface", "%v", err)
		}
	}
	r.others()
}

// ownScript reports whether a script comes with sqm-scripts.
func ownScript(script string) bool {
	return runsCake(script) || script == "simple" || script == "simplest" || script == "simplest_tbf"
}

func runsCake(script string) bool { return script == "layer_cake" || script == "piece_of_cake" }

// script returns the words that the script of that name gives cake for
// download and upload, and notes what it does beyond.
func (r *reader) script(script, qdisc string, ignore bool) [2]string {
	const threeTins = " diffserv3 nat"
	tins := [2]string{threeTins, threeTins}
	line := r.line("script")
	switch script {
	case "layer_cake":
		if ignore {
			tins[0] += " besteffort"
		}
	case "piece_of_cake":
		tins = [2]string{" besteffort nat", " besteffort nat"}
		r.note(line, "some versions of piece_of_cake.qos leave out nat on upload; here it is on in both directions")
	case "simple":
		if ignore {
			tins[0] += " besteffort"
		}
		r.note(line, "simple.qos is HTB with %s in three classes; it becomes cake with diffserv3", qdisc)
	case "simplest", "simplest_tbf":
		tins = [2]string{" besteffort nat", " besteffort nat"}
		r.note(line, "%s.qos is a shaper with one %s; it becomes cake with besteffort", script, qdisc)
	default:
		if ignore {
			tins[0] += " besteffort"
		}
		r.note(line, "script %q is not one of sqm-scripts' own; what it does is not known, cake with diffserv3 takes its place", script)
	}
	if runsCake(script) && qdisc != "cake" {
		r.note(r.line("qdisc"), "qdisc %q: %s.qos runs cake whatever is said here", qdisc, script)
	}
	return tins
}

// linkLayer returns the words for what a packet takes on the line.
func (r *reader) linkLayer() string {
	layer := r.text("linklayer", "none")
	how := r.text("linklayer_adaptation_mechanism", "default")
	overhead := r.number("overhead", 0, -64, 256)
	mpu := r.number("tcMPU", 0, 0, 256)
	words := fmt.Sprintf(" overhead %d mpu %d", overhead, mpu)
	switch layer {
	case "none":
		if overhead != 0 || mpu != 0 {
			r.note(r.line("overhead"), "overhead %d mpu %d: without effect there, because linklayer is none; left out", overhead, mpu)
		}
		return ""
	case "atm", "adsl":
		words = " atm" + words
	case "ethernet":
	default:
		r.fail("linklayer", "linklayer %q: allowed are none, ethernet, atm and adsl", layer)
	}
	if how != "default" && how != "cake" {
		r.note(r.line("linklayer_adaptation_mechanism"), "linklayer_adaptation_mechanism %q: cake's own accounting takes its place", how)
	}
	return words
}

// words adds the options that the user gives cake himself, and reads all.
func (r *reader) words(words, name string, cake bool) engine.Config {
	own := r.text(name, "")
	if own != "" && !cake {
		r.note(r.line(name), "%s %q are not options of cake; left out", name, own)
		own = ""
	}
	if strings.HasPrefix(words, "bandwidth unlimited") {
		return engine.DefaultConfig() // left alone, whatever else is said
	}
	c, err := engine.ParseKeywords(engine.DefaultConfig(), words+" "+own)
	if err != nil && own != "" {
		if _, alone := engine.ParseKeywords(engine.DefaultConfig(), own); alone != nil {
			err = alone // it counts words from the first of these
		}
		why, _, _ := strings.Cut(err.Error(), " allowed are: ") // all words that there are
		r.note(r.line(name), "%s %q: %s; left out", name, own, strings.TrimRight(why, ","))
		c, err = engine.ParseKeywords(engine.DefaultConfig(), words)
	}
	if err != nil {
		r.fail(name, "%v", err)
	}
	return c
}

// others takes note of what cake does by itself.
func (r *reader) others() {
	for _, name := range []string{"ingress_ecn", "egress_ecn"} {
		if v := r.text(name, "ECN"); strings.EqualFold(v, "NOECN") {
			r.note(r.line(name), "%s %s: cake marks packets that allow it, always", name, v)
		}
	}
	for _, name := range []string{"ilimit", "elimit"} {
		if v := r.text(name, ""); v != "" {
			r.note(r.line(name), "%s %s packets: cake limits memory by the rate", name, v)
		}
	}
	for _, name := range []string{"itarget", "etarget"} {
		if v := r.text(name, "auto"); v != "auto" && v != "" {
			r.note(r.line(name), "%s %s: cake's target follows its rtt; say rtt in the options", name, v)
		}
	}
	// Without effect on cake, or on what the user interface shows only.
	for _, name := range []string{
		"qdisc_advanced", "qdisc_really_really_advanced", "linklayer_advanced", "debug_logging", "verbosity",
		"tcMTU", "tcTSIZE", "shaper_burst", "shaper_burst_dur", "ishaper_burst_dur_us", "eshaper_burst_dur_us", "use_mq",
	} {
		r.known[name] = true
	}
}

// text returns an option, or def if it is not there.
func (r *reader) text(name, def string) string {
	r.known[name] = true
	if v, ok := r.s.get(name); ok {
		return strings.TrimSpace(v)
	}
	return def
}

// flag returns an option that is 0 or 1, in any of UCI's words.
func (r *reader) flag(name string, def bool) bool {
	switch v := r.text(name, ""); v {
	case "":
		return def
	case "1", "on", "true", "yes", "enabled":
		return true
	case "0", "off", "false", "no", "disabled":
		return false
	default:
		r.fail(name, "%s %q: must be 0 or 1", name, v)
		return def
	}
}

func (r *reader) number(name string, def, least, most int) int {
	v := r.text(name, "")
	if v == "" {
		return def
	}
	n, err := strconv.Atoi(v)
	if err != nil || n < least || n > most {
		r.fail(name, "%s %q: must be %d to %d", name, v, least, most)
		return def
	}
	return n
}

// rate returns what follows the word bandwidth. 0 kbit/s leaves the direction
// alone, and so does unlimited here.
func (r *reader) rate(name string) string {
	v := r.text(name, "0")
	if v == "unlimited" {
		r.note(r.line(name), "%s unlimited: a direction without a rate is left alone", name)
		return v
	}
	n, err := strconv.ParseUint(v, 10, 64)
	if err != nil || n > uint64(plan.MaxRate/1000) {
		r.fail(name, "%s %q: must be kilobits per second, at most %d", name, v, plan.MaxRate/1000)
		return "unlimited"
	}
	if n == 0 {
		return "unlimited"
	}
	return strconv.FormatUint(n, 10) + "kbit"
}

func (r *reader) line(name string) int {
	for i := range r.s.options {
		if r.s.options[i].name == name {
			return r.s.options[i].line
		}
	}
	return r.s.line
}

func (r *reader) note(line int, format string, args ...any) {
	r.notes = append(r.notes, note{line, fmt.Sprintf(format, args...)})
}

// fail keeps the first error.
func (r *reader) fail(name, format string, args ...any) {
	if r.err == nil {
		r.err = fmt.Errorf("line %d: "+format, append([]any{r.line(name)}, args...)...)
	}
}

// AppendText appends the queues for people: what cakefleet would do, the
// command that says so to the controller, and what is lost.
func AppendText(b []byte, queues []Queue) []byte {
	for i := range queues {
		q := &queues[i]
		if i > 0 {
			b = append(b, '\n')
		}
		state := "enabled"
		if !q.Enabled {
			state = "not enabled"
		}
		b = fmt.Appendf(b, "interface %s (%s)\n", q.Interface, state)
		b = fmt.Appendf(b, "  download  %s\n  upload    %s\n", describe(q.Link.Down), describe(q.Link.Up))
		b = fmt.Appendf(b, "  agent:      cakefleet-agent --interface %s ...\n", q.Interface)
		b = fmt.Appendf(b, "  controller: cakefleetctl plan set NAME --down %s --down-options '%s' --up %s --up-options '%s'\n",
			q.Link.Down.Rate, options(q.Link.Down), q.Link.Up.Rate, options(q.Link.Up))
		for _, n := range q.Notes {
			b = fmt.Appendf(b, "  note, %s\n", n)
		}
	}
	return b
}

// describe is a direction in tc's words, if it is shaped.
func describe(c engine.Config) string {
	if c.Rate == 0 {
		return "left alone"
	}
	return c.Keywords()
}

// options are the words without the rate.
func options(c engine.Config) string {
	_, words, _ := strings.Cut(strings.TrimPrefix(c.Keywords(), "bandwidth "), " ")
	return words
}
