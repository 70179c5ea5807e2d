package history_test

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	remoteapi "github.com/prometheus/client_golang/exp/api/remote"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/storage/remote"
	"github.com/prometheus/prometheus/tsdb"
	"github.com/prometheus/prometheus/tsdb/chunkenc"

	"github.com/cakefleet/cakefleet/controller/history"
)

// program starts a server that is installed, and ends it with the test.
func program(t *testing.T, pkg string, names []string, args func(listen, dir string) []string) (address string) {
	t.Helper()
	var path string
	for _, n := range names {
		if p, err := exec.LookPath(n); err == nil {
			path = p
			break
		}
	}
	if path == "" {
		t.Skipf("%s is missing; install %s", names[0], pkg)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address = l.Addr().String()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	out, err := os.Create(filepath.Join(t.TempDir(), "log"))
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), path, args(address, t.TempDir())...)
	cmd.Stdout, cmd.Stderr = out, out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // it may have ended
		_ = cmd.Wait()
		if t.Failed() {
			log, err := os.ReadFile(out.Name())
			t.Logf("%s says (%v):\n%s", path, err, log)
		}
		_ = out.Close()
	})
	return address
}

// ask returns the only value of an instant query over the HTTP API, as soon as
// there is one that is wanted.
func ask(t *testing.T, address, query string, at time.Time, want func(v float64) bool) {
	t.Helper()
	said := "nothing"
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(100 * time.Millisecond) {
		resp, err := http.Get("http://" + address + "/api/v1/query?time=" + fmt.Sprint(at.Unix()) + "&query=" + url.QueryEscape(query))
		if err != nil {
			said = err.Error()
			continue
		}
		var got struct {
			Data struct {
				Result []struct{ Value [2]any }
			}
		}
		err = json.NewDecoder(resp.Body).Decode(&got)
		_ = resp.Body.Close()
		if err != nil || len(got.Data.Result) != 1 {
			said = fmt.Sprint(len(got.Data.Result), " results ", err)
			continue
		}
		said = fmt.Sprint(got.Data.Result[0].Value[1])
		if v, err := strconv.ParseFloat(said, 64); err == nil && want(v) {
			return
		}
	}
	t.Errorf("%s says %s", query, said)
}

// TestRemoteWrite sends a history to clusters as they are installed, and asks
// them for what was counted.
func TestRemoteWrite(t *testing.T) {
	for _, c := range []struct {
		name, pkg, path string
		programs        []string
		args            func(listen, dir string) []string
	}{
		{"prometheus", "prometheus", "/api/v1/write", []string{"prometheus"}, func(listen, dir string) []string {
			file := filepath.Join(dir, "prometheus.yml")
			if err := os.WriteFile(file, []byte("global: {}\n"), 0o600); err != nil {
				t.Fatal(err)
			}
			return []string{"--config.file=" + file, "--storage.tsdb.path=" + filepath.Join(dir, "data"), "--web.listen-address=" + listen, "--web.enable-remote-write-receiver"}
		}},
		{"victoria-metrics", "victoria-metrics", "/api/v1/write", []string{"victoria-metrics", "victoria-metrics-prod"}, func(listen, dir string) []string {
			return []string{"-storageDataPath=" + dir, "-httpListenAddr=" + listen, "-retentionPeriod=1", "-search.latencyOffset=0s"}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			address := program(t, c.pkg, c.programs, c.args)
			f := newFeed(newTable())
			h := open(t, history.Config{Dir: t.TempDir(), Table: f.table, Routers: 3, Remotes: []history.Remote{{URL: "http://" + address + c.path}}})
			now := time.Now().Add(-10 * time.Minute).Truncate(time.Second)
			h.Open(now)
			// What is older than the queue's beginning counts as sent.
			time.Sleep(time.Second)
			now = time.Now().Truncate(time.Second)
			for range 5 {
				now = now.Add(time.Second)
				if err := f.report(6, now); err != nil {
					t.Fatal(err)
				}
				step(t, h, now)
			}
			ask(t, address, `cakefleet_reports_total{by="all"}`, now, func(v float64) bool { return v == 30 })
			total := f.sojourn["plan0"].Total()
			ask(t, address, `cakefleet_sent_packets_total{by="plan",plan="plan0",direction="down"}`, now, func(v float64) bool { return v == float64(total) })
			p99 := f.sojourn["plan0"].Quantile(99, 100).Seconds()
			ask(t, address, `histogram_quantile(0.99, sum by (le) (cakefleet_sojourn_seconds_bucket{by="plan",plan="plan0",direction="down"}))`, now,
				func(v float64) bool { return v > p99/1.126 && v < p99*1.126 })
		})
	}
}

// TestRemoteWriteVersion2 sends native histograms to the library's own receiver,
// which at first is not there.
func TestRemoteWriteVersion2(t *testing.T) {
	o := tsdb.DefaultOptions()
	db, err := tsdb.Open(t.TempDir(), nil, nil, o, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	receiver := remote.NewWriteHandler(slog.New(slog.DiscardHandler), prometheus.NewRegistry(), db, remoteapi.MessageTypes{remoteapi.WriteV2MessageType}, false, false)
	var away atomic.Bool
	away.Store(true)
	var refused atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if away.Load() || r.Header.Get("Authorization") != "Bearer secret" {
			refused.Add(1)
			http.Error(w, "away", http.StatusServiceUnavailable)
			return
		}
		receiver.ServeHTTP(w, r)
	}))
	t.Cleanup(server.Close)
	f := newFeed(newTable())
	h := open(t, history.Config{Dir: t.TempDir(), Table: f.table, Remotes: []history.Remote{{URL: server.URL, Version: 2, Token: "secret"}}})
	h.Open(time.Now())
	time.Sleep(100 * time.Millisecond)
	now := time.Now().Truncate(time.Second)
	for range 5 {
		now = now.Add(time.Second)
		if err := f.report(6, now); err != nil {
			t.Fatal(err)
		}
		step(t, h, now)
	}
	for deadline := time.Now().Add(time.Minute); refused.Load() == 0 && time.Now().Before(deadline); {
		time.Sleep(10 * time.Millisecond)
	}
	if refused.Load() == 0 {
		t.Fatal("nothing was sent")
	}
	away.Store(false)
	want := f.sojourn["plan0"]
	var got uint64
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline) && got != want.Total(); time.Sleep(50 * time.Millisecond) {
		got = received(t, db, now)
	}
	if got != want.Total() {
		t.Errorf("%d sojourn times came, want %d", got, want.Total())
	}
}

// received returns the count of the histogram that came at a time; 0 if none.
func received(t *testing.T, db *tsdb.DB, at time.Time) uint64 {
	t.Helper()
	q, err := db.Querier(at.UnixMilli(), at.UnixMilli())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = q.Close() }()
	set := q.Select(t.Context(), false, nil, labels.MustNewMatcher(labels.MatchEqual, model.MetricNameLabel, history.Sojourn),
		labels.MustNewMatcher(labels.MatchEqual, "plan", "plan0"), labels.MustNewMatcher(labels.MatchEqual, history.LabelDirection, "down"))
	for set.Next() {
		if it := set.At().Iterator(nil); it.Next() == chunkenc.ValHistogram {
			_, h := it.AtHistogram(nil)
			return h.Count
		}
	}
	return 0
}
