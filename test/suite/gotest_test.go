package main

import (
	"strings"
	"testing"
)

func TestReadEvents(t *testing.T) {
	const in = `{"Action":"start","Package":"p"}
{"Action":"run","Package":"p","Test":"TestGood"}
{"Action":"output","Package":"p","Test":"TestGood","Output":"=== RUN   TestGood\n"}
{"Action":"output","Package":"p","Test":"TestGood","Output":"    good_test.go:3: quiet\n"}
{"Action":"pass","Package":"p","Test":"TestGood"}
{"Action":"output","Package":"p","Test":"TestBad","Output":"=== RUN   TestBad\n"}
{"Action":"output","Package":"p","Test":"TestBad","Output":"    bad_test.go:7: got 1, want 2\n"}
{"Action":"output","Package":"p","Test":"TestBad","Output":"--- FAIL: TestBad (0.00s)\n"}
{"Action":"fail","Package":"p","Test":"TestBad"}
{"Action":"output","Package":"p","Test":"TestRoot","Output":"    root_test.go:9: needs root\n"}
{"Action":"output","Package":"p","Test":"TestRoot","Output":"--- SKIP: TestRoot (0.00s)\n"}
{"Action":"skip","Package":"p","Test":"TestRoot"}
{"Action":"output","Package":"p","Test":"TestHangs","Output":"panic: test timed out\n"}
{"Action":"output","Package":"p","Output":"FAIL\tp\t0.1s\n"}
{"Action":"fail","Package":"p"}
{"Action":"output","Package":"q","Output":"PASS\n"}
{"Action":"output","Package":"q","Output":"ok  \tq\t0.2s\n"}
{"Action":"pass","Package":"q"}
`
	var out strings.Builder
	res := readEvents(strings.NewReader(in), &out)
	if res.passed != 1 || res.failed != 2 {
		t.Errorf("passed %d, failed %d; want 1 and 2", res.passed, res.failed)
	}
	if len(res.skips) != 1 || res.skips[0] != (skip{"p TestRoot", "needs root"}) {
		t.Errorf("skips: %+v", res.skips)
	}
	const want = `    bad_test.go:7: got 1, want 2
--- FAIL: TestBad (0.00s)
--- SKIP: TestRoot: needs root
FAIL	p	0.1s
panic: test timed out
ok  	q	0.2s
`
	if out.String() != want {
		t.Errorf("printed:\n%s\nwant:\n%s", out.String(), want)
	}
}
