package kubelet

import (
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"net/http"

	"github.com/go-logr/logr"
	"github.com/virtual-kubelet/virtual-kubelet/node/nodeutil"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
)

// Guests are the pods of the node and their guests. Methods are called
// concurrently.
type Guests interface {
	// Locate returns the guest of a pod; ok is false if the node has no such pod or
	// the pod has no guest.
	Locate(namespace, pod string) (guestNamespace, guestName string, ok bool)
	// Pods returns copies of the pods of the node with their status, one at a time: all of
	// them need far more memory than what a node keeps of them.
	Pods() iter.Seq[*corev1.Pod]
	// ProviderConfig returns the client configuration for the provider's API server.
	ProviderConfig() *rest.Config
}

// Options of New. All but Log are required.
type Options struct {
	// NodeName is the name of the virtual node.
	NodeName string
	// Auth authenticates and authorizes requests: see NewAuth.
	Auth   nodeutil.Auth
	Guests Guests
	// Clock is the time of the node's usage while no guest's was measured.
	Clock clock.PassiveClock
	// Log discards if it is the zero value.
	Log logr.Logger
}

// New returns the handler of a node's kubelet API. All paths require authentication
// and authorization.
func New(o Options) (http.Handler, error) {
	if o.NodeName == "" || o.Auth == nil || o.Guests == nil || o.Clock == nil {
		return nil, errors.New("kubelet API: NodeName, Auth, Guests and Clock are required")
	}
	if o.Log.GetSink() == nil {
		o.Log = logr.Discard()
	}
	a := &api{node: o.NodeName, guests: o.Guests, log: o.Log}
	use := newUsage(o)

	routes := http.NewServeMux()
	routes.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "ok") })
	routes.HandleFunc("GET /pods", a.pods)
	routes.HandleFunc("GET /pods/{$}", a.pods)
	routes.HandleFunc("GET /containerLogs/{namespace}/{pod}/{container}", a.logs)
	for _, method := range []string{http.MethodGet, http.MethodPost} {
		routes.HandleFunc(method+" /exec/{namespace}/{pod}/{container}", a.exec)
		routes.HandleFunc(method+" /attach/{namespace}/{pod}/{container}", a.attach)
		routes.HandleFunc(method+" /portForward/{namespace}/{pod}", a.portForward)
	}
	routes.HandleFunc("GET /stats/summary", use.summary)
	routes.HandleFunc("GET /stats/summary/{$}", use.summary)
	routes.HandleFunc("GET /metrics/resource", use.metrics)
	return nodeutil.WithAuth(o.Auth, routes), nil
}

// api forwards requests about pods to their guests.
type api struct {
	node   string
	guests Guests
	log    logr.Logger
}

// pods serves /pods.
func (a *api) pods(w http.ResponseWriter, _ *http.Request) {
	list := corev1.PodList{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "PodList"},
		Items:    []corev1.Pod{},
	}
	for pod := range a.guests.Pods() {
		list.Items = append(list.Items, *pod)
	}
	writeJSON(w, a.log, list)
}

// writeJSON writes a response. Errors are only logged: the header was sent.
func writeJSON(w http.ResponseWriter, log logr.Logger, value any) {
	w.Header().Set("Content-Type", "application/json")
	if err := json.NewEncoder(w).Encode(value); err != nil {
		log.V(1).Info("Failed to write a response", "reason", err.Error())
	}
}
