package ctl

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"sigs.k8s.io/yaml"

	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

func (a *app) rolloutCommand() *cobra.Command {
	command := func(use, short, long string, c pb.RolloutCommand) *cobra.Command {
		return &cobra.Command{
			Use: use + " ID", Short: short, Long: long, Args: exactly("ID"), ValidArgsFunction: a.complete(rolloutIDs),
			RunE: func(cmd *cobra.Command, args []string) error { return a.commandRollout(cmd.Context(), args[0], c) },
		}
	}
	retry := command("retry", "Ask those routers again that refused", "", pb.RolloutCommand_ROLLOUT_COMMAND_RETRY)
	retry.Flags().Bool("failed", true, "ask those that refused; there is nothing else to ask again")
	return group("rollout", "Change many routers in stages, and stop when they feel it",
		a.rolloutStart(), a.rolloutList(), a.rolloutShow(), a.rolloutWatch(), a.rolloutRouters(),
		command("approve", "Let a rollout of somebody else begin", "", pb.RolloutCommand_ROLLOUT_COMMAND_APPROVE),
		command("pause", "Open no more steps", "", pb.RolloutCommand_ROLLOUT_COMMAND_PAUSE),
		command("resume", "Go on: the present wave has its time again, and its gates their data", "", pb.RolloutCommand_ROLLOUT_COMMAND_RESUME),
		command("promote", "Go on behind the present wave, whatever its gates say", "", pb.RolloutCommand_ROLLOUT_COMMAND_PROMOTE),
		command("abort", "End it; who has it keeps it", "", pb.RolloutCommand_ROLLOUT_COMMAND_ABORT),
		command("rollback", "Give all its routers back what they had", "Give all its routers back what they had. The same can't be rolled out again until\nit is edited.", pb.RolloutCommand_ROLLOUT_COMMAND_ROLLBACK),
		retry, a.rolloutHistory())
}

// rolloutFlags are what rollout start says.
type rolloutFlags struct {
	file               string
	plan, to, model    string
	labels, routers    []string
	site               string
	settings           settingFlags
	versions           []string
	waves              string
	soak, answer       time.Duration
	gates, windows     []string
	onFailure          string
	perSite            uint32
	siteLabel          string
	zone, start, note  string
	approval, queue    bool
	minSamples         uint64
	dryRun, ignoreHold bool
}

