package protocol

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/go-logr/logr"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

const (
	// callTimeout bounds one try of one call.
	callTimeout = 10 * time.Second
	// callTries is how often a call is made when the broker cannot be reached,
	// does not lead or is too busy. Every call may be repeated.
	callTries = 3
	// maxAnswer bounds an answer, and a stream's line, in bytes.
	maxAnswer = 64 << 20
	// maxBackoff bounds the pause between two connections of a stream.
	maxBackoff = 15 * time.Second
)

// Client speaks to one broker as one cluster. It may be used by several
// goroutines, and keeps its connections.
type Client struct {
	base      string
	calls     *http.Client
	log       logr.Logger
	heartbeat time.Duration
	backoff   time.Duration
}

// NewClient makes a client of the broker at baseURL (https://host:port). The
// TLS configuration carries the broker's CA and the cluster's certificate;
// TLSConfig makes one.
func NewClient(baseURL string, config *tls.Config, log logr.Logger) (*Client, error) {
	base, err := parseBase(baseURL)
	if err != nil {
		return nil, err
	}
	return &Client{
		base:      base.String(),
		calls:     httpClient(config),
		log:       log,
		heartbeat: HeartbeatSeconds * time.Second,
		backoff:   200 * time.Millisecond,
	}, nil
}

// TLSConfig trusts the CA in caPEM and no other. Certificate is asked at each
// handshake, so that a renewed one needs no restart.
func TLSConfig(caPEM []byte, certificate func() (*tls.Certificate, error)) (*tls.Config, error) {
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(caPEM) {
		return nil, errors.New("the broker's CA is not a PEM certificate")
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS12,
		RootCAs:    roots,
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			return certificate()
		},
	}, nil
}

func parseBase(baseURL string) (*url.URL, error) {
	base, err := url.Parse(strings.TrimSuffix(baseURL, "/"))
	switch {
	case err != nil:
		return nil, fmt.Errorf("parsing the broker's URL: %w", err)
	case base.Scheme != "https" || base.Hostname() == "" || base.User != nil || base.RawQuery != "" || base.Fragment != "":
		return nil, fmt.Errorf("the broker's URL must read https://<host>[:<port>], not %q", baseURL)
	}
	return base, nil
}

