package ctl

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "github.com/cakefleet/cakefleet/proto/cakefleet/v1"
)

// The words of the roles, in order of what they may.
var operatorRoles = []string{"viewer", "operator", "admin"}

// parseRole returns the role with a name.
func parseRole(word string) (pb.OperatorRole, error) {
	for i, r := range operatorRoles {
		if r == word {
			return pb.OperatorRole(i + 1), nil
		}
	}
	return 0, fmt.Errorf("--role %q: must be %s", word, strings.Join(operatorRoles, ", "))
}

func roleWord(r pb.OperatorRole) string {
	if r < 1 || int(r) > len(operatorRoles) {
		return ""
	}
	return operatorRoles[r-1]
}

func (a *app) operatorCommand() *cobra.Command {
	c := group("operator", "Say who may use cakefleetctl and the REST calls, and as what",
		a.operatorList(), a.operatorShow(), a.operatorCreate(), a.operatorSet(), a.operatorDelete(),
		a.operatorToken(), a.operatorCertificate(), a.operatorRevoke())
	c.Long = `Say who may use cakefleetctl and the REST calls, and as what.

A viewer looks, and personal fields are hidden; an operator also changes what
routers do; an admin also decides who may do what. They come in with a
certificate, or with a token, which programs such as Grafana can have too:

  cakefleetctl operator create noc --role viewer
  cakefleetctl operator token noc --ttl 2160h --note grafana
  CAKEFLEET_TOKEN=cfo1... cakefleetctl whoami

If the controller was started with --oidc-issuer, a token of that identity
provider does as well, with the fleet's authority to know the controller by:

  CAKEFLEET_TOKEN=eyJ... cakefleetctl --credentials ca.pem whoami

The first admin is the one whose operator.pem the controller wrote at its first
start. If no admin can come in any more, remove that file and start the
controller again.`
	return c
}

func (a *app) whoamiCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "whoami",
		Short: "Say who the controller takes you for",
		Args:  noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			conn, err := a.connect()
			if err != nil {
				return err
			}
			resp, err := call(c.Context(), a, conn.operators.WhoAmI, &pb.WhoAmIRequest{})
			if err != nil {
				return err
			}
			if a.output == "json" {
				return a.printJSON(resp)
			}
			fmt.Fprintf(a.cfg.Stdout, "%s, %s, by %s, from %s\n", resp.GetName(), roleWord(resp.GetRole()), resp.GetVia(), resp.GetAddress())
			return nil
		},
	}
}

// operators returns all operators.
func (a *app) operators(c *cobra.Command) ([]*pb.Operator, error) {
	conn, err := a.connect()
	if err != nil {
		return nil, err
	}
	var all []*pb.Operator
	for req := (&pb.ListOperatorsRequest{}); ; {
		resp, err := call(c.Context(), a, conn.operators.ListOperators, req)
		if err != nil {
			return nil, err
		}
		all = append(all, resp.GetOperators()...)
		if req.PageToken = resp.GetNextPageToken(); req.PageToken == "" {
			return all, nil
		}
	}
}

func (a *app) operatorList() *cobra.Command {
	return &cobra.Command{
		Use:   "list",
		Short: "Show the operators",
		Args:  noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			all, err := a.operators(c)
			if err != nil {
				return err
			}
			if a.output == "json" {
				return a.printJSON(&pb.ListOperatorsResponse{Operators: all})
			}
			t := a.table("OPERATOR", "ROLE", "CERTIFICATES", "TOKENS", "CHANGED")
			for _, o := range all {
				n := map[pb.OperatorCredential_Kind]int{}
				for _, x := range o.GetCredentials() {
					if x.GetExpireTime().AsTime().After(a.now()) {
						n[x.GetKind()]++
					}
				}
				t.row(o.GetName(), roleWord(o.GetRole()), fmt.Sprint(n[pb.OperatorCredential_KIND_CERTIFICATE]), fmt.Sprint(n[pb.OperatorCredential_KIND_TOKEN]), a.ago(o.GetUpdateTime()))
			}
			return t.end(a, "no operators")
		},
	}
}

