// Package prometheus has what goes with a fleet's history in Prometheus and
// Grafana: alert rules, the list of metrics, and the dashboards of the folder
// beside it. Its tests hold them against the code.
package prometheus
