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
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

const (
	// callTimeout is the timeout of one try of a call.
	callTimeout = 10 * time.Second
	// callTries is the number of tries of a call if the broker is unreachable, not the
	// leader, or busy. All calls are idempotent.
	callTries = 3
	// maxResponse is the maximum size of a response, and of a stream's line, in bytes.
	maxResponse = 64 << 20
	// maxBackoff is the maximum backoff between two connections of a stream.
	maxBackoff = 15 * time.Second
	// maxRetryAfter is the maximum time that a call waits for another try. If the broker
	// asks for more, the caller gets the error.
	maxRetryAfter = 5 * time.Second
)

// Client makes calls to one broker as one cluster. It is safe for concurrent use and
// keeps connections open.
type Client struct {
	base      string
	calls     *http.Client
	log       logr.Logger
	heartbeat time.Duration
	backoff   time.Duration

	// PollInterval is that of a Watch whose streams something on the way cuts again and again.
	PollInterval                  time.Duration
	briefStream, streamAgainAfter time.Duration
}

// NewClient returns a client of the broker at baseURL (https://host:port). config has
// the broker's CA and the cluster's certificate, see TLSConfig.
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

		PollInterval: DefaultPollInterval, briefStream: briefStream, streamAgainAfter: streamAgainAfter,
	}, nil
}

// TLSConfig trusts only the CA in caPEM. It calls certificate at each handshake, so
// that a renewed certificate needs no restart.
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
		return nil, fmt.Errorf("the broker's URL must be https://<host>[:<port>], not %q", baseURL)
	}
	return base, nil
}

// httpClient uses HTTP/1.1: each stream has its own connection, so a stalled stream
// does not block other calls. Redirects are not followed, so that nothing is sent to
// another server.
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
			MaxIdleConnsPerHost:   64,
			Protocols:             &protocols,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// Close closes idle connections.
func (c *Client) Close() { c.calls.CloseIdleConnections() }

// PublishAdvertisement replaces this cluster's advertisement.
func (c *Client) PublishAdvertisement(ctx context.Context, spec broker.ClusterAdvertisementSpec) (AdvertisementResponse, error) {
	return do[AdvertisementResponse](ctx, c, http.MethodPost, PathAdvertisements, nil, spec)
}

// Beat reports whether the broker has this cluster's advertisement as it is.
func (c *Client) Beat(ctx context.Context, beat Beat) (known bool, err error) {
	response, err := do[BeatResponse](ctx, c, http.MethodPost, PathBeat, nil, beat)
	return response.Known, err
}

// Advertisements lists the advertisements of all clusters.
func (c *Client) Advertisements(ctx context.Context) ([]AdvertisementView, error) {
	list, err := do[AdvertisementList](ctx, c, http.MethodGet, PathAdvertisements, nil, nil)
	return list.Items, err
}

// Advertisement gets the advertisement of one cluster.
func (c *Client) Advertisement(ctx context.Context, clusterID string) (AdvertisementView, error) {
	return do[AdvertisementView](ctx, c, http.MethodGet, item(PathAdvertisements, clusterID), nil, nil)
}

// Usage sums up what this cluster's pods were given, by the parameters of PathUsage.
func (c *Client) Usage(ctx context.Context, query url.Values) (UsageList, error) {
	return do[UsageList](ctx, c, http.MethodGet, PathUsage, query, nil)
}

// PutReservation creates one of this cluster's reservations, or updates its amounts.
func (c *Client) PutReservation(ctx context.Context, request ReservationRequest) (ConsumerView, error) {
	return do[ConsumerView](ctx, c, http.MethodPost, PathReservations, nil, request)
}

// ConsumerReservations lists this cluster's reservations.
func (c *Client) ConsumerReservations(ctx context.Context) ([]ConsumerView, error) {
	list, err := do[ConsumerList](ctx, c, http.MethodGet, PathReservations, RoleRequester.query(), nil)
	return list.Items, err
}

// ConsumerReservation gets one of this cluster's reservations by its ID.
func (c *Client) ConsumerReservation(ctx context.Context, id string) (ConsumerView, error) {
	return do[ConsumerView](ctx, c, http.MethodGet, item(PathReservations, id), RoleRequester.query(), nil)
}

// ProviderReservation gets a hold on this cluster by the ID of its reservation.
func (c *Client) ProviderReservation(ctx context.Context, id string) (ProviderView, error) {
	return do[ProviderView](ctx, c, http.MethodGet, item(PathReservations, id), RoleProvider.query(), nil)
}

// Decision gets why each cluster that lends to this cluster is not chosen for one of its
// reservations.
func (c *Client) Decision(ctx context.Context, id string) (DecisionView, error) {
	return do[DecisionView](ctx, c, http.MethodGet, item(PathReservations, id)+"/decision", nil, nil)
}

