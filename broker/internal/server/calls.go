package server

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/netip"
	"strconv"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/broker/text"
)

// refuse returns an error that is sent to the caller. The message tells the caller what
// is wrong and what to do.
func refuse(code, format string, args ...any) *protocol.Error {
	return &protocol.Error{Code: code, Message: fmt.Sprintf(format, args...)}
}

// serve adds to a call what all calls have: deadlines, leadership, authentication, rate
// limits, error responses, metrics and the audit log.
func (s *Server) serve(route route) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		control := http.NewResponseController(w)
		deadline := s.Clock.Now().Add(callTimeout)
		err := errors.Join(supported(control.SetReadDeadline(deadline)), supported(control.SetWriteDeadline(deadline)))
		r, details := withAudit(r)
		caller := ""
		if err == nil {
			caller, err = s.dispatch(w, r, route)
		}
		var refusal *protocol.Error
		code := codeOK
		if err != nil {
			refusal = refusalOf(err)
			code = refusal.Code
		}
		callsTotal.WithLabelValues(strings.TrimSpace(route.method+" "+route.path), code).Inc()
		if route.audited {
			s.auditCall(route, r, caller, *details, refusal)
		}
		if refusal == nil {
			return
		}
		if refusal.Code == protocol.CodeInternal {
			s.Log.Error(err, "Failed to serve a call", "method", r.Method, "path", short(r.URL.Path))
		} else {
			s.Log.V(1).Info("Refused call", "method", r.Method, "path", short(r.URL.Path), "code", refusal.Code, "reason", err.Error())
		}
		if refusal.RetryAfter > 0 {
			w.Header().Set("Retry-After", strconv.FormatInt(int64(math.Ceil(refusal.RetryAfter.Seconds())), 10))
		}
		if err := respond(w, refusal.Status(), refusal); err != nil {
			s.Log.V(1).Info("Failed to write a response", "reason", err.Error())
		}
	})
}

// dispatch makes the call and returns its caller as far as it is known. What is cheap to
// refuse is refused first: a caller that is over its limit, revoked or not, costs no read.
func (s *Server) dispatch(w http.ResponseWriter, r *http.Request, route route) (caller string, err error) {
	// A connection stays open only if its caller is known.
	w.Header().Set("Connection", "close")
	r.Body = http.MaxBytesReader(w, r.Body, route.maxBody)
	w.Header().Set(protocol.HeaderVersion, protocol.Version)
	if err := protocol.CheckVersion(r.Header.Get(protocol.HeaderVersion)); err != nil {
		return "", err
	}
	if !route.anyReplica {
		if err := s.Ready(r); err != nil {
			// The connection closes: the caller's next one may reach the leader.
			return "", refuse(protocol.CodeUnavailable, "%v: retry, the request may reach another replica", err)
		}
	}
	if !route.open {
		cluster, fingerprint, err := s.Identity.Certified(r.Context(), r.TLS)
		if err != nil {
			return "", err
		}
		if wait := s.callers.Take(fingerprint, 1); wait > 0 {
			return cluster, slower(wait, "cluster %s exceeds the rate limit of its calls", cluster)
		}
		if s.connections.Claim(r.Context(), fingerprint) {
			w.Header().Del("Connection")
		}
		if !route.streams(r) {
			if !s.inProgress.Begin(fingerprint, maxCalls) {
				return cluster, slower(time.Second, "cluster %s has %d calls in progress, the maximum", cluster, maxCalls)
			}
			defer s.inProgress.End(fingerprint)
		}
		authenticated := s.Clock.Now()
		if caller, err = s.authenticate(w, r); err != nil {
			return cluster, err
		}
		// Until the body is complete, the caller may be revoked.
		r.Body = &authenticatedBody{ReadCloser: r.Body, authenticate: func() error {
			if s.Clock.Since(authenticated) < sameMoment {
				return nil
			}
			_, err := s.authenticate(w, r)
			return err
		}}
	}
	if route.lists {
		if wait := s.listers.Take(caller, 1); wait > 0 {
			return caller, slower(wait, "cluster %s exceeds the rate limit of its lists and streams", caller)
		}
		if !route.streams(r) {
			if err := s.beginList(caller); err != nil {
				return caller, err
			}
			defer s.listsInProgress.End(caller)
		}
	}
	if id := r.PathValue("id"); id != "" && len(validation.IsDNS1123Subdomain(id)) > 0 {
		// No object has such a name, and the API server would not understand the request.
		return caller, notFound()
	}
	if !route.streams(r) {
		ctx, cancel := context.WithTimeout(r.Context(), callTimeout)
		defer cancel()
		r = r.WithContext(ctx)
	}
	return caller, route.call(w, r, caller)
}

// beginList counts a list in progress, unless there are too many of the caller.
func (s *Server) beginList(caller string) error {
	if !s.listsInProgress.Begin(caller, maxLists) {
		return slower(time.Second, "cluster %s has %d lists in progress, the maximum", caller, maxLists)
	}
	return nil
}

// authenticate returns the caller's cluster ID. The connection of one that may not call ends.
func (s *Server) authenticate(w http.ResponseWriter, r *http.Request) (caller string, err error) {
	caller, err = s.Identity.Authenticate(r.Context(), r.TLS)
	if protocol.HasCode(err, protocol.CodeUnauthorized) {
		w.Header().Set("Connection", "close") // it has left, or joins again
	}
	return caller, err
}

