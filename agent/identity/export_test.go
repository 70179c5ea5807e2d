package identity

// SetSynced makes a clock one that is kept right, or is not.
func (c *Clock) SetSynced(is bool) { c.synced = func() bool { return is } }