// DeleteReservation begins the release of one of this cluster's reservations. It
// succeeds if there is none with that ID.
func (c *Client) DeleteReservation(ctx context.Context, id string) error {
	err := c.call(ctx, http.MethodDelete, item(PathReservations, id), nil, nil, nil)
	if HasCode(err, CodeNotFound) {
		return nil
	}
	return err
}

// AckProvider accepts or refuses a hold on this cluster.
func (c *Client) AckProvider(ctx context.Context, id string, ack ProviderAck) error {
	return c.call(ctx, http.MethodPost, item(PathReservations, id)+"/ack", RoleProvider.query(), ack, nil)
}

// AckRequester reports on one of this cluster's reservations.
func (c *Client) AckRequester(ctx context.Context, id string, ack RequesterAck) error {
	return c.call(ctx, http.MethodPost, item(PathReservations, id)+"/ack", RoleRequester.query(), ack, nil)
}

// Renew renews the lease of one of this cluster's reservations.
func (c *Client) Renew(ctx context.Context, id string, reservationUID types.UID) error {
	return c.call(ctx, http.MethodPost, item(PathReservations, id)+"/renew", RoleRequester.query(), Renewal{ReservationUID: reservationUID}, nil)
}

// Relay sends a sealed message to another cluster. Delivery is not guaranteed: a
// sender that expects a reply must send again.
func (c *Client) Relay(ctx context.Context, message RelayMessage) error {
	return c.call(ctx, http.MethodPost, PathRelay, nil, message, nil)
}

// Ping succeeds if the leading broker is ready.
func (c *Client) Ping(ctx context.Context) error {
	return c.call(ctx, http.MethodGet, PathReadyz, nil, nil, nil)
}

func (r Role) query() url.Values { return url.Values{"role": {string(r)}} }

func item(path, id string) string { return path + "/" + url.PathEscape(id) }

// do makes a call and decodes the response into a T.
func do[T any](ctx context.Context, c *Client, method, path string, query url.Values, body any) (T, error) {
	var response T
	err := c.call(ctx, method, path, query, body, &response)
	return response, err
}

// call makes a call, and retries it with backoff if retriable.
func (c *Client) call(ctx context.Context, method, path string, query url.Values, body, response any) error {
	var encoded []byte
	if body != nil {
		var err error
		if encoded, err = json.Marshal(body); err != nil {
			return fmt.Errorf("encoding the request %s %s: %w", method, path, err)
		}
		if len(encoded) > MaxBody {
			return &Error{Code: CodeTooLarge, Message: fmt.Sprintf("the request %s %s has %d bytes; the maximum is %d", method, path, len(encoded), MaxBody)}
		}
	}
	backoff := wait.Backoff{Duration: c.backoff / 2, Factor: 2, Jitter: 1, Steps: callTries}
	for try := 1; ; try++ {
		err := c.once(ctx, method, path, query, encoded, response)
		if err == nil || try == callTries || ctx.Err() != nil || !retriable(err) {
			return err
		}
		if !sleep(ctx, retryAfter(err)+backoff.Step()) {
			return err
		}
	}
}

// retriable reports whether the same call may succeed soon.
func retriable(err error) bool {
	var refusal *Error
	switch {
	case !errors.As(err, &refusal):
		return true
	case refusal.RetryAfter > maxRetryAfter:
		return false
	}
	return refusal.Code == CodeUnavailable || refusal.Code == CodeTooMany && refusal.RetryAfter > 0
}

// retryAfter is the time that the broker has asked to wait for.
func retryAfter(err error) time.Duration {
	var refusal *Error
	if errors.As(err, &refusal) {
		return refusal.RetryAfter
	}
	return 0
}

func (c *Client) once(ctx context.Context, method, path string, query url.Values, body []byte, into any) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	response, err := c.send(ctx, method, path, query, body, "")
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if into == nil {
		// The connection is reused only after the body is read to its end.
		_, err = io.Copy(io.Discard, io.LimitReader(response.Body, MaxBody))
	} else {
		err = json.NewDecoder(io.LimitReader(response.Body, maxResponse)).Decode(into)
	}
	if err != nil {
		return fmt.Errorf("reading the response to %s %s: %w", method, path, err)
	}
	return nil
}

// send sends a request and returns a response with status 2xx, or an error. With an etag, the
// status is 304 if the response would have the same one.
func (c *Client) send(ctx context.Context, method, path string, query url.Values, body []byte, etag string) (*http.Response, error) {
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
		return nil, fmt.Errorf("calling the broker: %w", err)
	}
	if body != nil {
		request.Header.Set("Content-Type", "application/json")
	}
	request.Header.Set(HeaderVersion, Version)
	if etag != "" {
		request.Header.Set("If-None-Match", etag)
	}
	response, err := c.calls.Do(request)
	if err != nil {
		return nil, fmt.Errorf("calling the broker: %w", err)
	}
	if response.StatusCode/100 != 2 && (etag == "" || response.StatusCode != http.StatusNotModified) {
		defer response.Body.Close()
		return nil, readError(response)
	}
	return response, nil
}

