package api

import (
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"

	"github.com/grpc-ecosystem/grpc-gateway/v2/runtime"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/encoding/protojson"

	gateway "github.com/cakefleet/cakefleet/controller/api/gateway"
	"github.com/cakefleet/cakefleet/controller/identity"
	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// MostUpload is how long a file may be that ImportPattern takes, in bytes.
const MostUpload = mostFile

// ImportPattern is where REST takes the file of ImportSubscribers.
const ImportPattern = "POST /v1/subscribers:import"

// gateways registers each service of the operators' door in REST.
var gateways = []func(context.Context, *runtime.ServeMux, *grpc.ClientConn) error{
	gateway.RegisterPlanServiceHandler,
	gateway.RegisterSubscriberServiceHandler,
	gateway.RegisterRouterServiceHandler,
	gateway.RegisterTokenServiceHandler,
	gateway.RegisterJoinServiceHandler,
	gateway.RegisterTelemetryServiceHandler,
	gateway.RegisterScheduleServiceHandler,
	gateway.RegisterAdminServiceHandler,
	gateway.RegisterOperatorServiceHandler,
	gateway.RegisterAuditServiceHandler,
	gateway.RegisterRolloutServiceHandler,
}

// REST is the calls of operators as HTTP. It answers through a gRPC server of
// its own, which only it can reach, so that a call is checked, limited and told
// the same way whatever door it came through.
type REST struct {
	server *grpc.Server
	pipe   *bufconn.Listener
	conn   *grpc.ClientConn
	mux    *runtime.ServeMux
}

// NewREST returns the REST calls of the services that register gets. options
// are those of the server, without credentials. Close ends it.
func NewREST(register func(grpc.ServiceRegistrar), options ...grpc.ServerOption) (*REST, error) {
	r := &REST{server: grpc.NewServer(options...), pipe: bufconn.Listen(256 << 10)}
	register(r.server)
	conn, err := grpc.NewClient("passthrough:///inside",
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return r.pipe.DialContext(ctx) }),
		grpc.WithTransportCredentials(insecure.NewCredentials()), // the pipe never leaves the process
		grpc.WithDisableServiceConfig(),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64<<20)),
	)
	if err != nil {
		return nil, fmt.Errorf("rest: %w", err)
	}
	r.conn = conn
	checkQueries()
	r.mux = runtime.NewServeMux(
		runtime.WithMarshalerOption(runtime.MIMEWildcard, &strictJSON{runtime.JSONPb{
			MarshalOptions:   protojson.MarshalOptions{UseProtoNames: true, EmitDefaultValues: true},
			UnmarshalOptions: protojson.UnmarshalOptions{DiscardUnknown: false},
		}}),
		// Nothing of what a client writes in headers gets inside.
		runtime.WithIncomingHeaderMatcher(func(string) (string, bool) { return "", false }),
		runtime.WithOutgoingHeaderMatcher(func(string) (string, bool) { return "", false }),
		runtime.WithMetadata(func(ctx context.Context, _ *http.Request) metadata.MD {
			return callerOutgoing(identity.CallerFrom(ctx))
		}),
	)
	for _, f := range gateways {
		if err := f(context.Background(), r.mux, conn); err != nil {
			return nil, errors.Join(fmt.Errorf("rest: %w", err), conn.Close())
		}
	}
	return r, nil
}

// callerOutgoing is what callerInside reads.
func callerOutgoing(c identity.Caller) metadata.MD {
	text, err := json.Marshal(c)
	if err != nil {
		panic(err) // strings and a number always have a form
	}
	return metadata.Pairs(callerMetadata, string(text))
}

// Serve answers calls until Close.
func (r *REST) Serve() error { return r.server.Serve(r.pipe) }

// Close ends the calls.
func (r *REST) Close() error {
	err := r.conn.Close()
	r.server.Stop()
	return err
}

// ServeHTTP answers one call. It finds out with identity.CallerFrom who calls.
func (r *REST) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	withQuery(req)
	r.mux.ServeHTTP(w, req)
}

// uploadPiece is how much of a file goes into one message.
const uploadPiece = 256 << 10

// Import answers ImportPattern: the body is the file as it is, the options are
// in the query.
func (r *REST) Import(w http.ResponseWriter, req *http.Request) {
	resp, err := r.upload(req)
	if err != nil {
		_, out := runtime.MarshalerForRequest(r.mux, req)
		runtime.HTTPError(req.Context(), r.mux, out, w, req, err)
		return
	}
	b, err := protojson.MarshalOptions{UseProtoNames: true, EmitDefaultValues: true}.Marshal(resp)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(b) // a client that has gone needs no answer
}