func (a *app) operatorShow() *cobra.Command {
	return &cobra.Command{
		Use:   "show OPERATOR",
		Short: "Show the certificates and tokens of an operator, without secrets",
		Args:  exactly("OPERATOR"),
		RunE: func(c *cobra.Command, args []string) error {
			all, err := a.operators(c)
			if err != nil {
				return err
			}
			for _, o := range all {
				if o.GetName() != args[0] {
					continue
				}
				if a.output == "json" {
					return a.printJSON(o)
				}
				fmt.Fprintf(a.cfg.Stdout, "%s, %s\n", o.GetName(), roleWord(o.GetRole()))
				t := a.table("ID", "KIND", "AT MOST", "MADE", "ENDS", "NOTE")
				for _, x := range o.GetCredentials() {
					kind := "certificate"
					if x.GetKind() == pb.OperatorCredential_KIND_TOKEN {
						kind = "token"
					}
					t.row(x.GetId(), kind, roleWord(x.GetRole()), a.ago(x.GetCreateTime()), a.ago(x.GetExpireTime()), x.GetNote())
				}
				return t.end(a, "can't come in: has neither a certificate nor a token")
			}
			return failure{fmt.Errorf("operator %s: not found", args[0])}
		},
	}
}

func (a *app) operatorCreate() *cobra.Command {
	var role string
	c := &cobra.Command{
		Use:   "create OPERATOR --role ROLE",
		Short: "Add an operator, who then needs a token or a certificate",
		Args:  exactly("OPERATOR"),
		RunE: func(c *cobra.Command, args []string) error {
			r, err := parseRole(role)
			if err != nil {
				return err
			}
			conn, err := a.connect()
			if err != nil {
				return err
			}
			resp, err := call(c.Context(), a, conn.operators.CreateOperator, &pb.CreateOperatorRequest{Name: args[0], Role: r})
			if err != nil {
				return err
			}
			if a.output == "json" {
				return a.printJSON(resp)
			}
			fmt.Fprintf(a.cfg.Stdout, "operator %s is %s\n", args[0], role)
			a.note("now give it something to come in with: cakefleetctl operator token %s, or operator certificate %s --out FILE", args[0], args[0])
			return nil
		},
	}
	c.Flags().StringVar(&role, "role", "", "what it may do: viewer, operator or admin")
	must(c.MarkFlagRequired("role"))
	must(c.RegisterFlagCompletionFunc("role", cobra.FixedCompletions(operatorRoles, cobra.ShellCompDirectiveNoFileComp)))
	return c
}

func (a *app) operatorSet() *cobra.Command {
	var role string
	c := &cobra.Command{
		Use:   "set OPERATOR --role ROLE",
		Short: "Change what an operator may do, at once",
		Args:  exactly("OPERATOR"),
		RunE: func(c *cobra.Command, args []string) error {
			r, err := parseRole(role)
			if err != nil {
				return err
			}
			conn, err := a.connect()
			if err != nil {
				return err
			}
			resp, err := call(c.Context(), a, conn.operators.UpdateOperator, &pb.UpdateOperatorRequest{Name: args[0], Role: r})
			if err != nil {
				return err
			}
			if a.output == "json" {
				return a.printJSON(resp)
			}
			fmt.Fprintf(a.cfg.Stdout, "operator %s is %s\n", args[0], role)
			return nil
		},
	}
	c.Flags().StringVar(&role, "role", "", "what it may do: viewer, operator or admin")
	must(c.MarkFlagRequired("role"))
	must(c.RegisterFlagCompletionFunc("role", cobra.FixedCompletions(operatorRoles, cobra.ShellCompDirectiveNoFileComp)))
	return c
}

func (a *app) operatorDelete() *cobra.Command {
	return &cobra.Command{
		Use:   "delete OPERATOR",
		Short: "Keep an operator out, at once, with all tokens and certificates",
		Args:  exactly("OPERATOR"),
		RunE: func(c *cobra.Command, args []string) error {
			conn, err := a.connect()
			if err != nil {
				return err
			}
			resp, err := call(c.Context(), a, conn.operators.DeleteOperator, &pb.DeleteOperatorRequest{Name: args[0]})
			if err != nil {
				return err
			}
			if a.output == "json" {
				return a.printJSON(resp)
			}
			fmt.Fprintf(a.cfg.Stdout, "operator %s deleted\n", args[0])
			return nil
		},
	}
}

