package controller

import (
	"context"
	"errors"
	"net"
	"sync/atomic"

	grpcprom "github.com/grpc-ecosystem/go-grpc-middleware/providers/prometheus"
	"google.golang.org/grpc"

	"github.com/cakefleet/cakefleet/controller/monitor"
	"github.com/cakefleet/cakefleet/controller/store"
)

// calls measures the calls at all doors, those too that are refused.
type calls struct{ metrics *grpcprom.ServerMetrics }

func newCalls() *calls {
	return &calls{grpcprom.NewServerMetrics(grpcprom.WithServerHandlingTimeHistogram(
		grpcprom.WithHistogramBuckets([]float64{.001, .005, .02, .1, .5, 2, 10}),
	))}
}

// options come before those of the door, so that the door is inside.
func (c *calls) options() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.ChainUnaryInterceptor(c.metrics.UnaryServerInterceptor()),
		grpc.ChainStreamInterceptor(c.metrics.StreamServerInterceptor()),
	}
}

// around measures what an interceptor does with its calls.
func (c *calls) around(inner grpc.UnaryServerInterceptor) grpc.UnaryServerInterceptor {
	outer := c.metrics.UnaryServerInterceptor()
	return func(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
		return outer(ctx, req, info, func(ctx context.Context, req any) (any, error) {
			return inner(ctx, req, info, handler)
		})
	}
}

// watched is the door for whoever runs the controller.
type watched struct {
	monitor *monitor.Monitor
	listen  net.Listener // nil: it is not wanted
	open    atomic.Bool
}

// watch returns the door, behind which there is what the controller knows of
// itself.
func (c *Controller) watch(l net.Listener, st *store.Store, services *grpc.Server, calls *calls, m *metrics) *watched {
	w := &watched{listen: l}
	w.monitor = monitor.New(monitor.Config{
		// The store is in every call's way: if it can't be read, nothing works.
		Live: func() error {
			st.Revision()
			return nil
		},
		Ready: func() error {
			if !w.open.Load() {
				return errors.New("the doors are not open")
			}
			return nil
		},
		Services: services,
		Logger:   c.logger.Named("monitor"),
	})
	calls.metrics.InitializeMetrics(services)
	w.monitor.Registerer().MustRegister(m, calls.metrics)
	return w
}

// opened says that calls are welcome; the store was read before.
func (w *watched) opened() {
	w.open.Store(true)
	w.monitor.SetServing(true)
}

// closing says that calls should go elsewhere.
func (w *watched) closing() {
	w.open.Store(false)
	w.monitor.SetServing(false)
}

// serve answers until ctx ends.
func (w *watched) serve(ctx context.Context) error {
	if w.listen == nil {
		<-ctx.Done()
		return nil
	}
	return w.monitor.Serve(ctx, w.listen)
}
