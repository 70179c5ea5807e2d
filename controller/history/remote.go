package history

import (
	"fmt"
	"net/url"
	"time"

	remoteapi "github.com/prometheus/client_golang/exp/api/remote"
	common "github.com/prometheus/common/config"
	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/config"
	"github.com/prometheus/prometheus/storage/remote"
	"github.com/prometheus/prometheus/tsdb"
)

// Remote is a cluster that everything is sent to by remote-write.
type Remote struct {
	URL string // of its remote-write endpoint
	// Version of the protocol, 1 or 2; 0 is 1. With 2 sojourn histograms go as
	// they are, native ones with custom buckets. With 1, which has no words for
	// them, they go as classic ones, with a series for each bucket.
	Version int
	Token   string // for Authorization: Bearer; empty: none
}

func (r *Remote) validate() error {
	u, err := url.Parse(r.URL)
	switch {
	case err != nil:
		return fmt.Errorf("remote write: %w", err)
	case u.Scheme != "http" && u.Scheme != "https" || u.Host == "":
		return fmt.Errorf("remote write %q: must be a URL like https://metrics.example.net/api/v1/write", r.URL)
	case r.Version < 0 || r.Version > 2:
		return fmt.Errorf("remote write %q: version %d of the protocol: must be 1 or 2", r.URL, r.Version)
	}
	return nil
}

// flushTime is how long the queue may take to empty itself at the end.
const flushTime = 5 * time.Second

// remotes sends what is written to a database on. Its queue is the database's
// log on disk: what can't be sent is sent when it can, for as long as the log
// goes back, which is two to three hours.
type remotes struct{ storage *remote.Storage }

// newRemotes returns nil if there are none.
func newRemotes(c *Config, db *tsdb.DB) (*remotes, error) {
	if len(c.Remotes) == 0 {
		return nil, nil
	}
	conf := &config.Config{GlobalConfig: config.DefaultGlobalConfig}
	for _, r := range c.Remotes {
		u, err := url.Parse(r.URL)
		if err != nil {
			return nil, err
		}
		w := config.DefaultRemoteWriteConfig
		w.URL = &common.URL{URL: u}
		w.ProtobufMessage = remoteapi.WriteV1MessageType
		w.ConvertNHCBToClassic = true
		if r.Version == 2 {
			w.ProtobufMessage = remoteapi.WriteV2MessageType
			w.ConvertNHCBToClassic, w.SendNativeHistograms = false, true
		}
		w.QueueConfig.BatchSendDeadline = model.Duration(time.Second)
		w.MetadataConfig.Send = false // there is nobody that scrapes, whose metadata it would be
		if r.Token != "" {
			w.HTTPClientConfig.Authorization = &common.Authorization{Type: "Bearer", Credentials: common.Secret(r.Token)}
		}
		conf.RemoteWriteConfigs = append(conf.RemoteWriteConfigs, &w)
	}
	h := History{logger: c.Logger}
	s := remote.NewStorage(h.slog(), c.Registerer, db.StartTime, db.Dir(), flushTime, nil, false)
	if err := s.ApplyConfig(conf); err != nil {
		return nil, fmt.Errorf("remote write: %w", err)
	}
	db.SetWriteNotified(s)
	return &remotes{s}, nil
}

func (r *remotes) close() { _ = r.storage.Close() } // what it could not send it sends when it is opened again
