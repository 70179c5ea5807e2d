package plan

// Known says which revisions the store knows that a desired state comes from.
// The zero value knows all.
type Known struct {
	Revision Revision // newest that it has seen; 0: all

	// What the store was made from may have been older than what routers run:
	// revisions after Above and up to Until are forgotten.
	Above, Until Revision
	Accepted     bool // whether routers may be moved back from there
}

// Ahead reports whether a router that runs applied runs what the store does not
// know, so that d would move it back without anybody's having said so. It is so
// after a restore from an old backup, and for a moment with a controller that
// has not seen yet what another one has sent.
func (k Known) Ahead(applied Revision, d Desired) bool {
	switch {
	case k.Revision == 0:
		return false
	case applied > k.Above && applied <= k.Until:
		return !k.Accepted && d.Revision <= k.Until
	default:
		return applied > k.Revision
	}
}
