package sqm

import (
	"fmt"
	"strings"
)

// section is one "config" of a UCI file.
type section struct {
	typ, name string
	line      int
	options   []option
}

// option is one "option" or "list" line.
type option struct {
	name, value string
	line        int
	list        bool
}

// get returns the last value of an option.
func (s *section) get(name string) (value string, ok bool) {
	for i := range s.options {
		if o := &s.options[i]; o.name == name && !o.list {
			value, ok = o.value, true
		}
	}
	return value, ok
}

// parseUCI reads the configuration language of OpenWrt.
func parseUCI(text string) ([]section, error) {
	var all []section
	for i, line := range strings.Split(text, "\n") {
		words, err := splitUCI(line)
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", i+1, err)
		}
		if len(words) == 0 {
			continue
		}
		switch {
		case words[0] == "package" && len(words) == 2:
		case words[0] == "config" && (len(words) == 2 || len(words) == 3):
			s := section{typ: words[1], line: i + 1}
			if len(words) == 3 {
				s.name = words[2]
			}
			all = append(all, s)
		case (words[0] == "option" || words[0] == "list") && len(words) == 3:
			if len(all) == 0 {
				return nil, fmt.Errorf("line %d: %s %s is in no section: a line such as config queue 'eth1' must come before it", i+1, words[0], words[1])
			}
			s := &all[len(all)-1]
			s.options = append(s.options, option{name: words[1], value: words[2], line: i + 1, list: words[0] == "list"})
		default:
			return nil, fmt.Errorf("line %d: %q: allowed are config TYPE [NAME], option NAME VALUE and list NAME VALUE", i+1, strings.TrimSpace(line))
		}
	}
	return all, nil
}

// splitUCI divides a line into words. Quotes join what is between them; a
// backslash outside single quotes takes the next character as it is; # begins a
// comment where a word could begin.
func splitUCI(line string) ([]string, error) {
	var words []string
	var word strings.Builder
	inside := false // a word
	quote := byte(0)
	end := func() {
		if inside {
			words = append(words, word.String())
		}
		word.Reset()
		inside = false
	}
	for i := 0; i < len(line); i++ {
		switch c := line[i]; {
		case quote != 0 && c == quote:
			quote = 0
		case c == '\\' && quote != '\'':
			if i++; i == len(line) {
				return nil, fmt.Errorf("a backslash at the end")
			}
			word.WriteByte(line[i])
			inside = true
		case quote != 0:
			word.WriteByte(c)
		case c == '\'' || c == '"':
			quote, inside = c, true
		case c == ' ' || c == '\t' || c == '\r':
			end()
		case c == '#' && !inside:
			return words, nil
		default:
			word.WriteByte(c)
			inside = true
		}
	}
	if quote != 0 {
		return nil, fmt.Errorf("a quote %c without its end", quote)
	}
	end()
	return words, nil
}
