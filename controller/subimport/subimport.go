// Package subimport reads subscribers from a CSV or JSON file and compares them
// with those that are stored. It is pure: bytes and records in, lines that are bad
// and changes out. It is the only judge of such a file, so that every way to
// import gives the same verdict.
package subimport

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/cakefleet/cakefleet/internal/plan"
)

// The columns that every file has, and those of what billing sets for one
// subscriber; all others are labels.
const (
	columnID        = "id"
	columnPlan      = "plan"
	columnDown      = "down"
	columnUp        = "up"
	columnSuspended = "suspended"
)

// defaultPolicy is the plan whose rates a subscriber gets that is suspended
// without further words.
const defaultPolicy = "slow"

// File is what a file says.
type File struct {
	Labels []string // columns that are labels, in the order of the file
	Rows   []Row
	Errors []LineError // in order of line
	Broken bool        // the errors are about the file, and not about lines of it
}

// Row is one subscriber.
type Row struct {
	Line   int // in the file, from 1
	Record int // in a JSON file, from 1, as several may be on one line; 0 in a table
	ID     string
	Plan   string
	Labels map[string]string // those that are not empty
	Clear  []string          // labels that are removed, besides the columns
	Bad    bool              // there is an error about it

	Billing   plan.Settings // rates that are not the plan's
	Speaks    uint64        // fields that the file speaks about, set or not
	Suspended *string       // plan whose rates apply, empty for none; nil: the file does not say
}

// fault is an error about the row.
func (r *Row) fault(column, message string) LineError {
	return LineError{Line: r.Line, Record: r.Record, Column: column, Message: message}
}

// place says where the row is.
func (r *Row) place() string {
	if r.Record > 0 {
		return fmt.Sprintf("record %d, line %d", r.Record, r.Line)
	}
	return fmt.Sprintf("line %d", r.Line)
}

// bill reads one value that billing sets; handled is false if it is none.
func (r *Row) bill(column, value string) (handled bool, err error) {
	field := map[string]int{columnDown: plan.DownRate, columnUp: plan.UpRate}
	i, rate := field[column]
	switch {
	case rate:
		r.Speaks |= 1 << i
		if value == "" {
			return true, nil
		}
		return true, r.Billing.Parse(plan.FieldName(i), value)
	case column == columnSuspended:
		policy := strings.ToLower(value)
		switch policy {
		case "no", "false", "0":
			policy = ""
		case "yes", "true", "1":
			policy = defaultPolicy
		}
		r.Suspended = &policy
		if policy == "" {
			return true, nil
		}
		return true, plan.ValidateName("plan", policy)
	default:
		return false, nil
	}
}

// LineError is one line that can't be used.
type LineError struct {
	Line    int    // in the file, from 1; 0 if it is not about a line
	Record  int    // as in Row; 0 if it is not about one
	Column  string // name of the column, if one is to blame
	Message string
}

// Parse reads a file. The columns down and up are rates of billing that count
// instead of the plan's where they are not empty, and suspended says "yes" or
// names a plan whose rates count instead. What begins with "[" or "{" is JSON, as ParseJSON says;
// everything else is a table. Its first line names the columns: id, plan, and any
// others, which are labels. Columns are separated by commas, semicolons or
// tabs; text is UTF-8 or UTF-16, with or without a byte order mark; lines end
// in LF, CRLF or CR; spaces around a value don't count, nor do empty lines.
//
// Every bad line is listed with what is wrong with it. An id that occurs twice
// is an error, even if both lines say the same, because one of them was meant
// to be another subscriber.
func Parse(data []byte) File {
	text, err := decode(data)
	if err != nil {
		return File{Errors: []LineError{{Message: err.Error()}}, Broken: true}
	}
	if first := strings.TrimLeft(text, " \t\r\n"); strings.HasPrefix(first, "[") || strings.HasPrefix(first, "{") {
		return parseJSON(text)
	}
	text, skipped, comma := separator(text)
	p := parser{seen: map[string]int{}}
	p.parse(text, skipped, comma)
	return p.file
}

type parser struct {
	columns []string
	seen    map[string]int // row of each id
	file    File
}

// parse takes each line as one record: no value that can be used goes over
// several lines, and so a quote that is not closed spoils one line and not all
// that follow.
func (p *parser) parse(text string, line int, comma byte) {
	header := true
	var fields []string
	for l := range strings.Lines(text) {
		line++
		var err error
		fields, err = split(fields[:0], strings.TrimRight(l, "\r\n"), comma)
		if err == nil {
			err = notUTF8(l)
		}
		if err != nil {
			p.fail(line, "", err.Error())
			p.file.Rows = append(p.file.Rows, Row{Line: line, Bad: true})
			if header {
				p.file.Broken = true
				return // without columns nothing else can be judged
			}
			continue
		}
		for len(fields) > 0 && fields[len(fields)-1] == "" && (header || len(fields) > len(p.columns)) {
			fields = fields[:len(fields)-1]
		}
		switch {
		case !slices.ContainsFunc(fields, func(s string) bool { return s != "" }):
		case header:
			header = false
			if !p.header(line, fields) {
				p.file.Broken = true
				return
			}
		default:
			p.row(line, fields)
		}
	}
	if header {
		p.file.Broken = true
		p.fail(0, "", "file is empty; its first line must name the columns id and plan")
	}
}