func (a *app) rolloutStart() *cobra.Command {
	var f rolloutFlags
	c := &cobra.Command{
		Use:   "start [ID] --plan NAME --to REVISION | --down RATE... [--waves 1%,10%,50%,100%] [--soak TIME] [--gate 'METRIC < BOUND']... | -f FILE",
		Short: "Begin to change many routers in stages",
		Long: `Begin to change many routers in stages. The plan itself becomes what it is changed
to in the end; until then, routers of open steps run the new one and all others
the old one, which is what they are compared with.

  cakefleetctl rollout start --plan gold --to 1234 --waves 1%,10%,50%,100% --soak 30m \
    --gate 'p99_sojourn < 1.2x control' --gate 'nack < 1%' --on-failure rollback
  cakefleetctl rollout start --label site=north --set down.ack-filter=ack-filter --per-site 5
  cakefleetctl rollout start -f rollout.yaml --dry-run

A wave is a share or a number of routers, with those before it. Who is in which is
decided by a seed when the rollout is made. A gate compares what changed routers
say or count with a value, with the control group (routers not changed yet) or
with their own past:

  nack, clamp, unanswered, disconnect, flap          shares of routers
  p50_sojourn, p90_, p95_, p99_, p999_sojourn        times in the queue
  drop, mark, utilisation, cpu                       shares

Those of traffic may end in _down or _up. Bounds are values (20ms, 1%), factors
(1.2x control, 2x past) or both (1.2x control + 5ms). A gate that can't be judged
pauses the rollout: nothing goes on without data.

A file has the same in YAML, with the names of the API:

  id: gold-faster
  selector: {plan: gold}
  set: {down.rate: 200mbit}
  waves: [1%, 10%, 50%, 100%]
  soak: 30m
  gates: ["p99_sojourn < 1.2x control", "nack < 1%"]
  on_failure: rollback`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			id := ""
			if len(args) > 0 {
				id = args[0]
			}
			return a.startRollout(c.Context(), c.InOrStdin(), id, &f)
		},
	}
	s := c.Flags()
	s.StringVarP(&f.file, "file", "f", "", "YAML or JSON `file` with the rollout; - is standard input")
	s.StringVar(&f.plan, "plan", "", "change this `plan`")
	s.StringVar(&f.to, "to", "", "make it like this `revision` of its history (see plan history)")
	s.StringArrayVar(&f.labels, "label", nil, "only routers whose subscriber has this label, `name=value`; repeated: all of them")
	s.StringVar(&f.site, "site", "", "only routers of this `site` (the label site)")
	s.StringVar(&f.model, "model", "", "only routers of this hardware `model`")
	s.StringSliceVar(&f.routers, "router", nil, "only these `routers`; may be repeated")
	f.settings.add(s)
	s.StringArrayVar(&f.versions, "setting", nil, "versioned setting, `name=version`; may be repeated. It is kept with the rollout and its steps; agents don't act on it yet")
	s.StringVar(&f.waves, "waves", "1%,10%,50%,100%", "`sizes` of the waves")
	s.DurationVar(&f.soak, "soak", 30*time.Minute, "how `long` each wave is watched before its gates are judged")
	s.DurationVar(&f.answer, "answer-time", 5*time.Minute, "how `long` routers have to answer")
	s.StringArrayVar(&f.gates, "gate", nil, "`condition` for going on; may be repeated")
	s.StringVar(&f.onFailure, "on-failure", "pause", "what is done when a gate fails: pause, rollback or abort")
	s.Uint32Var(&f.perSite, "per-site", 0, "at most this `many` routers of one site at once; 0: any number")
	s.StringVar(&f.siteLabel, "site-label", "", "`label` that names the site, if it is not site")
	s.StringArrayVar(&f.windows, "window", nil, "`days and times` in which steps may be opened, such as 'mon-fri 01:00-05:00'; may be repeated")
	s.StringVar(&f.zone, "zone", "", "time `zone` of windows and start, such as Europe/Berlin")
	s.StringVar(&f.start, "start", "", "not before this `time`, such as '2027-01-01 02:00'")
	s.BoolVar(&f.approval, "approval", false, "another person must approve it")
	s.BoolVar(&f.queue, "queue", false, "wait if another rollout changes the same routers")
	s.StringVar(&f.note, "note", "", "what it is, for `people`")
	s.Uint64Var(&f.minSamples, "min-samples", 0, "`packets` that a figure must be made of; 0: 200")
	s.BoolVar(&f.dryRun, "dry-run", false, "only tell how many routers are meant and what changes")
	s.BoolVar(&f.ignoreHold, "ignore-hold", false, "also if the same was rolled back before")
	must(c.RegisterFlagCompletionFunc("plan", a.completeFlag(planNames)))
	must(c.RegisterFlagCompletionFunc("on-failure", cobra.FixedCompletions([]string{"pause", "rollback", "abort"}, cobra.ShellCompDirectiveNoFileComp)))
	return c
}

