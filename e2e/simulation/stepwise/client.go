package stepwise

import (
	"context"
	"fmt"
	"reflect"

	"sigs.k8s.io/controller-runtime/pkg/client"
)

// gated makes each call wait at the gate.
type gated struct {
	client.Client
	program *Program
}

func what(verb string, object any, name string) string {
	return fmt.Sprintf("%s %s %s", verb, reflect.TypeOf(object).Elem().Name(), name)
}

func (g *gated) Get(ctx context.Context, key client.ObjectKey, object client.Object, options ...client.GetOption) error {
	return g.program.perform(ctx, what("get", object, key.Name), false, func() error { return g.Client.Get(ctx, key, object, options...) })
}

func (g *gated) List(ctx context.Context, list client.ObjectList, options ...client.ListOption) error {
	return g.program.perform(ctx, what("list", list, list.GetObjectKind().GroupVersionKind().Kind), false, func() error { return g.Client.List(ctx, list, options...) })
}

func (g *gated) Create(ctx context.Context, object client.Object, options ...client.CreateOption) error {
	return g.program.perform(ctx, what("create", object, object.GetName()), true, func() error { return g.Client.Create(ctx, object, options...) })
}

func (g *gated) Update(ctx context.Context, object client.Object, options ...client.UpdateOption) error {
	return g.program.perform(ctx, what("update", object, object.GetName()), true, func() error { return g.Client.Update(ctx, object, options...) })
}

func (g *gated) Delete(ctx context.Context, object client.Object, options ...client.DeleteOption) error {
	return g.program.perform(ctx, what("delete", object, object.GetName()), true, func() error { return g.Client.Delete(ctx, object, options...) })
}

func (g *gated) Patch(ctx context.Context, object client.Object, patch client.Patch, options ...client.PatchOption) error {
	return g.program.perform(ctx, what("patch", object, object.GetName()), true, func() error { return g.Client.Patch(ctx, object, patch, options...) })
}

func (g *gated) Status() client.SubResourceWriter {
	return &gatedStatus{SubResourceWriter: g.Client.Status(), program: g.program}
}

type gatedStatus struct {
	client.SubResourceWriter
	program *Program
}

func (g *gatedStatus) Update(ctx context.Context, object client.Object, options ...client.SubResourceUpdateOption) error {
	return g.program.perform(ctx, what("update status of", object, object.GetName()), true, func() error {
		return g.SubResourceWriter.Update(ctx, object, options...)
	})
}

func (g *gatedStatus) Patch(ctx context.Context, object client.Object, patch client.Patch, options ...client.SubResourcePatchOption) error {
	return g.program.perform(ctx, what("patch status of", object, object.GetName()), true, func() error {
		return g.SubResourceWriter.Patch(ctx, object, patch, options...)
	})
}

// cachedClient reads from the cache.
type cachedClient struct {
	client.Client
	cache *snapshots
}

func (c *cachedClient) Get(ctx context.Context, key client.ObjectKey, object client.Object, options ...client.GetOption) error {
	return c.cache.Get(ctx, key, object, options...)
}

func (c *cachedClient) List(ctx context.Context, list client.ObjectList, options ...client.ListOption) error {
	return c.cache.List(ctx, list, options...)
}

// readerClient reads from another reader.
type readerClient struct {
	client.Client
	reader client.Reader
}

func (c *readerClient) Get(ctx context.Context, key client.ObjectKey, object client.Object, options ...client.GetOption) error {
	return c.reader.Get(ctx, key, object, options...)
}

func (c *readerClient) List(ctx context.Context, list client.ObjectList, options ...client.ListOption) error {
	return c.reader.List(ctx, list, options...)
}