// readError reads the error of a response that is not 2xx: an *Error if the broker
// sent it, another error if something in between did.
func readError(response *http.Response) error {
	body, err := io.ReadAll(io.LimitReader(response.Body, 64<<10))
	if err != nil {
		return fmt.Errorf("reading the response %s: %w", response.Status, err)
	}
	refusal := &Error{}
	if json.Unmarshal(body, refusal) != nil || refusal.Code == "" {
		return fmt.Errorf("the server at the broker's URL responded %s, and is not a broker: check the URL and the proxies on the way", response.Status)
	}
	if seconds, err := strconv.ParseUint(response.Header.Get("Retry-After"), 10, 16); err == nil {
		refusal.RetryAfter = time.Duration(seconds) * time.Second
	}
	return refusal
}

// Watch streams the reservations of a role, or relayed messages with role "". It
// reconnects with backoff; each connection begins with a Relist. While streams are cut again
// and again soon after they began, or nothing comes of them but a list succeeds, it lists at
// PollInterval instead. It blocks until ctx ends. handle is called from one goroutine, and not
// for heartbeats.
func (c *Client) Watch(ctx context.Context, role Role, handle func(Event)) {
	log := c.log.WithValues("stream", streamName(role))
	lostAt, brief := time.Now(), 0
	for {
		began := time.Now()
		listed, err := c.stream(ctx, role, handle)
		if ctx.Err() != nil {
			return
		}
		var refusal *Error
		switch {
		case listed:
			lostAt = time.Now()
			if brief++; lostAt.Sub(began) >= c.briefStream {
				brief = 0
			}
		case !errors.As(err, &refusal):
			// Something on the way may keep the stream to itself.
			brief++
		}
		if brief >= maxBriefStreams {
			brief = maxBriefStreams - 1
			if c.poll(ctx, role, handle, err) {
				continue
			}
		}
		if ctx.Err() != nil {
			return
		}
		log.Info("Watch stream ended; reconnecting", "reason", err.Error())
		if !sleep(ctx, min(retryAfter(err), maxBackoff)+c.reconnectAfter(time.Since(lostAt))) {
			return
		}
	}
}

// reconnectAfter is the backoff of a stream that was lost for a time: in proportion to
// it, so that a short outage, such as the fail-over to another broker, ends soon for the
// agent too, and between half and all of that, so that many do not reconnect at once.
func (c *Client) reconnectAfter(lost time.Duration) time.Duration {
	return wait.Jitter(min(max(c.backoff, lost/8), maxBackoff)/2, 1)
}

func streamName(role Role) string {
	if role == "" {
		return "relay"
	}
	return string(role)
}

// stream reads one connection to its end, and reports whether it received a Relist.
func (c *Client) stream(ctx context.Context, role Role, handle func(Event)) (listed bool, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	timeout := 3 * c.heartbeat
	timer := time.AfterFunc(timeout, func() { cancel(fmt.Errorf("nothing received for %s", timeout)) })
	defer timer.Stop()
	path, query := PathRelay, url.Values{}
	if role != "" {
		path, query = PathReservations, role.query()
	}
	query.Set("watch", "true")
	response, err := c.send(ctx, http.MethodGet, path, query, nil, "")
	if err != nil {
		return false, cause(ctx, err)
	}
	defer response.Body.Close()
	lines := bufio.NewScanner(response.Body)
	lines.Buffer(make([]byte, 0, 4<<10), maxResponse)
	for lines.Scan() {
		var event Event
		if err := json.Unmarshal(lines.Bytes(), &event); err != nil {
			return listed, fmt.Errorf("decoding an event: %w", err)
		}
		// The time in handle does not count.
		timer.Stop()
		switch {
		case event.Type == EventHeartbeat:
		case event.Type == EventRelist:
			listed = true
			handle(event)
		case event.Type != EventPut && event.Type != EventDelete:
			// Of a newer version.
			c.log.V(1).Info("Ignoring an event of an unknown type", "type", event.Type)
		case !listed:
			return false, fmt.Errorf("the stream began with a %s instead of a Relist", event.Type)
		default:
			handle(event)
		}
		if ctx.Err() != nil {
			break
		}
		timer.Reset(timeout)
	}
	if err := lines.Err(); err != nil {
		return listed, cause(ctx, fmt.Errorf("reading the stream: %w", err))
	}
	return listed, cause(ctx, errors.New("closed by the broker"))
}

// cause returns the cause of the context's cancellation, or else err.
func cause(ctx context.Context, err error) error {
	if reason := context.Cause(ctx); reason != nil {
		return reason
	}
	return err
}

// sleep reports false if ctx ends before the duration.
func sleep(ctx context.Context, duration time.Duration) bool {
	timer := time.NewTimer(duration)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}