// message returns what the flags say. An error is one of the command line.
func (f *rolloutFlags) message(id string) (*pb.Rollout, error) {
	words, err := f.settings.words()
	if err != nil {
		return nil, err
	}
	labels, err := parseLabels(f.labels)
	if err != nil {
		return nil, err
	}
	if f.site != "" {
		name := f.siteLabel
		if name == "" {
			name = "site"
		}
		labels[name] = f.site
	}
	versions := map[string]string{}
	for _, text := range f.versions {
		name, version, ok := strings.Cut(text, "=")
		if !ok {
			return nil, fmt.Errorf("--setting %q: must be NAME=VERSION", text)
		}
		versions[name] = version
	}
	var to int64
	if f.to != "" {
		text := strings.TrimSpace(strings.TrimPrefix(f.to, "rev"))
		if to, err = strconv.ParseInt(text, 10, 64); err != nil || to <= 0 {
			return nil, fmt.Errorf("--to %q: must be a revision of the plan's history, such as 1234", f.to)
		}
	}
	switch {
	case f.plan == "" && len(labels) == 0 && f.model == "" && len(f.routers) == 0:
		return nil, errors.New("say which routers: --plan, --label, --site, --model or --router, or a file with -f")
	case to == 0 && len(words) == 0 && len(versions) == 0:
		return nil, errors.New("say what to change: --to, --down, --up, --set or --setting")
	case to != 0 && len(words) > 0:
		return nil, errors.New("--to and values to set don't go together")
	case to != 0 && f.plan == "":
		return nil, errors.New("--to is a revision of a plan: say --plan")
	case (f.start != "" || len(f.windows) > 0) && f.zone == "":
		return nil, errors.New("say in which time zone: --zone, such as Europe/Berlin")
	}
	return &pb.Rollout{
		Id: id, Selector: &pb.RolloutSelector{Plan: f.plan, Labels: labels, Model: f.model, Routers: f.routers}, Set: words, ToRevision: to, Versions: versions,
		Note: f.note, Waves: strings.Split(f.waves, ","), Soak: durationpb.New(f.soak), AnswerTime: durationpb.New(f.answer), Gates: f.gates,
		MinSamples: f.minSamples, OnFailure: f.onFailure, PerSite: f.perSite, SiteLabel: f.siteLabel, Windows: f.windows, Zone: f.zone, Start: f.start,
		Approval: f.approval, Queued: f.queue,
	}, nil
}

// readRollout reads a file.
func readRollout(stdin io.Reader, path, id string) (*pb.Rollout, error) {
	var text []byte
	var err error
	if path == "-" {
		text, err = io.ReadAll(stdin)
	} else {
		text, err = os.ReadFile(path)
	}
	if err != nil {
		return nil, fmt.Errorf("rollout: %w", err)
	}
	if n := documents(text); n != 1 { // the reader takes the first and says nothing of others
		return nil, fmt.Errorf("%s: must be the fields of one rollout, has %d documents", path, n)
	}
	b, err := yaml.YAMLToJSONStrict(text) // a field that is there twice is a mistake
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	// Times as people write them; the protocol's JSON has seconds only.
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(b, &fields); err != nil || fields == nil { // nil: null
		return nil, fmt.Errorf("%s: must be the fields of one rollout", path)
	}
	for _, name := range []string{"soak", "answer_time"} {
		var text string
		if raw, ok := fields[name]; ok && json.Unmarshal(raw, &text) == nil {
			d, err := time.ParseDuration(text)
			if err != nil {
				return nil, fmt.Errorf("%s: %s %q: must be a time such as 30m", path, name, text)
			}
			fields[name] = []byte(strconv.Quote(strconv.FormatFloat(d.Seconds(), 'f', -1, 64) + "s"))
		}
	}
	for _, name := range []string{"set", "versions"} {
		fields[name] = quoteValues(fields[name])
	}
	m := &pb.Rollout{}
	for _, name := range slices.Sorted(maps.Keys(fields)) { // one by one, to say which is wrong
		if fields[name] == nil {
			continue
		}
		one := &pb.Rollout{}
		if b, err = json.Marshal(map[string]json.RawMessage{name: fields[name]}); err == nil {
			err = protojson.Unmarshal(b, one)
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %s: %s", path, name, positions.ReplaceAllString(err.Error(), ""))
		}
		proto.Merge(m, one)
	}
	if id != "" {
		m.Id = id
	}
	return m, nil
}

// documents counts those of YAML that say anything.
func documents(text []byte) int {
	n := 0
	for _, part := range separator.Split(string(text), -1) {
		if content.MatchString(part) {
			n++
		}
	}
	return n
}

