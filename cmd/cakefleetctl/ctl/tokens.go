package ctl

import (
	"bytes"
	"context"
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// tokenBatch is how many join tokens are made in one call.
const tokenBatch = 500

// manyTokens makes a join token for each line of a file and prints each when it
// is stored. Whatever ends it, it says how far it came and how to go on.
type manyTokens struct {
	*app
	conn  *connection
	file  string
	batch string
	ttl   time.Duration

	out     bytes.Buffer // what is printed at once
	lines   []provisionLine
	skipped int // lines that an earlier run has done
	done    int // lines that are done, with those that were skipped
	made    int
	wrong   []string
}

// tokensOf makes the tokens for the routers in a file.
func (a *app) tokensOf(c *cobra.Command, file, batch string, ttl time.Duration, skip int) error {
	m := &manyTokens{app: a, file: file, batch: batch, ttl: ttl, skipped: skip, done: skip}
	if m.batch == "" {
		m.batch = a.cfg.Now().UTC().Format("20060102-150405.000")
	}
	var err error
	if m.lines, m.wrong, err = readProvision(file, "router"); err != nil {
		return failure{err}
	}
	for _, l := range m.lines {
		if l.router.GetSerial() != "" || l.router.GetFingerprint() != "" {
			return failure{fmt.Errorf("%s: columns serial and fingerprint are for cakefleetctl router provision, which needs no token", file)}
		}
	}
	if skip < 0 || skip > len(m.lines) {
		return fmt.Errorf("--skip %d: %s has %s", skip, file, count(len(m.lines), "router"))
	}
	if m.conn, err = a.connect(); err != nil {
		return err
	}
	return m.run(c.Context())
}

func (m *manyTokens) run(ctx context.Context) error {
	if m.output != "json" && m.skipped == 0 {
		m.out.WriteString("router,subscriber,id,expires,token\n")
	}
	for m.done < len(m.lines) {
		if ctx.Err() != nil {
			return m.interrupted(errors.New("stopped"), false)
		}
		if err := m.next(ctx); err != nil {
			return err
		}
	}
	for _, text := range m.wrong {
		m.note("%s", text)
	}
	m.note("%s made, batch %s. On a router: cakefleet-agent --token with its own. Those that are not used yet are taken back with: cakefleetctl token delete --batch %s", count(m.made, "token"), m.batch, m.batch)
	if len(m.wrong) > 0 {
		return failure{fmt.Errorf("%s without a token", count(len(m.wrong), "line"))}
	}
	return nil
}

// next makes the tokens of the next lines.
func (m *manyTokens) next(ctx context.Context) error {
	lines := m.lines[m.done:min(m.done+tokenBatch, len(m.lines))]
	req := &pb.CreateTokensRequest{Batch: m.batch}
	for _, l := range lines {
		req.Tokens = append(req.Tokens, &pb.CreateTokenRequest{
			RouterId: l.router.GetRouterId(), Subscriber: l.router.GetSubscriber(), Labels: l.router.GetLabels(), Ttl: durationpb.New(m.ttl),
		})
	}
	// What was asked for is waited for also when the operator stops the run: what
	// the controller has stored is shown.
	resp, err := call(context.WithoutCancel(ctx), m.app, m.conn.tokens.CreateTokens, req)
	if err != nil {
		return m.interrupted(err, !isCode(err, codes.InvalidArgument) && !isCode(err, codes.PermissionDenied))
	}
	if len(resp.GetTokens()) != len(lines) {
		return m.interrupted(fmt.Errorf("controller %s has answered %d of %d", m.controller, len(resp.GetTokens()), len(lines)), true)
	}
	// Those that were not tried come again, from the first of them on.
	first, made := len(lines), 0
	for i, t := range resp.GetTokens() {
		if t.GetSecret() == "" && t.GetError() == "" {
			first = min(first, i)
		}
	}
	for i, t := range resp.GetTokens() {
		if t.GetError() != "" && i < first {
			m.wrong = append(m.wrong, fmt.Sprintf("line %d: %s", lines[i].line, t.GetError()))
		}
		if t.GetSecret() == "" {
			continue
		}
		if err := m.print(t); err != nil {
			return m.interrupted(err, true)
		}
		made++
	}
	if _, err := m.out.WriteTo(m.cfg.Stdout); err != nil {
		return m.interrupted(fmt.Errorf("print: %w (the last line may be cut off: remove it)", err), true)
	}
	m.made += made
	m.done += first
	if resp.GetStopped() != "" {
		return m.interrupted(errors.New(resp.GetStopped()), true)
	}
	return nil
}

// print prints one token: a line of CSV, or of JSON.
func (m *manyTokens) print(t *pb.CreatedToken) error {
	x := t.GetToken()
	expires := x.GetExpireTime().AsTime().Format(time.RFC3339)
	if m.output == "json" {
		return json.NewEncoder(&m.out).Encode(struct {
			Router     string `json:"router"`
			Subscriber string `json:"subscriber,omitempty"`
			ID         string `json:"id"`
			Expires    string `json:"expires"`
			Token      string `json:"token"`
		}{x.GetRouterId(), x.GetSubscriber(), x.GetId(), expires, t.GetSecret()})
	}
	w := csv.NewWriter(&m.out)
	if err := w.Write([]string{x.GetRouterId(), x.GetSubscriber(), x.GetId(), expires, t.GetSecret()}); err != nil {
		return err
	}
	w.Flush()
	return w.Error()
}

// interrupted says how far it came and how to go on. unshown tells whether
// tokens of the last call may be stored that nobody saw.
func (m *manyTokens) interrupted(err error, unshown bool) error {
	for _, text := range m.wrong {
		m.note("%s", text)
	}
	what := fmt.Sprintf("stopped after %d of %s: %s", m.done, count(len(m.lines), "router"), err)
	if m.made == 1 {
		what += "\n1 token was made and printed in this run"
	} else {
		what += fmt.Sprintf("\n%d tokens were made and printed in this run", m.made)
	}
	if unshown {
		what += fmt.Sprintf("; up to %d more may be stored: nobody has their secrets, and they end by themselves", tokenBatch)
	}
	var again strings.Builder
	fmt.Fprintf(&again, "cakefleetctl token create --file %s --batch %s --ttl %s", m.file, m.batch, m.ttl)
	if m.output == "json" {
		again.WriteString(" -o json")
	}
	what += fmt.Sprintf("\nto go on, with the output behind that of this run: %s --skip %d", again.String(), m.done)
	what += "\nto take all back that are not used yet: cakefleetctl token delete --batch " + m.batch
	return failure{errors.New(what)}
}

// deleteBatch makes the tokens of a batch useless.
func (a *app) deleteBatch(ctx context.Context, batch string) error {
	conn, err := a.connect()
	if err != nil {
		return err
	}
	deleted := 0
	for req := (&pb.DeleteTokensRequest{Batch: batch}); ; {
		resp, err := call(ctx, a, conn.tokens.DeleteTokens, req)
		if err != nil {
			if deleted > 0 {
				a.note("%s deleted before this; doing it again goes on", count(deleted, "token"))
			}
			return err
		}
		deleted += int(resp.GetDeleted())
		if req.PageToken = resp.GetNextPageToken(); req.PageToken == "" {
			break
		}
	}
	if a.output == "json" {
		return a.printJSONText(fmt.Appendf(nil, `{"deleted":%d}`, deleted))
	}
	fmt.Fprintf(a.cfg.Stdout, "%s of batch %s deleted\n", count(deleted, "token"), batch)
	return nil
}
