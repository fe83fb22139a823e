package server

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"golang.org/x/time/rate"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/utils/clock"

	"github.com/spillway-dev/spillway/broker/protocol"
)

func refuse(code, format string, args ...any) *protocol.Error {
	return &protocol.Error{Code: code, Message: fmt.Sprintf(format, args...)}
}

// serve wraps a call in what all of them share: deadlines, leadership, identity,
// rates and errors.
func (s *Server) serve(route route) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		control := http.NewResponseController(w)
		deadline := time.Now().Add(callTimeout)
		err := errors.Join(control.SetReadDeadline(deadline), control.SetWriteDeadline(deadline))
		if err == nil {
			err = s.admit(w, r, route)
		}
		if err == nil {
			return
		}
		answer := answerTo(err)
		if answer.Code == protocol.CodeInternal {
			s.Log.Error(err, "A call failed", "method", r.Method, "path", bounded(r.URL.Path))
		} else {
			s.Log.V(1).Info("Refused a call", "method", r.Method, "path", bounded(r.URL.Path), "code", answer.Code, "reason", err.Error())
		}
		if err := respond(w, answer.Status(), answer); err != nil {
			s.Log.V(1).Info("An answer could not be written", "reason", err.Error())
		}
	})
}

func (s *Server) admit(w http.ResponseWriter, r *http.Request, route route) error {
	if !route.anyReplica {
		if err := s.Ready(r); err != nil {
			return refuse(protocol.CodeUnavailable, "%v; ask again", err)
		}
	}
	caller := ""
	if !route.open {
		var err error
		if caller, err = s.Identity.Authenticate(r.Context(), r.TLS); err != nil {
			return err
		}
		if !s.callers.allow(caller) {
			return refuse(protocol.CodeTooMany, "cluster %s makes too many calls; wait a second", caller)
		}
	}
	if !watching(r) {
		ctx, cancel := context.WithTimeout(r.Context(), callTimeout)
		defer cancel()
		r = r.WithContext(ctx)
	}
	return route.call(w, r, caller)
}

// answerTo is what the caller hears of an error. It tells of the broker's inside
// only what the caller can act on.
func answerTo(err error) *protocol.Error {
	var answer *protocol.Error
	var size *http.MaxBytesError
	var status apierrors.APIStatus
	switch {
	case errors.As(err, &answer):
		return answer
	case errors.As(err, &size):
		return refuse(protocol.CodeTooLarge, "the body has more than %d bytes", size.Limit)
	case apierrors.IsNotFound(err):
		return refuse(protocol.CodeNotFound, "there is no such thing, or it is not this cluster's")
	case errors.As(err, &status) && (apierrors.IsInvalid(err) || apierrors.IsBadRequest(err)):
		return refuse(protocol.CodeInvalid, "%s", status.Status().Message)
	case apierrors.IsConflict(err), apierrors.IsAlreadyExists(err):
		return refuse(protocol.CodeConflict, "somebody else changed it at the same time; ask again")
	case apierrors.IsServerTimeout(err), apierrors.IsTimeout(err), apierrors.IsTooManyRequests(err), apierrors.IsServiceUnavailable(err),
		errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return refuse(protocol.CodeUnavailable, "the broker could not reach its API server in time; ask again")
	}
	return refuse(protocol.CodeInternal, "the broker failed; its log says why")
}

func respond(w http.ResponseWriter, status int, answer any) error {
	if answer == nil {
		w.WriteHeader(status)
		return nil
	}
	body, err := json.Marshal(answer)
	if err != nil {
		return fmt.Errorf("encoding the answer: %w", err)
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	// A caller that has gone needs no other answer.
	_, _ = w.Write(append(body, '\n'))
	return nil
}

// decode reads a request's body: one JSON value, bounded, with no field that the
// protocol does not know.
func decode(w http.ResponseWriter, r *http.Request, into any) error {
	return decodeJSON(http.MaxBytesReader(w, r.Body, protocol.MaxBody), into)
}

func decodeJSON(body io.Reader, into any) error {
	raw, err := io.ReadAll(body)
	if err == nil {
		err = checkExponents(raw)
	}
	decoder := json.NewDecoder(bytes.NewReader(raw))
	decoder.DisallowUnknownFields()
	if err == nil {
		err = decoder.Decode(into)
	}
	if err == nil {
		if _, err = decoder.Token(); err == io.EOF {
			return nil
		} else if err == nil {
			err = errors.New("there is something after it")
		}
	}
	var size *http.MaxBytesError
	var refused *protocol.Error
	if errors.As(err, &size) || errors.As(err, &refused) {
		return err
	}
	return refuse(protocol.CodeInvalid, "the body is not the JSON that %s asks for: %v", protocol.PathOpenAPI, err)
}

// clip cuts a caller's message to what statuses and events have room for.
func clip(text string) string {
	const most = 512
	if len(text) <= most {
		return text
	}
	return strings.ToValidUTF8(text[:most], "") + "…"
}

// bounded cuts text of a caller's making for the log.
func bounded(text string) string {
	const most = 128
	if len(text) > most {
		return text[:most] + "…"
	}
	return text
}

func remoteIP(r *http.Request) string {
	host, _, err := net.SplitHostPort(r.RemoteAddr)
	if err != nil {
		return r.RemoteAddr
	}
	return host
}

// maxLimiters bounds the callers that are told apart.
const maxLimiters = 4096

// limiters keep the rate of each caller.
type limiters struct {
	clock clock.PassiveClock
	limit rate.Limit
	burst int

	mutex sync.Mutex
	byKey map[string]*rate.Limiter
}

func newLimiters(clock clock.PassiveClock, limit rate.Limit, burst int) *limiters {
	return &limiters{clock: clock, limit: limit, burst: burst, byKey: map[string]*rate.Limiter{}}
}

func (l *limiters) allow(key string) bool {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	now := l.clock.Now()
	limiter, known := l.byKey[key]
	if !known {
		if len(l.byKey) >= maxLimiters {
			l.forget(now)
		}
		if len(l.byKey) >= maxLimiters {
			// So many at once are one crowd, and share one rate.
			key = ""
			limiter, known = l.byKey[key]
		}
	}
	if !known {
		limiter = rate.NewLimiter(l.limit, l.burst)
		l.byKey[key] = limiter
	}
	return limiter.AllowN(now, 1)
}

// forget drops those whose silence has given them their whole burst back.
func (l *limiters) forget(now time.Time) {
	for key, limiter := range l.byKey {
		if limiter.TokensAt(now) >= float64(l.burst) {
			delete(l.byKey, key)
		}
	}
}
