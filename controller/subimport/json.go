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
			err = fmt.Errorf("file ends in the middle, after record %d; it seems to be cut off", len(p.file.Rows))
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
	line, record, at := 1, 0, int64(0)
	for d.More() {
		var raw json.RawMessage
		if err := d.Decode(&raw); err != nil {
			return err
		}
		begin := d.InputOffset() - int64(len(raw))
		line += strings.Count(text[at:begin], "\n")
		at = begin
		record++
		p.member(Row{Line: line, Record: record}, raw)
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

// member takes in one subscriber, with everything that is wrong with it.
func (p *parser) member(r Row, raw json.RawMessage) {
	bad := func(column string, err error) {
		if err != nil {
			r.Bad = true
			p.file.Errors = append(p.file.Errors, r.fault(column, valueError(err)))
		}
	}
	fields, err := object(raw)
	if err != nil {
		bad("", errors.New("a subscriber is an object with id, plan and labels, not "+kindOf(raw)))
		p.file.Rows = append(p.file.Rows, r)
		return
	}
	var labels map[string]json.RawMessage
	hasID, hasPlan := false, false
	for _, name := range slices.Sorted(maps.Keys(fields)) {
		value := fields[name]
		switch name = strings.ToLower(name); name {
		case columnID:
			hasID = true
			var id word
			if err := json.Unmarshal(value, &id); err != nil {
				bad(columnID, err)
				continue
			}
			r.ID = string(id)
			bad(columnID, plan.ValidateID("subscriber", r.ID))
		case columnPlan:
			hasPlan = true
			if err := json.Unmarshal(value, &r.Plan); err != nil {
				bad(columnPlan, err)
				continue
			}
			r.Plan = strings.TrimSpace(r.Plan)
			bad(columnPlan, plan.ValidateName("plan", r.Plan))
		case "labels":
			if labels, err = object(value); err != nil && kindOf(value) != "null" {
				bad("labels", errors.New("must be an object, not "+kindOf(value)))
			}
		case columnDown, columnUp, columnSuspended:
			var text word
			if kindOf(value) == "null" {
				continue // as if it was not there
			}
			if err := json.Unmarshal(value, &text); err != nil {
				bad(name, err)
				continue
			}
			_, err := r.bill(name, string(text))
			bad(name, err)
		default:
			bad(name, errors.New("is no field of a subscriber; what is free goes into labels"))
		}
	}
	if !hasID {
		bad(columnID, errors.New("is missing"))
	}
	if !hasPlan {
		bad(columnPlan, errors.New("is missing"))
	}
	p.labels(&r, labels, bad)
	p.add(r)
}

func (p *parser) labels(r *Row, labels map[string]json.RawMessage, bad func(column string, err error)) {
	for _, name := range slices.Sorted(maps.Keys(labels)) {
		var text word
		if err := json.Unmarshal(labels[name], &text); err != nil {
			bad(name, err)
			continue
		}
		bad(name, plan.ValidateLabel(name, string(text)))
		if text == "" {
			r.Clear = append(r.Clear, name)
			continue
		}
		if r.Labels == nil {
			r.Labels = map[string]string{}
		}
		r.Labels[name] = string(text)
	}
}

// object returns the fields of an object.
func object(raw json.RawMessage) (fields map[string]json.RawMessage, err error) {
	if err := json.Unmarshal(raw, &fields); err != nil {
		return nil, err
	}
	if fields == nil {
		return nil, errors.New("null")
	}
	return fields, nil
}

// kindOf says what a value is.
func kindOf(raw json.RawMessage) string {
	switch raw[0] {
	case '{':
		return "an object"
	case '[':
		return "an array"
	case '"':
		return "a text"
	case 'n':
		return "null"
	case 't', 'f':
		return "true or false"
	default:
		return "a number"
	}
}

// valueError says in our words why a value can't be used.
func valueError(err error) string {
	if e, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		return "can't be a " + e.Value
	}
	return strings.TrimPrefix(err.Error(), "json: ")
}

func lineOf(text string, offset int64) int {
	return 1 + strings.Count(text[:min(int(offset), len(text))], "\n")
}
