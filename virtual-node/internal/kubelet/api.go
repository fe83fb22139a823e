package kubelet

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"

	"github.com/go-logr/logr"
	"github.com/virtual-kubelet/virtual-kubelet/node/nodeutil"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
)

// Guests is what the API needs to know of a node's pods. Its methods are called
// from many requests at once.
type Guests interface {
	// Locate finds the guest of a home pod; ok is false where the node has no such
	// pod or its guest is not there.
	Locate(namespace, pod string) (guestNamespace, guestName string, ok bool)
	// Provider is how the provider's API server is reached now. It is called for
	// each request, since the token changes.
	Provider() (*rest.Config, error)
	// Pods are the home pods of the node, with their status. They are only read.
	Pods() []*corev1.Pod
}

// Options of New. All but Log are needed.
type Options struct {
	// NodeName of the virtual node.
	NodeName string
	// Auth decides who may ask for what; NewAuth makes the usual one.
	Auth nodeutil.Auth
	// Guests of the node.
	Guests Guests
	// Clock tells the time of what is measured while the node has no guest that is.
	Clock clock.PassiveClock
	// Log takes what an operator of the virtual node should know. The zero value
	// drops it.
	Log logr.Logger
}

// New makes the handler of a node's kubelet API. Nothing in it answers before the
// request was authenticated and authorised.
func New(o Options) (http.Handler, error) {
	if o.NodeName == "" || o.Auth == nil || o.Guests == nil || o.Clock == nil {
		return nil, errors.New("the kubelet API of a virtual node needs NodeName, Auth, Guests and Clock")
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

// api carries requests about pods on to their guests.
type api struct {
	node   string
	guests Guests
	log    logr.Logger
}

// pods lists the node's pods as a kubelet does.
func (a *api) pods(w http.ResponseWriter, _ *http.Request) {
	list := corev1.PodList{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "PodList"},
		Items:    []corev1.Pod{},
	}
	for _, pod := range a.guests.Pods() {
		list.Items = append(list.Items, *pod)
	}
	writeJSON(w, a.log, list)
}

// writeJSON answers with value. What fails after the header has gone out can only
// be logged.
func writeJSON(w http.ResponseWriter, log logr.Logger, value any) {
	w.Header().Set("Content-Type", "application/json")
	if err := json.NewEncoder(w).Encode(value); err != nil {
		log.V(1).Info("An answer of the kubelet API broke off", "Error", err.Error())
	}
}