func (r *REST) upload(req *http.Request) (*pb.ImportSubscribersResponse, error) {
	m, err := importOptions(req.URL.Query())
	if err != nil {
		return nil, statusOf(err)
	}
	ctx, cancel := context.WithCancel(metadata.NewOutgoingContext(req.Context(), callerOutgoing(identity.CallerFrom(req.Context()))))
	defer cancel()
	stream, err := pb.NewSubscriberServiceClient(r.conn).ImportSubscribers(ctx)
	if err != nil {
		return nil, err
	}
	buffer := make([]byte, uploadPiece)
	for {
		n, err := io.ReadFull(req.Body, buffer)
		done := errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
		if err != nil && !done {
			return nil, statusOf(badField("chunk", fmt.Errorf("file: %w", err)))
		}
		m.Chunk = buffer[:n]
		if err := stream.Send(m); errors.Is(err, io.EOF) {
			break // CloseAndRecv says why
		} else if err != nil {
			return nil, err
		}
		m = &pb.ImportSubscribersRequest{}
		if done {
			break
		}
	}
	return stream.CloseAndRecv()
}

// importOptions reads the options of an import from a query.
func importOptions(q url.Values) (*pb.ImportSubscribersRequest, error) {
	m := &pb.ImportSubscribersRequest{}
	flags := map[string]*bool{
		"dry_run": &m.DryRun, "remove_missing": &m.RemoveMissing,
		"keep_going": &m.KeepGoing, "allow_mass_change": &m.AllowMassChange,
	}
	for name, values := range q {
		text := values[len(values)-1]
		var err error
		if to, ok := flags[name]; ok {
			if *to, err = strconv.ParseBool(text); err != nil {
				return nil, badField(name, fmt.Errorf("%s: %q is neither true nor false", name, text))
			}
			continue
		}
		if name != "mass_change_percent" {
			return nil, badField(name, fmt.Errorf("%q is not an option of an import", name))
		}
		percent, err := strconv.ParseUint(text, 10, 8)
		if err != nil {
			return nil, badField(name, fmt.Errorf("%s: %q is not a number of per cent", name, text))
		}
		m.MassChangePercent = uint32(percent)
	}
	return m, nil
}

//go:embed gateway/openapi.swagger.json
var generatedAPI []byte

// OpenAPI returns the description of the REST calls (OpenAPI 2.0, JSON).
func OpenAPI(version string) ([]byte, error) {
	var doc map[string]any
	if err := json.Unmarshal(generatedAPI, &doc); err != nil {
		return nil, fmt.Errorf("openapi: %w", err)
	}
	doc["info"] = map[string]any{
		"title": "cakefleet", "version": version,
		"description": "A fleet of CAKE-shaping routers. 64-bit numbers are strings, as JSON numbers can't hold them.",
	}
	doc["securityDefinitions"] = map[string]any{
		"token":    map[string]any{"type": "apiKey", "in": "header", "name": "Authorization", "description": "Bearer and an operator's token"},
		"password": map[string]any{"type": "basic", "description": "any name, and an operator's token as the password"},
	}
	doc["security"] = []any{map[string]any{"token": []any{}}, map[string]any{"password": []any{}}}
	// Sessions and enrollment are not calls of this door.
	var tags []any
	for _, t := range doc["tags"].([]any) {
		if name := t.(map[string]any)["name"]; name != "SessionService" && name != "PeerService" && name != "EnrollmentService" {
			tags = append(tags, t)
		}
	}
	doc["tags"] = tags
	doc["paths"].(map[string]any)["/v1/subscribers:import"] = importPath()
	b, err := json.MarshalIndent(doc, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("openapi: %w", err)
	}
	return b, nil
}

// importPath describes ImportPattern, which is not made from a message.
func importPath() map[string]any {
	parameters := []any{map[string]any{
		"name": "file", "in": "body", "required": true,
		"schema": map[string]any{"type": "string", "format": "binary"},
	}}
	for _, name := range []string{"dry_run", "remove_missing", "keep_going", "allow_mass_change"} {
		parameters = append(parameters, map[string]any{"name": name, "in": "query", "type": "boolean"})
	}
	parameters = append(parameters, map[string]any{"name": "mass_change_percent", "in": "query", "type": "integer"})
	return map[string]any{"post": map[string]any{
		"summary":     "ImportSubscribers reads a CSV or JSON file, which is the body as it is, and makes the store like it, all at once.",
		"operationId": "SubscriberService_ImportSubscribers",
		"consumes":    []any{"text/csv", "application/json"},
		"parameters":  parameters,
		"tags":        []any{"SubscriberService"},
		"responses": map[string]any{
			"200":     map[string]any{"description": "What it changes.", "schema": map[string]any{"$ref": "#/definitions/ImportSubscribersResponse"}},
			"default": map[string]any{"description": "An unexpected error response.", "schema": map[string]any{"$ref": "#/definitions/rpc.Status"}},
		},
	}}
}

// ServeOpenAPI answers with the description of the REST calls.
func ServeOpenAPI(version string) (http.Handler, error) {
	b, err := OpenAPI(version)
	if err != nil {
		return nil, err
	}
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(b) // a client that has gone needs no answer
	}), nil
}
