package store

import "context"

// OpenKV opens the KV that OpenEtcd puts a store on, so that a test can stand
// between them.
func OpenKV(ctx context.Context, c Config) (KV, error) { return openKV(ctx, c) }