var (
	separator = regexp.MustCompile(`(?m)^---(?:[ \t\r]|$)`)
	// content is a line that is no comment, directive or end of a document.
	content = regexp.MustCompile(`(?m)^[ \t]*(?:[^ \t\r\n#%.]|\.[^.])`)
)

// positions are where an error is in JSON that nobody has seen.
var positions = regexp.MustCompile(`proto:\p{Zs}*(\(line [0-9:]+\):\p{Zs}*)?`)

// quoteValues makes text of the numbers and the like that YAML finds among
// values which the protocol has as text.
func quoteValues(raw json.RawMessage) json.RawMessage {
	var values map[string]json.RawMessage
	if raw == nil || json.Unmarshal(raw, &values) != nil {
		return raw // whoever reads it says what is wrong
	}
	for k, v := range values {
		if !bytes.ContainsAny(v[:1], `"{[n`) {
			values[k] = []byte(strconv.Quote(string(v)))
		}
	}
	b, err := json.Marshal(values)
	if err != nil {
		return raw
	}
	return b
}

func (a *app) startRollout(ctx context.Context, stdin io.Reader, id string, f *rolloutFlags) (err error) {
	var m *pb.Rollout
	if f.file != "" {
		if m, err = readRollout(stdin, f.file, id); err != nil {
			return failure{err}
		}
	} else if m, err = f.message(id); err != nil {
		return err
	}
	conn, err := a.connect()
	if err != nil {
		return err
	}
	resp, err := call(ctx, a, conn.rollouts.StartRollout, &pb.StartRolloutRequest{Rollout: m, ValidateOnly: f.dryRun, IgnoreHold: f.ignoreHold})
	if err != nil {
		return err
	}
	if a.output == "json" {
		return a.printJSON(resp)
	}
	r := resp.GetRollout()
	did := "started"
	if f.dryRun {
		did = "would be started; nothing is stored"
	}
	fmt.Fprintf(a.cfg.Stdout, "rollout %s %s: %s in %s of %s\n", r.GetId(), did, count(resp.GetTargets(), "router"), count(len(r.GetSizes()), "wave"), sizesText(r.GetSizes()))
	for _, c := range resp.GetChanges() {
		fmt.Fprintf(a.cfg.Stdout, "  %s\n", c)
	}
	for _, g := range r.GetGates() {
		fmt.Fprintf(a.cfg.Stdout, "  gate %s, else %s\n", g, r.GetOnFailure())
	}
	if q := resp.GetQueuedBehind(); q != "" {
		fmt.Fprintf(a.cfg.Stdout, "  waits until rollout %s has ended\n", q)
	}
	if r.GetApproval() {
		fmt.Fprintf(a.cfg.Stdout, "  waits until another person says: cakefleetctl rollout approve %s\n", r.GetId())
	}
	if !f.dryRun {
		a.note("see it go: cakefleetctl rollout watch %s", r.GetId())
	}
	return nil
}

func sizesText(sizes []uint32) string {
	var parts []string
	for _, n := range sizes {
		parts = append(parts, u32(n))
	}
	return strings.Join(parts, ", ")
}

func phaseText(r *pb.Rollout) string {
	text := strings.ReplaceAll(strings.ToLower(strings.TrimPrefix(r.GetPhase().String(), "ROLLOUT_PHASE_")), "_", " ")
	if r.GetPhase() == pb.RolloutPhase_ROLLOUT_PHASE_APPROVING {
		text = "waits for approval"
	}
	return text
}

func ended(r *pb.Rollout) bool { return r.GetPhase() >= pb.RolloutPhase_ROLLOUT_PHASE_COMPLETED }

func waveText(r *pb.Rollout) string { return fmt.Sprintf("%d of %d", r.GetWave(), len(r.GetSizes())) }

// reachedText is waveText, but for a rollout that was taken back how far it came.
func reachedText(r *pb.Rollout) string {
	return fmt.Sprintf("%d of %d", max(r.GetWave(), r.GetReachedWave()), len(r.GetSizes()))
}

