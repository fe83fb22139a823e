package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/explain"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// reader reads with the caller's permissions, several kinds at once, and notes what it may not read.
type reader struct {
	client.Client
	ctx context.Context

	running sync.WaitGroup
	mu      sync.Mutex
	denied  []explain.Unreadable
	// missing is why a kind of Spillway's is not there, failed why the API server has not answered.
	missing, failed error
}

func newReader(ctx context.Context, c client.Client) *reader { return &reader{ctx: ctx, Client: c} }

// get reads an object, if it exists, and reports whether it was read. what is its plural.
func (r *reader) get(what string, object client.Object, namespace, name string) bool {
	err := r.Get(r.ctx, client.ObjectKey{Namespace: namespace, Name: name}, object)
	return r.note("get", what, namespace, err)
}

// list reads objects in the background: wait waits for all.
func (r *reader) list(what string, list client.ObjectList, options ...client.ListOption) {
	r.running.Go(func() {
		var o client.ListOptions
		o.ApplyOptions(options)
		r.note("list", what, o.Namespace, r.List(r.ctx, list, options...))
	})
}

// note keeps why something could not be read.
func (r *reader) note(verb, what, namespace string, err error) (ok bool) {
	if err == nil {
		return true
	}
	if apierrors.IsNotFound(err) && verb == "get" {
		return false
	}
	denied := explain.Unreadable{What: what, Reason: err.Error()}
	if apierrors.IsForbidden(err) {
		denied = explain.Unreadable{What: what, Permission: verb + " " + what, Namespace: namespace}
		if namespace != "" {
			denied.Permission += " in namespace " + namespace
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if absent := meta.IsNoMatchError(err) || apierrors.IsNotFound(err); absent && what == explain.Reservations {
		r.missing = err
	} else if absent && strings.HasSuffix(what, "."+broker.Group) {
		denied.Reason = "there is no such kind: the CRDs are older than this program, or of the hub only"
	}
	if apierrors.IsTimeout(err) || apierrors.ReasonForError(err) == "" && !meta.IsNoMatchError(err) {
		r.failed = err
	}
	if !slices.Contains(r.denied, denied) {
		r.denied = append(r.denied, denied)
	}
	return false
}

// wait waits for the lists, and returns what could not be read.
func (r *reader) wait() []explain.Unreadable {
	r.running.Wait()
	slices.SortFunc(r.denied, func(a, b explain.Unreadable) int { return strings.Compare(a.What, b.What) })
	return r.denied
}

// forbidden is the error of a verb without an answer because the caller may not read one of some kinds, nil
// if it may read all of them.
func (o *options) forbidden(unreadable []explain.Unreadable, kinds ...string) error {
	if !slices.ContainsFunc(unreadable, func(u explain.Unreadable) bool { return u.Permission != "" && slices.Contains(kinds, u.What) }) {
		return nil
	}
	return fmt.Errorf("nothing is known of Spillway in %s: %s", o.cluster(), explain.Forbidden(unreadable))
}

// err is why nothing can be concluded from what was read.
func (r *reader) err(o *options) error {
	switch {
	case r.failed != nil:
		return fmt.Errorf("reading from %s: %w", o.cluster(), r.failed)
	case r.missing != nil:
		return o.notInstalled(r.missing)
	}
	return nil
}
