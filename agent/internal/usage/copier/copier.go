package copier

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/usage"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
)

const (
	// copyEvery is the interval of the copies, retryAfter that after a failure.
	copyEvery, retryAfter = 10 * time.Minute, time.Minute
	// days and months are how much is copied, and maxPages how many pages of each are read.
	days, months, maxPages = 31, 13, 100
	// maxBytes is how much a ConfigMap may hold of them: a server accepts 1 MiB in all.
	maxBytes = 900 << 10
)

// Broker is asked for the usage.
type Broker interface {
	Usage(ctx context.Context, query url.Values) (protocol.UsageList, error)
}

// Copier is a manager.Runnable that needs leader election.
type Copier struct {
	Broker Broker
	// Client writes the ConfigMap, in Namespace. It reads without a cache.
	Client    client.Client
	Namespace string
	Clock     clock.Clock
	Log       logr.Logger
}

// Start copies until the context ends. A broker without a history has nothing to copy.
func (c *Copier) Start(ctx context.Context) error {
	reason := ""
	for {
		wait := copyEvery
		err := c.copy(ctx)
		switch {
		case err == nil || protocol.HasCode(err, protocol.CodeNotFound):
			reason = ""
		case ctx.Err() == nil:
			if wait = retryAfter; err.Error() != reason {
				reason = err.Error()
				c.Log.Info("Failed to copy the usage, which is tried each minute", "reason", reason)
			}
		}
		timer := c.Clock.NewTimer(wait)
		select {
		case <-ctx.Done():
			timer.Stop()
			return nil
		case <-timer.C():
		}
	}
}

// copy copies days also if months cannot be read, and months if there are too many days.
func (c *Copier) copy(ctx context.Context) error {
	now := c.Clock.Now().UTC()
	content := usage.Copy{AsOf: now.Truncate(time.Second)}
	var moreDays, moreMonths bool
	var noDays, noMonths error
	if content.Days, moreDays, noDays = c.read(ctx, "day", now.AddDate(0, 0, 1-days)); noDays != nil && !protocol.HasCode(noDays, protocol.CodeInvalid) {
		return noDays
	}
	first := time.Date(now.Year(), now.Month(), 1, 0, 0, 0, 0, time.UTC)
	content.Months, moreMonths, noMonths = c.read(ctx, "month", first.AddDate(0, 1-months, 0))
	failed := errors.Join(noDays, noMonths)
	if noDays != nil && noMonths != nil {
		return failed
	}
	content.Truncated = moreDays || moreMonths || failed != nil
	encoded, err := encode(content)
	if err != nil {
		return err
	}
	return errors.Join(c.write(ctx, encoded), failed)
}

// encode encodes a copy, without its oldest items if it is too large.
func encode(content usage.Copy) (string, error) {
	for {
		encoded, err := json.Marshal(content)
		if err != nil || len(encoded) <= maxBytes || len(content.Days)+len(content.Months) == 0 {
			return string(encoded), err
		}
		content.Days, content.Months, content.Truncated = newest(content.Days), newest(content.Months), true
	}
}

// newest is about nine tenths of items.
func newest(items []protocol.UsageItem) []protocol.UsageItem {
	return items[(len(items)+9)/10:]
}

// read returns the newest items since a day, and whether there are more.
func (c *Copier) read(ctx context.Context, period string, from time.Time) (items []protocol.UsageItem, more bool, err error) {
	query := url.Values{"period": {period}, "from": {from.Format(time.DateOnly)}, "limit": {"1000"}}
	for range maxPages {
		page, err := c.Broker.Usage(ctx, query)
		if err != nil {
			return nil, false, fmt.Errorf("asking the broker for the usage: %w", err)
		}
		items = append(items, page.Items...)
		if over := len(items) - usage.MaxItems; over > 0 {
			items, more = slices.Clone(items[over:]), true
		}
		if page.Continue == "" {
			return items, more, nil
		}
		query.Set("continue", page.Continue)
	}
	return items, true, nil
}

// write writes the ConfigMap.
func (c *Copier) write(ctx context.Context, content string) error {
	want := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{
		Namespace: c.Namespace, Name: usage.Name, Labels: map[string]string{broker.LabelManagedBy: broker.ManagedBySpillway},
	}, Data: map[string]string{usage.Key: content}}
	err := c.Client.Create(ctx, want)
	if apierrors.IsAlreadyExists(err) {
		err = c.Client.Update(ctx, want)
	}
	if err != nil {
		return fmt.Errorf("writing ConfigMap %s: %w", usage.Name, err)
	}
	return nil
}