func (a *app) rolloutList() *cobra.Command {
	return &cobra.Command{
		Use:   "list",
		Short: "Show the rollouts that have not ended",
		Args:  noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return a.listRollouts(c.Context(), true, "no rollout goes on: see cakefleetctl rollout history, or start one")
		},
	}
}

func (a *app) rolloutHistory() *cobra.Command {
	return &cobra.Command{
		Use:   "history [ID]",
		Short: "Show all rollouts, or what the gates of one said",
		Long: `Show all rollouts, or what the gates of one said, with the figures that made each
verdict. One that has ended is kept for a year, the newest 100 of each plan, and
what it rolled back is held back as long; one whose change routers still have
beside their plan is kept until it is rolled back.`,
		Args:              cobra.MaximumNArgs(1),
		ValidArgsFunction: a.complete(rolloutIDs),
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) == 0 {
				return a.listRollouts(c.Context(), false, "no rollouts yet: start one with cakefleetctl rollout start")
			}
			conn, err := a.connect()
			if err != nil {
				return err
			}
			resp, err := call(c.Context(), a, conn.rollouts.GetRollout, &pb.GetRolloutRequest{Id: args[0]})
			if err != nil {
				return err
			}
			if a.output == "json" {
				return a.printJSON(resp.GetRollout())
			}
			t := a.table("WAVE", "WHEN", "RESULT", "GATE", "WHY", "SAMPLES")
			for _, v := range resp.GetRollout().GetVerdicts() {
				t.row(u32(v.GetWave()), a.ago(v.GetTime()), v.GetResult(), v.GetGate(), v.GetText(), strconv.FormatUint(v.GetSamples(), 10))
			}
			return t.end(a, "no gate was judged yet")
		},
	}
}

func (a *app) listRollouts(ctx context.Context, active bool, empty string) error {
	conn, err := a.connect()
	if err != nil {
		return err
	}
	var all []*pb.Rollout
	for req := (&pb.ListRolloutsRequest{Active: active}); ; {
		resp, err := call(ctx, a, conn.rollouts.ListRollouts, req)
		if err != nil {
			return err
		}
		all = append(all, resp.GetRollouts()...)
		if req.PageToken = resp.GetNextPageToken(); req.PageToken == "" {
			break
		}
	}
	if a.output == "json" {
		return a.printJSON(&pb.ListRolloutsResponse{Rollouts: all})
	}
	t := a.table("ROLLOUT", "STATE", "WAVE", "ROUTERS", "STARTED", "BY", "WHY")
	for _, r := range all {
		total := uint32(0)
		if n := len(r.GetSizes()); n > 0 {
			total = r.GetSizes()[n-1]
		}
		t.row(r.GetId(), phaseText(r), reachedText(r), u32(total), a.ago(r.GetCreateTime()), r.GetAuthor(), r.GetReason())
	}
	return t.end(a, empty)
}