// httpClient speaks HTTP/1.1: each stream has a connection of its own, so one
// that stalls stalls nothing else. Redirects are not followed, for nothing is to
// be sent to whom it was not addressed.
func httpClient(config *tls.Config) *http.Client {
	var protocols http.Protocols
	protocols.SetHTTP1(true)
	return &http.Client{
		Transport: &http.Transport{
			DialContext:           (&net.Dialer{Timeout: 5 * time.Second, KeepAlive: 15 * time.Second}).DialContext,
			Proxy:                 http.ProxyFromEnvironment,
			TLSClientConfig:       config,
			TLSHandshakeTimeout:   5 * time.Second,
			ResponseHeaderTimeout: callTimeout,
			IdleConnTimeout:       90 * time.Second,
			MaxIdleConnsPerHost:   8,
			Protocols:             &protocols,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// Close drops the connections that are idle.
func (c *Client) Close() { c.calls.CloseIdleConnections() }

// PublishAdvertisement replaces what the broker knows of this cluster.
func (c *Client) PublishAdvertisement(ctx context.Context, spec broker.ClusterAdvertisementSpec) (AdvertisementAnswer, error) {
	return ask[AdvertisementAnswer](ctx, c, http.MethodPost, PathAdvertisements, nil, spec)
}

// Advertisements lists what the clusters offer.
func (c *Client) Advertisements(ctx context.Context) ([]AdvertisementView, error) {
	list, err := ask[AdvertisementList](ctx, c, http.MethodGet, PathAdvertisements, nil, nil)
	return list.Items, err
}

// Advertisement reads one cluster's.
func (c *Client) Advertisement(ctx context.Context, clusterID string) (AdvertisementView, error) {
	return ask[AdvertisementView](ctx, c, http.MethodGet, item(PathAdvertisements, clusterID), nil, nil)
}

// PutReservation asks for capacity, or asks again with another count.
func (c *Client) PutReservation(ctx context.Context, request ReservationRequest) (ConsumerView, error) {
	return ask[ConsumerView](ctx, c, http.MethodPost, PathReservations, nil, request)
}

// ConsumerReservations lists this cluster's own.
func (c *Client) ConsumerReservations(ctx context.Context) ([]ConsumerView, error) {
	list, err := ask[ConsumerList](ctx, c, http.MethodGet, PathReservations, RoleRequester.query(), nil)
	return list.Items, err
}

// ConsumerReservation reads one of this cluster's own by its ID.
func (c *Client) ConsumerReservation(ctx context.Context, id string) (ConsumerView, error) {
	return ask[ConsumerView](ctx, c, http.MethodGet, item(PathReservations, id), RoleRequester.query(), nil)
}

// ProviderReservations lists the holds on this cluster.
func (c *Client) ProviderReservations(ctx context.Context) ([]ProviderView, error) {
	list, err := ask[ProviderList](ctx, c, http.MethodGet, PathReservations, RoleProvider.query(), nil)
	return list.Items, err
}

// ProviderReservation reads one hold on this cluster by its reservation's ID.
func (c *Client) ProviderReservation(ctx context.Context, id string) (ProviderView, error) {
	return ask[ProviderView](ctx, c, http.MethodGet, item(PathReservations, id), RoleProvider.query(), nil)
}

// DeleteReservation lets go of one of this cluster's own. Success when it is
// already gone.
func (c *Client) DeleteReservation(ctx context.Context, id string) error {
	err := c.call(ctx, http.MethodDelete, item(PathReservations, id), nil, nil, nil)
	if HasCode(err, CodeNotFound) {
		return nil
	}
	return err
}

// AckProvider answers a hold on this cluster.
func (c *Client) AckProvider(ctx context.Context, id string, ack ProviderAck) error {
	return c.call(ctx, http.MethodPost, item(PathReservations, id)+"/ack", RoleProvider.query(), ack, nil)
}

// AckRequester reports on one of this cluster's own reservations.
func (c *Client) AckRequester(ctx context.Context, id string, ack RequesterAck) error {
	return c.call(ctx, http.MethodPost, item(PathReservations, id)+"/ack", RoleRequester.query(), ack, nil)
}

// Relay hands a sealed message to another cluster. It may get lost later:
// whoever waits for an answer sends again.
func (c *Client) Relay(ctx context.Context, message RelayMessage) error {
	return c.call(ctx, http.MethodPost, PathRelay, nil, message, nil)
}

// Ping reports whether a broker that leads answers.
func (c *Client) Ping(ctx context.Context) error {
	return c.call(ctx, http.MethodGet, PathReadyz, nil, nil, nil)
}

func (r Role) query() url.Values { return url.Values{"role": {string(r)}} }

func item(path, id string) string { return path + "/" + url.PathEscape(id) }

// ask makes a call that is answered with a T.
func ask[T any](ctx context.Context, c *Client, method, path string, query url.Values, body any) (T, error) {
	var answer T
	err := c.call(ctx, method, path, query, body, &answer)
	return answer, err
}

// call makes one call, again if the broker could not be asked.
func (c *Client) call(ctx context.Context, method, path string, query url.Values, body, answer any) error {
	var encoded []byte
	if body != nil {
		var err error
		if encoded, err = json.Marshal(body); err != nil {
			return fmt.Errorf("encoding the request %s %s: %w", method, path, err)
		}
		if len(encoded) > MaxBody {
			return &Error{Code: CodeTooLarge, Message: fmt.Sprintf("the request %s %s has %d bytes; the broker takes %d", method, path, len(encoded), MaxBody)}
		}
	}
	pause := c.backoff
	for try := 1; ; try++ {
		err := c.once(ctx, method, path, query, encoded, answer)
		if err == nil || try == callTries || ctx.Err() != nil || !repeatable(err) {
			return err
		}
		if !sleep(ctx, jitter(pause)) {
			return err
		}
		pause *= 2
	}
}

// repeatable tells a broker that could not be asked, or asks for patience, from
// one that has answered.
func repeatable(err error) bool {
	var answer *Error
	return !errors.As(err, &answer) || answer.Code == CodeUnavailable || answer.Code == CodeTooMany
}

func (c *Client) once(ctx context.Context, method, path string, query url.Values, body []byte, answer any) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	response, err := c.send(ctx, method, path, query, body)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if answer == nil {
		// Reading to the end lets the connection be used again.
		_, err = io.Copy(io.Discard, io.LimitReader(response.Body, MaxBody))
	} else {
		err = json.NewDecoder(io.LimitReader(response.Body, maxAnswer)).Decode(answer)
	}
	if err != nil {
		return fmt.Errorf("reading the broker's answer to %s %s: %w", method, path, err)
	}
	return nil
}

// send makes a request and returns the response if it is a good one.
func (c *Client) send(ctx context.Context, method, path string, query url.Values, body []byte) (*http.Response, error) {
	target := c.base + path
	if len(query) > 0 {
		target += "?" + query.Encode()
	}
	var reader io.Reader
	if body != nil {
		reader = bytes.NewReader(body)
	}
	request, err := http.NewRequestWithContext(ctx, method, target, reader)
	if err != nil {
		return nil, fmt.Errorf("asking the broker: %w", err)
	}
	if body != nil {
		request.Header.Set("Content-Type", "application/json")
	}
	response, err := c.calls.Do(request)
	if err != nil {
		return nil, fmt.Errorf("asking the broker: %w", err)
	}
	if response.StatusCode/100 != 2 {
		defer response.Body.Close()
		return nil, readError(response)
	}
	return response, nil
}

// readError makes an error of an answer that is not 2xx: an *Error if the broker
// wrote it, another if something in between did.
func readError(response *http.Response) error {
	body, err := io.ReadAll(io.LimitReader(response.Body, 64<<10))
	if err != nil {
		return fmt.Errorf("reading the broker's answer %s: %w", response.Status, err)
	}
	answer := &Error{}
	if json.Unmarshal(body, answer) != nil || answer.Code == "" {
		return fmt.Errorf("the broker's URL answers %s, and not as a broker does", response.Status)
	}
	return answer
}

// Watch streams a role's reservations, or relayed messages with role "". It
// connects again by itself, with a Relist each time, and blocks until ctx ends.
// Handle is called from one goroutine at a time, and not for heartbeats.
func (c *Client) Watch(ctx context.Context, role Role, handle func(Event)) {
	log := c.log.WithValues("stream", streamName(role))
	pause := c.backoff
	for {
		listed, err := c.stream(ctx, role, handle)
		if ctx.Err() != nil {
			return
		}
		if listed {
			pause = c.backoff
		}
		log.Info("The stream from the broker ended; connecting again", "reason", err.Error())
		if !sleep(ctx, jitter(pause)) {
			return
		}
		pause = min(2*pause, maxBackoff)
	}
}

func streamName(role Role) string {
	if role == "" {
		return "relay"
	}
	return string(role)
}

// stream follows one connection to its end, and reports whether it brought a
// Relist.
func (c *Client) stream(ctx context.Context, role Role, handle func(Event)) (listed bool, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	silence := fmt.Errorf("nothing heard for %s", 3*c.heartbeat)
	timer := time.AfterFunc(3*c.heartbeat, func() { cancel(silence) })
	defer timer.Stop()
	path, query := PathRelay, url.Values{}
	if role != "" {
		path, query = PathReservations, role.query()
	}
	query.Set("watch", "true")
	response, err := c.send(ctx, http.MethodGet, path, query, nil)
	if err != nil {
		return false, cause(ctx, err)
	}
	defer response.Body.Close()
	lines := bufio.NewScanner(response.Body)
	lines.Buffer(make([]byte, 0, 4<<10), maxAnswer)
	for lines.Scan() {
		var event Event
		if err := json.Unmarshal(lines.Bytes(), &event); err != nil {
			return listed, fmt.Errorf("decoding an event: %w", err)
		}
		// Time that handle takes is not the broker's silence.
		timer.Stop()
		switch {
		case event.Type == EventHeartbeat:
		case event.Type == EventRelist:
			listed = true
			handle(event)
		case !listed:
			return false, fmt.Errorf("the stream began with a %s instead of a Relist", event.Type)
		default:
			handle(event)
		}
		if ctx.Err() != nil {
			break
		}
		timer.Reset(3 * c.heartbeat)
	}
	if err := lines.Err(); err != nil {
		return listed, cause(ctx, fmt.Errorf("reading the stream: %w", err))
	}
	return listed, cause(ctx, errors.New("the broker closed it"))
}

// cause prefers the reason for which a context was cancelled.
func cause(ctx context.Context, err error) error {
	if reason := context.Cause(ctx); reason != nil {
		return reason
	}
	return err
}

// jitter spreads a pause over its second half, so that many clients do not
// return at once.
func jitter(pause time.Duration) time.Duration {
	return pause/2 + rand.N(pause/2+1)
}

// sleep pauses, and reports whether it was not cut off.
func sleep(ctx context.Context, pause time.Duration) bool {
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}
