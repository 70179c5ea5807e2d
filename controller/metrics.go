package controller

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/cakefleet/cakefleet/controller/door"
	"github.com/cakefleet/cakefleet/controller/fleet"
	"github.com/cakefleet/cakefleet/controller/history"
	"github.com/cakefleet/cakefleet/controller/store"
	"github.com/cakefleet/cakefleet/controller/telemetry"
)

// etcdTime is how long etcd has to say how it is, within a scrape.
const etcdTime = 3 * time.Second

// metrics reads what the parts know when somebody asks. The names follow
// Prometheus: base units, _total for what only grows.
type metrics struct {
	store  *store.Store
	hub    *fleet.Hub
	agents *door.Server
	table  *telemetry.Table
	past   *history.History // nil: none is kept
	info   prometheus.Gauge
}

func newMetrics(version string, st *store.Store, hub *fleet.Hub, agents *door.Server, table *telemetry.Table, past *history.History) *metrics {
	info := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "cakefleet_build_info", Help: "1, with the version of the controller.", ConstLabels: prometheus.Labels{"version": version},
	})
	info.Set(1)
	return &metrics{st, hub, agents, table, past, info}
}

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("cakefleet_"+name, help, labels, nil)
}

var (
	sessionsDesc    = desc("sessions", "Routers that are connected to this controller.")
	connectionsDesc = desc("agent_connections", "Connections at the agents' door.")
	refusedDesc     = desc("agent_connections_refused_total", "Connections that found the agents' door full.")
	rateDesc        = desc("agent_admit_rate", "Connections that the agents' door admits each second now: --admit-rate, or less while the CPU does not keep up.")
	admittedDesc    = desc("agent_admitted_total", "Connections that the agents' door has admitted.")
	offeredDesc     = desc("agent_admit_offered_total", "Connections that the agents' door would have admitted if always one had waited: agent_admit_rate over time.")
	limitedDesc     = desc("agent_admit_limited_seconds_total", "Time in which connections waited for the rate of the agents' door.")
	pushesDesc      = desc("pushes_total", "Desired states that were sent to routers.")
	answersDesc     = desc("push_answers_total", "Answers of routers, by outcome: applied, clamped, rejected.", "outcome")
	recordsDesc     = desc("records", "What is stored, by kind.", "kind")
	unservedDesc    = desc("unserved", "Subscribers that no router serves, and routers that serve nobody: nothing is shaped for them.", "kind")
	revisionDesc    = desc("store_revision", "Revision up to which this controller knows the store.")
	reportsDesc     = desc("reports_total", "Reports of routers, by what became of them.", "result")
	agentStartsDesc = desc("agent_starts_total", "Starts of agents that reports tell of.")
	resetsDesc      = desc("counter_resets_total", "Counters of routers that began again, by why: restarted in the same life of the agent, or wrapped at 32 bits.", "reason")
	handoversDesc   = desc("handovers_total", "Routers whose counting went on here after another controller, or after this one had started.")
	clocksDesc      = desc("router_clock_faults_total", "Times that a router's clock ran more than a second and a tenth apart from the controller's between two reports.")
	overflowDesc    = desc("rollup_overflow_total", "Times that a group was not made because of --rollup-groups.")
	historyUpDesc   = desc("history_up", "Whether the history is open and its newest step was written.")
	historyStepDesc = desc("history_steps_total", "Steps of the history, by what became of them: written, missed.", "result")
	seriesDesc      = desc("history_series", "Series that the history has in memory.")
	unkeptDesc      = desc("history_routers_without_series", "Routers that have no series of their own because of the bound.")
	oldestDesc      = desc("history_oldest_timestamp_seconds", "Time of the oldest sample of the history.")
	etcdUpDesc      = desc("etcd_up", "Whether a member of etcd answers.", "endpoint")
	etcdSizeDesc    = desc("etcd_size_bytes", "Size of etcd's database file.", "endpoint")
	etcdInUseDesc   = desc("etcd_in_use_bytes", "What of etcd's database file is in use.", "endpoint")
	etcdQuotaDesc   = desc("etcd_quota_bytes", "Size of the file above which etcd refuses writes.", "endpoint")
	etcdFullDesc    = desc("etcd_full", "Whether etcd refuses writes because of its quota.")
)

