package top

import (
	"context"
	"errors"
	"io"
	"reflect"
	"sync"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
	"k8s.io/client-go/rest"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/text"
)

// lostFor is how long after the last failure of a watch the Board counts as not up to date: a watch is
// tried again within that time.
const lostFor = 35 * time.Second

// MaxProblem is the maximum length of the Problem of a Board.
const MaxProblem = 300

// Remembering is a client that does not ask again for lists that were refused.
type Remembering struct {
	client.Client
	mu      sync.Mutex
	refused map[reflect.Type]error
}

// Remember returns a client that remembers what another refuses.
func Remember(c client.Client) *Remembering {
	return &Remembering{Client: c, refused: map[reflect.Type]error{}}
}

// List lists, unless that was refused before.
func (c *Remembering) List(ctx context.Context, list client.ObjectList, options ...client.ListOption) error {
	kind := reflect.TypeOf(list)
	c.mu.Lock()
	err := c.refused[kind]
	c.mu.Unlock()
	if err != nil {
		return err
	}
	err = c.Client.List(ctx, list, options...)
	if apierrors.IsForbidden(err) || apierrors.IsNotFound(err) || meta.IsNoMatchError(err) {
		c.mu.Lock()
		c.refused[kind] = err
		c.mu.Unlock()
	}
	return err
}

// Watch returns a client that reads from watches of what a Board is made from, with the kinds of another
// client, until ctx ends; and a function that says why the watches do not get on, empty if they do.
func Watch(ctx context.Context, config *rest.Config, c client.Client, systemNamespace string) (client.Client, func() string, error) {
	var mu sync.Mutex
	var at time.Time
	why := ""
	failed := func(_ context.Context, _ *toolscache.Reflector, err error) {
		if errors.Is(err, io.EOF) || apierrors.IsResourceExpired(err) || apierrors.IsGone(err) {
			return // the watch begins again
		}
		mu.Lock()
		defer mu.Unlock()
		at, why = time.Now(), text.Line(err.Error(), MaxProblem)
	}
	some := func(label string) cache.ByObject {
		exists, err := labels.NewRequirement(label, selection.Exists, nil)
		if err != nil {
			panic(err) // no such label
		}
		return cache.ByObject{Label: labels.NewSelector().Add(*exists)}
	}
	system := cache.ByObject{Namespaces: map[string]cache.Config{systemNamespace: {}}}
	watches, err := cache.New(config, cache.Options{
		Scheme: c.Scheme(), Mapper: c.RESTMapper(), DefaultUnsafeDisableDeepCopy: ptr.To(true), DefaultWatchErrorHandler: failed,
		ByObject: map[client.Object]cache.ByObject{
			&corev1.Pod{}: some(broker.LabelHold), &corev1.Node{}: some(broker.LabelProvider), &appsv1.Deployment{}: system, &coordinationv1.Lease{}: system,
			&broker.ClusterAdvertisement{}: system, &broker.ReservationInstruction{}: system,
		},
	})
	if err != nil {
		return nil, nil, err
	}
	go func() { _ = watches.Start(ctx) }() // it ends with the context
	cached, err := client.New(config, client.Options{Scheme: c.Scheme(), Mapper: c.RESTMapper(), Cache: &client.CacheOptions{Reader: watches}})
	if err != nil {
		return nil, nil, err
	}
	return cached, func() string {
		mu.Lock()
		defer mu.Unlock()
		if time.Since(at) > lostFor {
			return ""
		}
		return why
	}, nil
}
