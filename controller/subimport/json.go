package subimport

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/cakefleet/cakefleet/internal/plan"
)

// member is one subscriber in JSON.
type member struct {
	ID     word            `json:"id"`
	Plan   string          `json:"plan"`
	Labels map[string]word `json:"labels"`

	Down      *word `json:"down"`
	Up        *word `json:"up"`
	Suspended *word `json:"suspended"`
}

// word is a text, or a number or truth value as it is written; null is empty.
type word string

// UnmarshalJSON reads one value that is not an object or an array.
func (w *word) UnmarshalJSON(b []byte) error {
	var text string
	switch {
	case bytes.Equal(b, []byte("null")):
		*w = ""
	case b[0] == '"':
		if err := json.Unmarshal(b, &text); err != nil {
			return err
		}
		*w = word(strings.TrimSpace(text))
	case b[0] == '{' || b[0] == '[':
		return errors.New("must be a text or a number")
	default:
		*w = word(b)
	}
	return nil
}

// parseJSON reads an array of objects with the fields id, plan and labels, or
// an object whose field subscribers is such an array. A label that is empty or
// null is removed; labels that are not named stay, and so do the rates down and
// up and suspended, which are as in a table. The line of a subscriber is
// that on which its object begins.
func parseJSON(text string) File {
	p := parser{seen: map[string]int{}}
	if err := p.parseJSON(text); err != nil {
		p.file.Broken = true
		line := 0
		if syntax, ok := errors.AsType[*json.SyntaxError](err); ok {
			line = lineOf(text, syntax.Offset)
		}
		if errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) {
			err = errors.New("file ends in the middle; it seems to be cut off")
		}
		p.fail(line, "", err.Error())
	}
	return p.file
}

func (p *parser) parseJSON(text string) error {
	d := json.NewDecoder(strings.NewReader(text))
	if err := openList(d); err != nil {
		return err
	}
	line, at := 1, int64(0)
	for d.More() {
		var raw json.RawMessage
		if err := d.Decode(&raw); err != nil {
			return err
		}
		begin := d.InputOffset() - int64(len(raw))
		line += strings.Count(text[at:begin], "\n")
		at = begin
		p.member(line, raw)
	}
	if _, err := d.Token(); err != nil {
		return err
	}
	return closeList(d)
}

// openList reads up to the first subscriber.
func openList(d *json.Decoder) error {
	first, err := d.Token()
	if err != nil {
		return err
	}
	if first == json.Delim('[') {
		return nil
	}
	name, err := d.Token()
	if err != nil {
		return err
	}
	if name != "subscribers" {
		return errors.New("an array of subscribers is wanted, or an object whose only field is subscribers")
	}
	list, err := d.Token()
	if err != nil {
		return err
	}
	if list != json.Delim('[') {
		return errors.New("subscribers: must be an array")
	}
	return nil
}

// closeList reads what follows the last subscriber.
func closeList(d *json.Decoder) error {
	for {
		t, err := d.Token()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if t != json.Delim('}') {
			return fmt.Errorf("%v follows the list of subscribers", t)
		}
	}
}

func (p *parser) member(line int, raw json.RawMessage) {
	d := json.NewDecoder(bytes.NewReader(raw))
	d.DisallowUnknownFields()
	var m member
	if err := d.Decode(&m); err != nil {
		p.fail(line, "", memberError(err))
		p.file.Rows = append(p.file.Rows, Row{Line: line, Bad: true})
		return
	}
	r := Row{Line: line, ID: string(m.ID), Plan: strings.TrimSpace(m.Plan)}
	bad := func(column string, err error) {
		if err != nil {
			r.Bad = true
			p.fail(line, column, err.Error())
		}
	}
	bad(columnID, plan.ValidateID("subscriber", r.ID))
	bad(columnPlan, plan.ValidateName("plan", r.Plan))
	for _, b := range []struct {
		column string
		value  *word
	}{{columnDown, m.Down}, {columnUp, m.Up}, {columnSuspended, m.Suspended}} {
		if b.value != nil {
			_, err := r.bill(b.column, string(*b.value))
			bad(b.column, err)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(m.Labels)) {
		value := string(m.Labels[name])
		bad(name, plan.ValidateLabel(name, value))
		if value == "" {
			r.Clear = append(r.Clear, name)
			continue
		}
		if r.Labels == nil {
			r.Labels = map[string]string{}
		}
		r.Labels[name] = value
	}
	p.add(r)
}

// memberError says in our words why an object is no subscriber.
func memberError(err error) string {
	e, ok := errors.AsType[*json.UnmarshalTypeError](err)
	switch {
	case !ok:
		return strings.TrimPrefix(err.Error(), "json: ")
	case e.Field == "":
		return fmt.Sprintf("a subscriber is an object with id, plan and labels, not a %s", e.Value)
	default:
		return fmt.Sprintf("%s: can't be a %s", e.Field, e.Value)
	}
}

func lineOf(text string, offset int64) int {
	return 1 + strings.Count(text[:min(int(offset), len(text))], "\n")
}