// Describe says nothing: what is read depends on etcd.
func (m *metrics) Describe(chan<- *prometheus.Desc) {}

// Collect reads everything.
func (m *metrics) Collect(out chan<- prometheus.Metric) {
	m.info.Collect(out)
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	count := func(d *prometheus.Desc, v uint64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
	}
	c := m.hub.Counts()
	gauge(sessionsDesc, float64(m.hub.Sessions()))
	gauge(connectionsDesc, float64(m.agents.Len()))
	count(refusedDesc, m.agents.Refused())
	gauge(rateDesc, m.agents.Rate())
	admission := m.agents.Admission()
	count(admittedDesc, admission.Admitted)
	out <- prometheus.MustNewConstMetric(offeredDesc, prometheus.CounterValue, admission.Offered)
	out <- prometheus.MustNewConstMetric(limitedDesc, prometheus.CounterValue, admission.Limited.Seconds())
	count(pushesDesc, c.Pushes)
	count(answersDesc, c.Applied, "applied")
	count(answersDesc, c.Clamped, "clamped")
	count(answersDesc, c.Rejected, "rejected")
	f := m.table.Faults()
	for result, n := range map[string]uint64{"taken": f.Reports, "old": f.Old, "unknown": f.Unknown, "refused": f.Refused, "lost": f.Lost} {
		count(reportsDesc, n, result)
	}
	count(agentStartsDesc, f.Reboots)
	count(resetsDesc, f.Restarts, "restarted")
	count(resetsDesc, f.Wraps, "wrapped")
	count(handoversDesc, f.Handovers)
	count(clocksDesc, f.Clock)
	count(overflowDesc, m.table.Groups().Overflow())
	if m.past != nil {
		m.collectHistory(gauge, count)
	}
	var revision, plans, subscribers, routers, unserved, idle int
	m.store.View(func(st *store.State) {
		revision = int(st.Revision())
		plans, subscribers, routers = st.Len()
		unserved, idle = st.Unserved()
	})
	gauge(unservedDesc, float64(unserved), string(store.KindSubscriber))
	gauge(unservedDesc, float64(idle), string(store.KindRouter))
	gauge(revisionDesc, float64(revision))
	gauge(recordsDesc, float64(plans), string(store.KindPlan))
	gauge(recordsDesc, float64(subscribers), string(store.KindSubscriber))
	gauge(recordsDesc, float64(routers), string(store.KindRouter))
	m.collectEtcd(gauge)
}

func (m *metrics) collectHistory(gauge func(*prometheus.Desc, float64, ...string), count func(*prometheus.Desc, uint64, ...string)) {
	st := m.past.Status()
	gauge(historyUpDesc, one(st.Running))
	count(historyStepDesc, st.Steps, "written")
	count(historyStepDesc, st.Missed, "missed")
	gauge(seriesDesc, float64(st.Series))
	gauge(unkeptDesc, float64(st.Unkept))
	if !st.Oldest.IsZero() {
		gauge(oldestDesc, float64(st.Oldest.UnixMilli())/1000)
	}
}

// one is 1 for true.
func one(yes bool) float64 {
	if yes {
		return 1
	}
	return 0
}

func (m *metrics) collectEtcd(gauge func(*prometheus.Desc, float64, ...string)) {
	ctx, cancel := context.WithTimeout(context.Background(), etcdTime)
	defer cancel()
	st, err := m.store.EtcdStatus(ctx)
	if err != nil {
		gauge(etcdUpDesc, 0, "")
		return
	}
	for _, e := range st.Members {
		if e.Err != nil {
			gauge(etcdUpDesc, 0, e.Endpoint)
			continue
		}
		gauge(etcdUpDesc, 1, e.Endpoint)
		gauge(etcdSizeDesc, float64(e.Size), e.Endpoint)
		gauge(etcdInUseDesc, float64(e.InUse), e.Endpoint)
		gauge(etcdQuotaDesc, float64(e.Quota), e.Endpoint)
	}
	gauge(etcdFullDesc, one(st.Full()))
}