func (a *app) rolloutShow() *cobra.Command {
	return &cobra.Command{
		Use:               "show ID",
		Short:             "Show one rollout, its routers and its gates as they are now",
		Args:              exactly("ID"),
		ValidArgsFunction: a.complete(rolloutIDs),
		RunE: func(c *cobra.Command, args []string) error {
			conn, err := a.connect()
			if err != nil {
				return err
			}
			resp, err := call(c.Context(), a, conn.rollouts.GetRollout, &pb.GetRolloutRequest{Id: args[0]})
			if err != nil {
				return err
			}
			if a.output == "json" {
				return a.printJSON(resp)
			}
			r, report := resp.GetRollout(), resp.GetReport()
			t := a.table("rollout", r.GetId())
			t.row("for", selectorText(r.GetSelector()))
			what := whatText(&pb.Schedule{Set: r.GetSet()})
			if r.GetNote() != "" {
				what = strings.TrimSuffix(r.GetNote()+": "+what, ": ")
			}
			t.row("sets", what)
			state := phaseText(r) + ", " + a.ago(r.GetPhaseTime())
			if r.GetReason() != "" {
				state += ": " + r.GetReason()
			}
			t.row("state", state)
			t.row("wave", fmt.Sprintf("%s, sizes %s", reachedText(r), sizesText(r.GetSizes())))
			if m := report.GetMissing(); m != "" && !ended(r) {
				t.row("missing", m)
			} else if report.GetChanged() != nil {
				t.row("changed", tallyText(report.GetChanged()))
				t.row("control", count(report.GetControl().GetMembers(), "router"))
			}
			for _, g := range report.GetGates() {
				t.row("gate now", g.GetGate()+"  "+g.GetResult()+": "+g.GetText())
			}
			for _, v := range r.GetVerdicts() {
				t.row(fmt.Sprintf("wave %d", v.GetWave()), v.GetGate()+"  "+v.GetResult()+": "+v.GetText())
			}
			t.row("started", fmt.Sprintf("%s by %s", a.ago(r.GetCreateTime()), orDash(r.GetAuthor())))
			return t.end(a, "")
		},
	}
}

func selectorText(s *pb.RolloutSelector) string {
	var parts []string
	if s.GetPlan() != "" {
		parts = append(parts, "plan "+s.GetPlan())
	}
	if len(s.GetLabels()) > 0 {
		parts = append(parts, labelText(s.GetLabels()))
	}
	if s.GetModel() != "" {
		parts = append(parts, "model "+s.GetModel())
	}
	if len(parts) == 0 {
		return "a list of routers"
	}
	return strings.Join(parts, ", ")
}

// tallyText tells what is not 0.
func tallyText(t *pb.RolloutTally) string {
	parts := []string{count(t.GetMembers(), "router")}
	for _, p := range []struct {
		n    uint32
		word string
	}{
		{t.GetApplied(), "applied"},
		{t.GetClamped(), "clamped"},
		{t.GetAlready(), "already at target"},
		{t.GetOffered(), "offered"},
		{t.GetRejected(), "rejected"},
		{t.GetUnreachable(), "unreachable"},
		{t.GetRolledBack(), "rolled back"},
	} {
		if p.n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", p.n, p.word))
		}
	}
	return strings.Join(parts, ", ")
}

func (a *app) rolloutWatch() *cobra.Command {
	var every time.Duration
	c := &cobra.Command{
		Use:   "watch ID",
		Short: "See a rollout go on until it ends or pauses",
		Long: `See a rollout go on: a line whenever something changes. It ends with the rollout,
or when it pauses and waits for an operator; the exit status is 0 if it is
completed.`,
		Args:              exactly("ID"),
		ValidArgsFunction: a.complete(rolloutIDs),
		RunE: func(c *cobra.Command, args []string) error {
			if every < 100*time.Millisecond {
				return fmt.Errorf("--every %v: must be at least 100ms", every)
			}
			return a.watchRollout(c.Context(), args[0], every)
		},
	}
	c.Flags().DurationVar(&every, "every", 2*time.Second, "`time` between two looks")
	return c
}

func (a *app) watchRollout(ctx context.Context, id string, every time.Duration) error {
	conn, err := a.connect()
	if err != nil {
		return err
	}
	told := ""
	for {
		resp, err := call(ctx, a, conn.rollouts.GetRollout, &pb.GetRolloutRequest{Id: id})
		if err != nil {
			return err
		}
		r := resp.GetRollout()
		if line := watchLine(resp); line != told {
			told = line
			if a.output == "json" {
				err = a.printJSON(resp)
			} else {
				_, err = fmt.Fprintf(a.cfg.Stdout, "%s  %s\n", a.cfg.Now().Format(time.TimeOnly), line)
			}
			if err != nil {
				return err
			}
		}
		switch {
		case r.GetPhase() == pb.RolloutPhase_ROLLOUT_PHASE_COMPLETED:
			return nil
		case ended(r):
			return failure{fmt.Errorf("rollout %s: %s: %s", id, phaseText(r), r.GetReason())}
		case r.GetPhase() == pb.RolloutPhase_ROLLOUT_PHASE_PAUSED:
			return failure{fmt.Errorf("rollout %s is paused: %s; say rollout resume, promote, rollback or abort", id, r.GetReason())}
		}
		select {
		case <-ctx.Done():
			return failure{fmt.Errorf("interrupted; rollout %s goes on", id)}
		case <-time.After(every):
		}
	}
}

