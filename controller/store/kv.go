package store

import (
	"context"
	"errors"
)

// ErrCompacted is what KV.Watch returns when the revision to start from is no
// longer kept.
var ErrCompacted = errors.New("revision is compacted")

// Limits of a transaction that every etcd accepts with its default settings.
const (
	maxOps   = 127     // compares, and operations; 128 less one compare for a fence
	maxBytes = 1 << 20 // of values; a request may have 1.5 MiB
)

// KV is what the store needs of etcd. Revisions count up by one with every
// transaction that changes anything.
type KV interface {
	// List returns all items whose key begins with prefix as they were at the
	// returned revision, which is not older than any that was seen before.
	List(ctx context.Context, prefix string) (items []Item, revision int64, err error)
	// Get returns the items of those keys that exist, at one revision that is
	// not older than any that was seen before.
	Get(ctx context.Context, keys ...string) (items []Item, revision int64, err error)
	// Range returns a part of what there is, and how many items the whole has.
	Range(ctx context.Context, q Range) (items []Item, count int, err error)
	// Txn does all operations if all compares hold, else nothing.
	Txn(ctx context.Context, compares []Compare, ops []Op) (TxnResult, error)
	// Watch calls seen with everything that happens after a revision, in order,
	// until ctx ends or an error such as ErrCompacted. All changes of one
	// transaction come in one call.
	Watch(ctx context.Context, prefix string, after int64, seen func(Batch)) error
	// Progress makes Watch call seen with an empty batch of the newest revision
	// as soon as everything before has been seen. It may be lost.
	Progress(ctx context.Context) error
	// Close releases what the KV holds.
	Close() error
}

// Range asks for the first items, in order of key, with From <= key < End.
type Range struct {
	From, End string
	Limit     int
}

// Item is one key with its value.
type Item struct {
	Key      string
	Value    []byte // nil: deleted
	Revision int64  // of its last change
}

// Batch is a number of changes.
type Batch struct {
	Items    []Item
	Revision int64 // everything up to it is in this and earlier batches
}

// Relation is how Compare compares.
type Relation byte

// The relations.
const (
	Equal   Relation = '='
	Less    Relation = '<'
	Greater Relation = '>'
)

// Compare holds if the modification revision of a key, 0 if it doesn't exist,
// stands in a relation to a number.
type Compare struct {
	Key      string
	Relation Relation
	Revision int64
}

// Op puts a value under a key, or deletes the key if the value is nil.
type Op struct {
	Key   string
	Value []byte
}

// TxnResult tells how a transaction went.
type TxnResult struct {
	OK       bool
	Revision int64  // of the store after the transaction
	Items    []Item // if not OK: those of the compared keys that exist
}
