package history

import (
	"strings"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/histogram"
	"github.com/prometheus/prometheus/model/labels"

	"github.com/cakefleet/cakefleet/engine"
)

// Names of metrics. Counters of a direction count what was delivered; those of a
// tin what came into it, as tc does for both.
const (
	SentBytes   = "cakefleet_sent_bytes_total"
	SentPackets = "cakefleet_sent_packets_total"
	Dropped     = "cakefleet_dropped_packets_total"
	Marked      = "cakefleet_marked_packets_total"
	Sojourn     = "cakefleet_sojourn_seconds"

	TinBytes   = "cakefleet_tin_bytes_total"
	TinPackets = "cakefleet_tin_packets_total"
	TinDropped = "cakefleet_tin_dropped_packets_total"
	TinMarked  = "cakefleet_tin_marked_packets_total"
	TinSojourn = "cakefleet_tin_sojourn_seconds"

	Shaped      = "cakefleet_shaped_bits_per_second"
	Load        = "cakefleet_load_bits_per_second"
	Utilisation = "cakefleet_utilisation_ratio"
	Saturated   = "cakefleet_saturated_routers"

	Routers   = "cakefleet_routers"
	Reporting = "cakefleet_reporting_routers"
	AgentCPU  = "cakefleet_agent_cpu_seconds_total"
	AgentRSS  = "cakefleet_agent_memory_bytes"
	Starts    = "cakefleet_agent_starts_total"
	Cut       = "cakefleet_link_down_routers"
	Losses    = "cakefleet_link_carrier_losses_total"
	Reports   = "cakefleet_reports_total"
	Start     = "cakefleet_group_start_time_seconds"

	ProbeDelay = "cakefleet_probe_delay_seconds"
	ProbeLost  = "cakefleet_probe_lost_total"

	RouterSentBytes = "cakefleet_router_sent_bytes_total"
	RouterSojourn   = "cakefleet_router_sojourn_p99_seconds"
)

// Labels of series.
const (
	LabelBy         = "by"         // the dimension of the group: all, plan, site, model, version or a label
	LabelDirection  = "direction"  // down or up
	LabelTin        = "tin"        // as tc names it
	LabelLoad       = "load"       // of the line while a delay was measured: idle, light, down, up or both
	LabelRouter     = "router"     // its id
	LabelController = "controller" // who counted it
)

// Metric describes one metric.
type Metric struct {
	Name, Type, Help string
	Labels           []string // beside controller
}

// Unit returns the unit of a metric, which is in its name; empty if it counts.
func (m Metric) Unit() string {
	name := strings.TrimSuffix(m.Name, "_total")
	for _, unit := range []string{"bits_per_second", "seconds", "bytes", "packets", "routers", "ratio"} {
		if strings.HasSuffix(name, "_"+unit) {
			return unit
		}
	}
	return ""
}

// Metrics returns all metrics that are written. "GROUP" stands for the label
// named like the dimension.
func Metrics() []Metric {
	group := []string{LabelBy, "GROUP"}
	direction := append(group[:2:2], LabelDirection)
	tin := append(direction[:3:3], LabelTin)
	load := append(group[:2:2], LabelLoad)
	router := []string{LabelRouter, LabelDirection}
	return []Metric{
		{SentBytes, "counter", "Bytes delivered by the routers of a group.", direction},
		{SentPackets, "counter", "Packets delivered.", direction},
		{Dropped, "counter", "Packets dropped by the queue control, the memory limit and the ACK filter.", direction},
		{Marked, "counter", "Packets marked CE.", direction},
		{Sojourn, "histogram", "Time that delivered packets had been queued, of all packets of all routers.", direction},
		{TinBytes, "counter", "Bytes that came into a tin.", tin},
		{TinPackets, "counter", "Packets that came into a tin.", tin},
		{TinDropped, "counter", "Packets dropped in a tin.", tin},
		{TinMarked, "counter", "Packets marked CE in a tin.", tin},
		{TinSojourn, "histogram", "Time that delivered packets of a tin had been queued.", tin},
		{Shaped, "gauge", "Sum of the rates that routers are shaped to, of those whose reports come.", direction},
		{Load, "gauge", "Sum of what they delivered between their latest two reports.", direction},
		{Utilisation, "gauge", "Load as a share of what they are shaped to.", direction},
		{Saturated, "gauge", "Routers that delivered nine tenths of their rate or more between their latest two reports.", direction},
		{Routers, "gauge", "Routers of a group that have reported to this controller.", group},
		{Reporting, "gauge", "Those of them whose reports come.", group},
		{AgentCPU, "counter", "CPU time that agents used.", group},
		{AgentRSS, "gauge", "Sum of the agents' resident memory, of those whose reports come.", group},
		{Starts, "counter", "Starts of agents.", group},
		{Cut, "gauge", "Routers whose reports come and whose shaped interface is not there, down or without carrier.", group},
		{Losses, "counter", "Times that a shaped interface lost its carrier.", group},
		{ProbeDelay, "histogram", "Delay to a host and back, where it is measured, by the load of the line.", load},
		{ProbeLost, "counter", "Echoes without an answer.", load},
		{Reports, "counter", "Reports that were counted.", group},
		{Start, "gauge", "When the counters of a group began at 0, in seconds since 1970.", group},
		{RouterSentBytes, "counter", "Bytes delivered by a router.", router},
		{RouterSojourn, "gauge", "The sojourn time that 99 of 100 packets stayed below, between a router's latest two reports.", router},
	}
}

// GroupLabel returns the label that holds a group's value: its dimension in the
// characters that labels may have.
func GroupLabel(by string) string {
	return strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '_' {
			return r
		}
		return '_'
	}, by)
}

// bounds are the upper ends of all buckets but the last, in seconds.
func bounds() []float64 {
	all := make([]float64, engine.HistogramBuckets-1)
	for i := range all {
		_, high := engine.BucketBounds(i)
		all[i] = high.Seconds()
	}
	return all
}

// native returns h as a native histogram. Its sum is that of the buckets'
// middles. custom are the bounds, which are shared.
func native(h *engine.Histogram, custom []float64) *histogram.Histogram {
	first, end := 0, len(h)
	for end > 0 && h[end-1] == 0 {
		end--
	}
	for first < end && h[first] == 0 {
		first++
	}
	n := &histogram.Histogram{Schema: histogram.CustomBucketsSchema, CustomValues: custom}
	if first == end {
		return n
	}
	n.PositiveSpans = []histogram.Span{{Offset: int32(first), Length: uint32(end - first)}}
	n.PositiveBuckets = make([]int64, end-first)
	var before uint64
	for i, v := range h[first:end] {
		n.PositiveBuckets[i] = int64(v - before)
		before = v
		low, high := engine.BucketBounds(first + i)
		n.Count += v
		n.Sum += float64(v) * ((low + high) / 2).Seconds()
	}
	return n
}

// addNative adds what native made to h; with sign -1 it takes it away.
func addNative(h *engine.Histogram, n *histogram.Histogram, sign int64) {
	at, k := 0, 0
	var v int64
	for _, s := range n.PositiveSpans {
		at += int(s.Offset)
		for range s.Length {
			v += n.PositiveBuckets[k]
			k++
			if at < len(h) {
				h[at] += uint64(sign * v)
			}
			at++
		}
	}
}

// series names the series of one group, direction and tin.
func (c *Config) series(metric string, pairs ...string) labels.Labels {
	return labels.FromStrings(append([]string{model.MetricNameLabel, metric, LabelController, c.Controller}, pairs...)...)
}