// sameMoment is the time from the authentication of a caller within which the end of its body
// needs no second one: most bodies come with their header. It is much shorter than a call
// takes after that.
const sameMoment = time.Millisecond

// authenticatedBody is the body of a request whose caller is authenticated again at its end:
// a caller that sends slowly must not act when it is revoked meanwhile.
type authenticatedBody struct {
	io.ReadCloser
	authenticate func() error
}

// Read implements io.Reader. At the end, the error is that of the authentication.
func (b *authenticatedBody) Read(into []byte) (n int, err error) {
	if n, err = b.ReadCloser.Read(into); err == io.EOF {
		if refused := b.authenticate(); refused != nil {
			err = &authenticationError{refused}
		}
	}
	return n, err
}

// authenticationError is why a caller was not authenticated again.
type authenticationError struct{ error }

// Unwrap returns the reason.
func (e *authenticationError) Unwrap() error { return e.error }

// refusalOf converts an error for the caller. It discloses internals of the broker only
// as far as the caller can act on them.
func refusalOf(err error) *protocol.Error {
	var refusal *protocol.Error
	var size *http.MaxBytesError
	var status apierrors.APIStatus
	switch {
	case errors.As(err, &refusal):
		return refusal
	case errors.As(err, &size):
		return refuse(protocol.CodeTooLarge, "the body exceeds the maximum of %d bytes", size.Limit)
	case apierrors.IsNotFound(err):
		return refuse(protocol.CodeNotFound, "the object does not exist, or belongs to another cluster")
	case errors.As(err, &status) && (apierrors.IsInvalid(err) || apierrors.IsBadRequest(err)):
		return refuse(protocol.CodeInvalid, "%s", status.Status().Message)
	case apierrors.IsConflict(err), apierrors.IsAlreadyExists(err):
		return refuse(protocol.CodeConflict, "the object was changed at the same time: retry")
	case apierrors.IsServerTimeout(err), apierrors.IsTimeout(err), apierrors.IsTooManyRequests(err), apierrors.IsServiceUnavailable(err),
		errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return refuse(protocol.CodeUnavailable, "the broker's API server did not respond in time: retry")
	}
	return refuse(protocol.CodeInternal, "internal error: see the log of the broker")
}

// respondList responds with a list, or without it if the caller has the same one already.
func respondList(w http.ResponseWriter, r *http.Request, list any) error {
	body, err := json.Marshal(list)
	if err != nil {
		return fmt.Errorf("encoding the list: %w", err)
	}
	etag := fmt.Sprintf("%q", fmt.Sprintf("%x", sha256.Sum256(body)))
	w.Header().Set("ETag", etag)
	if r.Header.Get("If-None-Match") == etag {
		return respond(w, http.StatusNotModified, nil)
	}
	return respondBody(w, http.StatusOK, body)
}

func respond(w http.ResponseWriter, status int, response any) error {
	if response == nil {
		w.WriteHeader(status)
		return nil
	}
	body, err := json.Marshal(response)
	if err != nil {
		return fmt.Errorf("encoding the response: %w", err)
	}
	return respondBody(w, status, body)
}

func respondBody(w http.ResponseWriter, status int, body []byte) error {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	// If this fails, the caller is gone.
	_, _ = w.Write(append(body, '\n'))
	return nil
}

// decode reads a request's body: one JSON value of limited size. Fields that are not in
// the schema are ignored if the caller states its version, because it may be newer than
// this broker. The body of another caller is written by hand, where such a field is a
// mistake.
func decode(r *http.Request, into any) error {
	strict := r.Header.Get(protocol.HeaderVersion) == ""
	return decodeJSON(r.Body, into, strict)
}

func decodeJSON(body io.Reader, into any, strict bool) error {
	raw, err := io.ReadAll(body)
	if err == nil {
		err = validateExponents(raw)
	}
	decoder := json.NewDecoder(bytes.NewReader(raw))
	if strict {
		decoder.DisallowUnknownFields()
	}
	if err == nil {
		err = decoder.Decode(into)
	}
	if err == nil {
		if _, err = decoder.Token(); err == io.EOF {
			return nil
		} else if err == nil {
			err = errors.New("unexpected data after the JSON value")
		}
	}
	var size *http.MaxBytesError
	var refusal *protocol.Error
	var caller *authenticationError
	if errors.As(err, &size) || errors.As(err, &refusal) || errors.As(err, &caller) {
		return err
	}
	return refuse(protocol.CodeInvalid, "the body does not match the schema in %s: %v", protocol.PathOpenAPI, err)
}

// short truncates a caller's input for logs and messages.
func short(message string) string { return text.TruncateTo(message, 128) }

// remoteIP is the caller's address; of IPv6, the network that one caller usually has.
func remoteIP(r *http.Request) string {
	address, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil {
		return r.RemoteAddr
	}
	ip := address.Addr().Unmap()
	if ip.Is6() {
		if network, err := ip.Prefix(64); err == nil {
			return network.String()
		}
	}
	return ip.String()
}
