package api

import (
	"encoding/base64"
	"errors"
	"iter"
	"strings"
)

const (
	defaultPage = 1000
	mostPage    = 5000
)

// tokenPrefix is the version of page tokens. What follows it is the last id of
// the page before, so that a token stays good whatever changes meanwhile.
const tokenPrefix = "1:"

// page is what a list request asks for.
type page struct {
	size  int
	after string // the items wanted come after this id
}

// newPage reads the fields that every list request has.
func newPage(size uint32, token string) (page, error) {
	p := page{size: defaultPage}
	if size > 0 {
		p.size = int(min(size, mostPage))
	}
	if token == "" {
		return p, nil
	}
	text, err := base64.RawURLEncoding.DecodeString(token)
	after, ok := strings.CutPrefix(string(text), tokenPrefix)
	if err != nil || !ok {
		return page{}, badField("page_token", errors.New("page token: not one that this service gave"))
	}
	p.after = after
	return p, nil
}

// pageToken returns the token of the page after an id.
func pageToken(last string) string {
	return base64.RawURLEncoding.EncodeToString([]byte(tokenPrefix + last))
}

// collect returns the first items of a page, and the token of the next page;
// it is empty if there is none. wanted may be nil.
func collect[V, M any](p page, items iter.Seq[V], id func(V) string, wanted func(V) bool, message func(V) M) (got []M, next string) {
	last := ""
	for v := range items {
		if wanted != nil && !wanted(v) {
			continue
		}
		if len(got) == p.size {
			return got, pageToken(last)
		}
		got, last = append(got, message(v)), id(v)
	}
	return got, ""
}