// watchLine is what is to be told of a rollout.
func watchLine(resp *pb.GetRolloutResponse) string {
	r, report := resp.GetRollout(), resp.GetReport()
	parts := []string{"wave " + waveText(r), phaseText(r)}
	if r.GetReason() != "" {
		parts[1] += " (" + r.GetReason() + ")"
	}
	if report.GetChanged() != nil && r.GetWave() > 0 {
		parts = append(parts, tallyText(report.GetChanged()))
	}
	if m := report.GetMissing(); m != "" {
		parts = append(parts, m)
	}
	for _, g := range report.GetGates() {
		parts = append(parts, g.GetResult()+": "+g.GetText())
	}
	return strings.Join(parts, "; ")
}

func (a *app) rolloutRouters() *cobra.Command {
	var state string
	c := &cobra.Command{
		Use:               "routers ID [--state STATE]",
		Short:             "Show the routers of a rollout, each with its wave and state",
		Args:              exactly("ID"),
		ValidArgsFunction: a.complete(rolloutIDs),
		RunE: func(c *cobra.Command, args []string) error {
			conn, err := a.connect()
			if err != nil {
				return err
			}
			var all []*pb.RolloutRouter
			var silent []string
			for req := (&pb.ListRolloutRoutersRequest{Id: args[0], State: state}); ; {
				resp, err := call(c.Context(), a, conn.rollouts.ListRolloutRouters, req)
				if err != nil {
					return err
				}
				all = append(all, resp.GetRouters()...)
				silent = append(silent, resp.GetSilentControllers()...)
				if req.PageToken = resp.GetNextPageToken(); req.PageToken == "" {
					break
				}
			}
			if a.output == "json" {
				return a.printJSON(&pb.ListRolloutRoutersResponse{Routers: all, SilentControllers: slices.Compact(slices.Sorted(slices.Values(silent)))})
			}
			a.silent(slices.Compact(slices.Sorted(slices.Values(silent))))
			t := a.table("ROUTER", "WAVE", "STATE")
			for _, r := range all {
				t.row(r.GetId(), u32(r.GetWave()), r.GetState())
			}
			return t.end(a, "no routers like that")
		},
	}
	c.Flags().StringVar(&state, "state", "", "only those in this `state`, such as rejected or unreachable")
	return c
}

func (a *app) commandRollout(ctx context.Context, id string, command pb.RolloutCommand) error {
	conn, err := a.connect()
	if err != nil {
		return err
	}
	resp, err := call(ctx, a, conn.rollouts.CommandRollout, &pb.CommandRolloutRequest{Id: id, Command: command})
	if isCode(err, codes.NotFound) {
		return failure{errors.Join(err, errors.New("see cakefleetctl rollout history"))}
	}
	if err != nil {
		return err
	}
	if a.output == "json" {
		return a.printJSON(resp)
	}
	r := resp.GetRollout()
	fmt.Fprintf(a.cfg.Stdout, "rollout %s: %s, wave %s\n", id, phaseText(r), waveText(r))
	return nil
}

func rolloutIDs(ctx context.Context, a *app) ([]string, error) {
	conn, err := a.connect()
	if err != nil {
		return nil, err
	}
	resp, err := conn.rollouts.ListRollouts(ctx, &pb.ListRolloutsRequest{})
	var ids []string
	for _, r := range resp.GetRollouts() {
		ids = append(ids, r.GetId())
	}
	return ids, err
}
