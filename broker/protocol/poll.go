package protocol

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
)

const (
	// DefaultPollInterval is the interval of the lists of a Watch whose streams are cut: a
	// provider that hears of a hold that late has time left to answer it.
	DefaultPollInterval = 5 * time.Second
	// MaxPollInterval leaves a provider two thirds of the broker's default deadline.
	MaxPollInterval = 10 * time.Second
	// MinPollInterval is within the broker's limit of lists, with all roles.
	MinPollInterval = time.Second
	// briefStream is the time within which a stream that ends was cut: the broker keeps
	// streams open.
	briefStream = 30 * time.Second
	// maxBriefStreams is the number of streams cut in a row after which a Watch polls: a
	// broker that is restarted cuts one or two.
	maxBriefStreams = 3
	// streamAgainAfter is for how long a Watch polls before it tries a stream again, of which
	// one that is cut is enough to poll again.
	streamAgainAfter = 10 * time.Minute
)

// poll hands over what a stream would, from lists, for streamAgainAfter or until ctx ends, unless
// the first list fails: then it is not only streams that fail, for a reason.
func (c *Client) poll(ctx context.Context, role Role, handle func(Event), reason error) (listed bool) {
	ctx, cancel := context.WithTimeout(ctx, c.streamAgainAfter)
	defer cancel()
	list := polled{role: role}
	failing := false
	for {
		events, err := c.changes(ctx, &list)
		if ctx.Err() != nil || err != nil && !listed {
			return listed
		}
		if !listed {
			listed = true
			c.log.Info("Watch streams are cut soon after they begin, or bring nothing; polling", "stream", streamName(role), "interval", c.PollInterval, "streamAgainAfter", c.streamAgainAfter, "reason", reason.Error())
		}
		if failed := err != nil; failed != failing {
			failing = failed
			c.log.Info("Polling the broker", "stream", streamName(role), "failing", failing, "reason", fmt.Sprint(err))
		}
		for _, event := range events {
			handle(event)
		}
		if !sleep(ctx, min(retryAfter(err), maxBackoff)+wait.Jitter(c.PollInterval, 0.1)) {
			return listed
		}
	}
}

// polled is what a role's last list had.
type polled struct {
	role Role
	// etag of the list; empty before the first.
	etag string
	// views of the list by their IDs, as JSON; nil before the first.
	views map[string]string
}

// changes asks for the list again and returns what has changed as events: first a Relist.
func (c *Client) changes(ctx context.Context, list *polled) ([]Event, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	path, query := PathRelay, url.Values(nil)
	if list.role != "" {
		path, query = PathReservations, list.role.query()
	}
	response, err := c.send(ctx, http.MethodGet, path, query, nil, list.etag)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	if response.StatusCode == http.StatusNotModified {
		return nil, nil
	}
	body, err := io.ReadAll(io.LimitReader(response.Body, maxResponse))
	if err != nil {
		return nil, fmt.Errorf("reading a list: %w", err)
	}
	events, err := list.read(body)
	if err == nil && list.role != "" {
		list.etag = response.Header.Get("ETag")
	}
	return events, err
}

// read returns what differs from the list before.
func (l *polled) read(body []byte) ([]Event, error) {
	var items struct {
		Items []json.RawMessage `json:"items"`
	}
	if err := json.Unmarshal(body, &items); err != nil {
		return nil, fmt.Errorf("decoding a list: %w", err)
	}
	put, now := Event{Type: EventPut}, map[string]string{}
	if l.views == nil {
		put.Type = EventRelist
	}
	for _, item := range items.Items {
		id, err := l.add(&put, item)
		if err != nil {
			return nil, fmt.Errorf("decoding a list: %w", err)
		}
		now[id] = string(item)
	}
	var events []Event
	for id := range l.views {
		if _, exists := now[id]; !exists && l.role != "" {
			events = append(events, Event{Type: EventDelete, ID: id})
		}
	}
	if put.Type == EventRelist || len(put.Consumer)+len(put.Provider)+len(put.Relay) > 0 {
		events = append(events, put)
	}
	l.views = now
	return events, nil
}

// add adds an item to an event, unless the list before had the same, and returns its ID.
func (l *polled) add(to *Event, item json.RawMessage) (id string, err error) {
	switch l.role {
	case RoleRequester:
		var view ConsumerView
		if err = json.Unmarshal(item, &view); err == nil && l.views[view.ID] != string(item) {
			to.Consumer = append(to.Consumer, view)
		}
		return view.ID, err
	case RoleProvider:
		var view ProviderView
		if err = json.Unmarshal(item, &view); err == nil && l.views[view.ID] != string(item) {
			to.Provider = append(to.Provider, view)
		}
		return view.ID, err
	}
	// Each message is listed once.
	var message RelayMessage
	if err = json.Unmarshal(item, &message); err == nil {
		to.Relay = append(to.Relay, message)
	}
	return message.ID, err
}
