package house

import (
	"go/ast"
	"go/parser"
	"go/token"
	"testing"
)

// TestConnectParamsHaveBackoff: grpc.ConnectParams without a Backoff is none at
// all, and not gRPC's own: who cannot be reached is then dialled thousands of
// times a second.
func TestConnectParamsHaveBackoff(t *testing.T) {
	found := 0
	each(t, func(path string) {
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
		if err != nil {
			t.Error(err)
			return
		}
		ast.Inspect(f, func(n ast.Node) bool {
			lit, ok := n.(*ast.CompositeLit)
			if !ok {
				return true
			}
			if sel, ok := lit.Type.(*ast.SelectorExpr); !ok || sel.Sel.Name != "ConnectParams" {
				return true
			}
			found++
			for _, e := range lit.Elts {
				if kv, ok := e.(*ast.KeyValueExpr); ok && kv.Key.(*ast.Ident).Name == "Backoff" {
					return true
				}
			}
			t.Errorf("%s: grpc.ConnectParams without a Backoff", path)
			return true
		})
	})
	if found == 0 {
		t.Error("found no grpc.ConnectParams")
	}
}