func (a *app) operatorToken() *cobra.Command {
	var role, note string
	var ttl time.Duration
	c := &cobra.Command{
		Use:   "token OPERATOR [--ttl 2160h] [--role ROLE] [--note TEXT]",
		Short: "Make a token, which is shown once",
		Args:  exactly("OPERATOR"),
		RunE: func(c *cobra.Command, args []string) error {
			req := &pb.CreateOperatorTokenRequest{Name: args[0], Ttl: durationpb.New(ttl), Note: note}
			if ttl <= 0 {
				return fmt.Errorf("--ttl %v: must be positive", ttl)
			}
			if role != "" {
				var err error
				if req.Role, err = parseRole(role); err != nil {
					return err
				}
			}
			conn, err := a.connect()
			if err != nil {
				return err
			}
			resp, err := call(c.Context(), a, conn.operators.CreateOperatorToken, req)
			if err != nil {
				return err
			}
			if a.output == "json" {
				return a.printJSON(resp)
			}
			fmt.Fprintln(a.cfg.Stdout, resp.GetSecret())
			a.note("token %s of %s, until %s. cakefleetctl takes it from %s; for HTTP it is the Bearer token, or the password beside any name", resp.GetCredential().GetId(), args[0], when(resp.GetCredential().GetExpireTime()), envToken)
			return nil
		},
	}
	c.Flags().DurationVar(&ttl, "ttl", 90*24*time.Hour, "how `long` it can be used, at most 8784h")
	c.Flags().StringVar(&role, "role", "", "the most that it may do: viewer, operator or admin; without it what the operator may")
	c.Flags().StringVar(&note, "note", "", "what it is for")
	must(c.RegisterFlagCompletionFunc("role", cobra.FixedCompletions(operatorRoles, cobra.ShellCompDirectiveNoFileComp)))
	return c
}

func (a *app) operatorCertificate() *cobra.Command {
	var out, note string
	c := &cobra.Command{
		Use:   "certificate OPERATOR --out FILE [--note TEXT]",
		Short: "Make credentials with a certificate, as the controller's operator.pem",
		Long: `Make credentials with a certificate, as the controller's operator.pem.

The private key is made here and never leaves this machine.`,
		Args: exactly("OPERATOR"),
		RunE: func(c *cobra.Command, args []string) error {
			conn, err := a.connect()
			if err != nil {
				return err
			}
			path, err := a.expand(out)
			if err != nil {
				return failure{err}
			}
			// Before the certificate is made: one that can't be kept is of no use.
			f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
			if err != nil {
				return failure{fmt.Errorf("credentials: %w", err)}
			}
			text, resp, err := a.certificate(c, conn, args[0], note)
			if err == nil {
				_, err = f.Write(text)
			}
			if closed := f.Close(); err == nil {
				err = closed
			}
			if err != nil {
				_ = os.Remove(path) // it is empty or of no use
				return failure{err}
			}
			if a.output == "json" {
				return a.printJSON(resp)
			}
			fmt.Fprintf(a.cfg.Stdout, "credentials of %s are in %s, until %s\n", args[0], path, when(resp.GetCredential().GetExpireTime()))
			return nil
		},
	}
	c.Flags().StringVar(&out, "out", "", "`file` to write; it must not exist")
	c.Flags().StringVar(&note, "note", "", "what it is for")
	must(c.MarkFlagRequired("out"))
	return c
}

// certificate makes a key and has it signed.
func (a *app) certificate(c *cobra.Command, conn *connection, name, note string) ([]byte, *pb.CreateOperatorCertificateResponse, error) {
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	csr, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)
	if err != nil {
		return nil, nil, err
	}
	resp, err := call(c.Context(), a, conn.operators.CreateOperatorCertificate, &pb.CreateOperatorCertificateRequest{Name: name, Csr: csr, Note: note})
	if err != nil {
		return nil, nil, err
	}
	pkcs8, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, nil, err
	}
	var text []byte
	blocks := []pem.Block{{Type: "CERTIFICATE", Bytes: resp.GetCertificate()}, {Type: "PRIVATE KEY", Bytes: pkcs8}}
	authorities := resp.GetAuthorities()
	if len(authorities) == 0 { // of a controller that knows of one
		authorities = [][]byte{resp.GetCaCertificate()}
	}
	for _, a := range authorities {
		blocks = append(blocks, pem.Block{Type: "CERTIFICATE", Bytes: a})
	}
	for _, b := range blocks {
		text = append(text, pem.EncodeToMemory(&b)...)
	}
	return text, resp, nil
}

func (a *app) operatorRevoke() *cobra.Command {
	return &cobra.Command{
		Use:   "revoke OPERATOR ID",
		Short: "Make one token or certificate useless, at once; ids are in operator show",
		Args:  exactly("OPERATOR", "ID"),
		RunE: func(c *cobra.Command, args []string) error {
			conn, err := a.connect()
			if err != nil {
				return err
			}
			resp, err := call(c.Context(), a, conn.operators.RevokeOperatorCredential, &pb.RevokeOperatorCredentialRequest{Name: args[0], Id: args[1]})
			if err != nil {
				return err
			}
			if a.output == "json" {
				return a.printJSON(resp)
			}
			fmt.Fprintf(a.cfg.Stdout, "%s of operator %s revoked\n", args[1], args[0])
			return nil
		},
	}
}
