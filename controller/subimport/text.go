package subimport

import (
	"bytes"
	"encoding/binary"
	"errors"
	"strings"
	"unicode/utf16"
	"unicode/utf8"
)

// Text returns a file of people's programs as UTF-8: without byte order mark,
// from UTF-16 too, with lines that end in LF or CRLF. Bytes that are not text
// become U+FFFD or stay.
func Text(data []byte) (string, error) { return decode(data) }

// decode returns UTF-8 text without byte order mark, with lines that end in
// LF or CRLF. Bytes that are not text become U+FFFD or stay, and the columns
// they are in are refused later.
func decode(data []byte) (string, error) {
	var err error
	switch {
	case bytes.HasPrefix(data, []byte{0xef, 0xbb, 0xbf}):
		data = data[3:]
	case bytes.HasPrefix(data, []byte{0xff, 0xfe}):
		data, err = decode16(data[2:], binary.LittleEndian)
	case bytes.HasPrefix(data, []byte{0xfe, 0xff}):
		data, err = decode16(data[2:], binary.BigEndian)
	case len(data) >= 2 && data[0] != 0 && data[1] == 0:
		// The first character is ASCII in every file that can be used.
		data, err = decode16(data, binary.LittleEndian)
	case len(data) >= 2 && data[0] == 0 && data[1] != 0:
		data, err = decode16(data, binary.BigEndian)
	}
	if err != nil {
		return "", err
	}
	if !bytes.ContainsRune(data, '\n') {
		data = bytes.ReplaceAll(data, []byte{'\r'}, []byte{'\n'})
	}
	return string(data), nil
}

func decode16(data []byte, order binary.ByteOrder) ([]byte, error) {
	if len(data)%2 != 0 {
		return nil, errors.New("file is UTF-16 with half a character at its end; it seems to be cut off")
	}
	units := make([]uint16, len(data)/2)
	for i := range units {
		units[i] = order.Uint16(data[2*i:])
	}
	text := make([]byte, 0, len(units))
	for _, r := range utf16.Decode(units) {
		text = utf8.AppendRune(text, r)
	}
	return text, nil
}

// separator returns what separates the columns, and the text without lines
// before the first that only say so ("sep=;") or are empty, with their number.
func separator(text string) (rest string, skipped int, comma byte) {
	for {
		line, after, more := strings.Cut(text, "\n")
		line = strings.Trim(line, " \r")
		if len(line) == len("sep=;") && strings.EqualFold(line[:4], "sep=") && strings.Contains(separators, line[4:]) {
			return after, skipped + 1, line[4]
		}
		if line != "" || !more {
			return text, skipped, mostFrequent(line)
		}
		text, skipped = after, skipped+1
	}
}

const separators = ",;\t"

// mostFrequent returns the separator that occurs most often outside quotes;
// a comma if there is none.
func mostFrequent(line string) byte {
	var count [len(separators)]int
	quoted := false
	for _, b := range []byte(line) {
		if b == '"' {
			quoted = !quoted
		}
		if i := strings.IndexByte(separators, b); i >= 0 && !quoted {
			count[i]++
		}
	}
	best := 0
	for i, n := range count {
		if n > count[best] {
			best = i
		}
	}
	return separators[best]
}
