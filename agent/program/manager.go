package program

import (
	"context"
	"fmt"
	"maps"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/spillway-dev/spillway/agent/internal/inventory"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/undecoded"
)

// undecodable is the metric of the objects that the agent cannot decode.
var undecodable = undecoded.NewGauge("agent")

func init() { metrics.Registry.MustRegister(undecodable) }

// Cached is what the cache of a manager is limited to.
type Cached struct {
	// InstructionNamespace and Prices are as in Parts.
	InstructionNamespace string
	Prices               types.NamespacedName
	// Driver is what the driver limits.
	Driver map[client.Object]cache.ByObject
}

// byObject are the limits of all kinds.
func (c Cached) byObject() map[client.Object]cache.ByObject {
	instructions := cache.ByObject{Namespaces: map[string]cache.Config{c.InstructionNamespace: {}}}
	limits := map[client.Object]cache.ByObject{&broker.ReservationInstruction{}: instructions, &broker.ProviderInstruction{}: instructions}
	maps.Copy(limits, c.Driver)
	maps.Copy(limits, inventory.CacheByObject())
	if c.Prices.Name != "" {
		limits[&corev1.ConfigMap{}] = cache.ByObject{Namespaces: map[string]cache.Config{
			c.Prices.Namespace: {FieldSelector: fields.OneTermEqualSelector(metav1.ObjectNameField, c.Prices.Name)},
		}}
	}
	return limits
}

// NewManager returns a manager with the options, of which it sets the cache, for Add.
func NewManager(config *rest.Config, options ctrl.Options, cached Cached) (ctrl.Manager, error) {
	config = rest.CopyConfig(config)
	config.QPS, config.Burst = 200, 400
	objects := undecoded.New(ctrl.Log.WithName("undecoded"), undecodable, clock.RealClock{})
	options.Cache = cache.Options{ByObject: cached.byObject(), DefaultTransform: cache.TransformStripManagedFields(), NewInformer: objects.NewInformer}
	// The priority queue of controller-runtime v0.23 can deadlock when a manager
	// stops ("failed waiting for all runnables to end within grace period of 30s").
	options.Controller.UsePriorityQueue = ptr.To(false)
	mgr, err := ctrl.NewManager(config, options)
	if err != nil {
		return nil, fmt.Errorf("creating the manager: %w", err)
	}
	return mgr, mgr.Add(manager.RunnableFunc(func(ctx context.Context) error {
		objects.Run(ctx, mgr.GetEventRecorder("spillway-agent"))
		return nil
	}))
}