// notUTF8 returns an error that says where a line is not UTF-8.
func notUTF8(line string) error {
	for i, r := range line {
		if _, n := utf8.DecodeRuneInString(line[i:]); r == utf8.RuneError && n == 1 {
			return fmt.Errorf("is not UTF-8 after %q (byte 0x%02x): the file seems to be Latin-1 or Windows-1252; save it as UTF-8", lastRunes(line[:i], 12), line[i])
		}
	}
	return nil
}

// lastRunes returns the end of a text.
func lastRunes(text string, n int) string {
	r := []rune(text)
	return string(r[max(0, len(r)-n):])
}

func (p *parser) header(line int, fields []string) bool {
	before := len(p.file.Errors)
	at := map[string]int{}
	for i, f := range fields {
		name := strings.ToLower(f)
		p.columns = append(p.columns, name)
		switch first, twice := at[name]; {
		case name == "":
			p.fail(line, "", fmt.Sprintf("column %d has no name", i+1))
		case twice:
			p.fail(line, name, fmt.Sprintf("columns %d and %d have the same name", first+1, i+1))
		case name != columnID && name != columnPlan && name != columnDown && name != columnUp && name != columnSuspended:
			if err := plan.ValidateName("label", name); err != nil {
				p.fail(line, name, err.Error())
			}
			p.file.Labels = append(p.file.Labels, name)
		}
		at[name] = i
	}
	for _, name := range []string{columnID, columnPlan} {
		if _, ok := at[name]; !ok {
			p.fail(line, name, fmt.Sprintf("column %s is missing; the first line names %s", name, strings.Join(p.columns, ", ")))
		}
	}
	return len(p.file.Errors) == before
}

func (p *parser) row(line int, fields []string) {
	if len(fields) != len(p.columns) {
		p.fail(line, "", fmt.Sprintf("line has %d columns, the first line has %d", len(fields), len(p.columns)))
		p.file.Rows = append(p.file.Rows, Row{Line: line, Bad: true})
		return
	}
	r := Row{Line: line}
	for i, name := range p.columns {
		value := fields[i]
		billed, err := r.bill(name, value)
		switch {
		case billed:
		case name == columnID:
			r.ID = value
			err = plan.ValidateID("subscriber", value)
		case name == columnPlan:
			r.Plan = value
			err = plan.ValidateName("plan", value)
		case value != "":
			if r.Labels == nil {
				r.Labels = make(map[string]string, len(p.columns)-2)
			}
			r.Labels[name] = value
			err = plan.ValidateLabel(name, value)
		}
		if err != nil {
			r.Bad = true
			p.fail(line, name, err.Error())
		}
	}
	p.add(r)
}

// add takes in a row. Of two with the same id both are bad: one of them was
// meant to be another subscriber, and nobody knows which.
func (p *parser) add(r Row) {
	if first, twice := p.seen[r.ID]; twice {
		r.Bad = true
		p.file.Rows[first].Bad = true
		p.file.Errors = append(p.file.Errors, r.fault(columnID, fmt.Sprintf("subscriber %s is on %s already", r.ID, p.file.Rows[first].place())))
	} else if r.ID != "" {
		p.seen[r.ID] = len(p.file.Rows)
	}
	p.file.Rows = append(p.file.Rows, r)
}

func (p *parser) fail(line int, column, message string) {
	p.file.Errors = append(p.file.Errors, LineError{Line: line, Column: column, Message: message})
}

var (
	errOpenQuote = errors.New("a quoted value is not closed on its line")
	errBareQuote = errors.New(`a quote is in the middle of a value; put the value in quotes and write "" for a quote`)
)

// split appends the values of one line to fields, without quotes and the
// spaces around them.
func split(fields []string, line string, comma byte) ([]string, error) {
	for {
		line = strings.TrimLeft(line, " ")
		var value string
		if strings.HasPrefix(line, `"`) {
			var err error
			if value, line, err = unquote(line[1:]); err != nil {
				return fields, err
			}
			line = strings.TrimLeft(line, " ")
			if line != "" && line[0] != comma {
				return fields, errBareQuote
			}
		} else {
			end := strings.IndexByte(line, comma)
			if end < 0 {
				end = len(line)
			}
			value, line = line[:end], line[end:]
			if strings.Contains(value, `"`) {
				return fields, errBareQuote
			}
		}
		fields = append(fields, strings.TrimSpace(value))
		if line == "" {
			return fields, nil
		}
		line = line[1:]
	}
}

// unquote returns the value up to the closing quote, and what follows it.
func unquote(s string) (value, rest string, err error) {
	for i := 0; i < len(s); i++ {
		if s[i] != '"' {
			continue
		}
		if !strings.HasPrefix(s[i:], `""`) {
			return strings.ReplaceAll(s[:i], `""`, `"`), s[i+1:], nil
		}
		i++
	}
	return "", "", errOpenQuote
}
