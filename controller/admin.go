package controller

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"os"
	"time"

	"github.com/cakefleet/cakefleet/controller/api"
	"github.com/cakefleet/cakefleet/controller/store"
)

// firstAdmin returns what lets the operator in whose credentials are in file: in
// a fleet that has no operators, or if this start wrote the file. Whoever can
// make it write has the authority's key and needs no permission, so that this is
// also the way back if the last admin's credentials are lost.
func firstAdmin(st *store.Store, file string, wrote bool) (func(context.Context) error, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("operator credentials: %w", err)
	}
	return adminWith(st, file, text, wrote)
}

// adminWith is firstAdmin for credentials that file has or will have.
func adminWith(st *store.Store, file string, text []byte, wrote bool) (func(context.Context) error, error) {
	block, _ := pem.Decode(text)
	if block == nil {
		return nil, fmt.Errorf("operator credentials %s: no PEM certificate", file)
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return nil, fmt.Errorf("operator credentials %s: %w", file, err)
	}
	c := api.OperatorCertificate(cert, "made by a controller's start", time.Now())
	return func(ctx context.Context) error { return st.EnsureAdmin(ctx, firstOperator, c, wrote) }, nil
}
