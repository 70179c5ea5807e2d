package store

import "strings"

// Prefix is where everything of this version of the layout is kept.
const Prefix = "/cakefleet/v1/"

// refs/ has one marker for each target of a reference. Its value is of no use;
// its revision says when a reference was made last.
const refs = "refs/"

func key(k Kind, id string) string { return Prefix + string(k) + "s/" + id }

func refKey(k Kind, id string) string { return Prefix + refs + string(k) + "s/" + id }

// parseKey returns what a key is about; ok is false for keys that are not
// records, such as markers and what later versions keep here.
func parseKey(s string) (k Kind, id string, ok bool) {
	rest, found := strings.CutPrefix(s, Prefix)
	if !found {
		return "", "", false
	}
	folder, id, found := strings.Cut(rest, "/")
	if !found || id == "" {
		return "", "", false
	}
	switch k = Kind(strings.TrimSuffix(folder, "s")); k {
	case KindPlan, KindSubscriber, KindRouter, KindToken, KindSchedule, KindOperator, KindRestore, KindSerial, KindRevocation, KindPlace, KindRollout, KindCA, KindTrust:
		return k, id, strings.HasSuffix(folder, "s")
	default:
		return "", "", false
	}
}
