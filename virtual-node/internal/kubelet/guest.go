package kubelet

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// guest is the guest that a request is about.
type guest struct {
	podNamespace, podName string
	namespace, name       string
	config                *rest.Config
	client                kubernetes.Interface
}

// locate returns the guest that a request is about. If there is none, it writes the
// response and returns false.
func (a *api) locate(w http.ResponseWriter, r *http.Request) (guest, bool) {
	g := guest{podNamespace: r.PathValue("namespace"), podName: r.PathValue("pod")}
	var ok bool
	if g.namespace, g.name, ok = a.guests.Locate(g.podNamespace, g.podName); !ok {
		http.Error(w, fmt.Sprintf("pod %s/%s is not on virtual node %s or has no guest yet: see the events of the pod",
			g.podNamespace, g.podName, a.node), http.StatusNotFound)
		return guest{}, false
	}
	// A timeout would end streams that stay open.
	g.config = rest.CopyConfig(a.guests.ProviderConfig())
	g.config.Timeout = 0
	var err error
	if g.client, err = kubernetes.NewForConfig(g.config); err != nil {
		writeError(w, fmt.Errorf("%w: %w", errInvalidConfig, err))
		return guest{}, false
	}
	return g, true
}

// request returns a request for a subresource of the guest.
func (g guest) request(verb, subresource string) *rest.Request {
	return g.client.CoreV1().RESTClient().Verb(verb).
		Namespace(g.namespace).Resource("pods").Name(g.name).SubResource(subresource)
}

// withPodName replaces the guest's name in an error by the pod's, which is the one
// that the client knows.
func (g guest) withPodName(err error) error {
	if err == nil || !strings.Contains(err.Error(), g.name) {
		return err
	}
	return renamedError{error: err, text: strings.ReplaceAll(err.Error(), g.name, g.podName)}
}

type renamedError struct {
	error
	text string
}

func (e renamedError) Error() string { return e.text }
func (e renamedError) Unwrap() error { return e.error }

var errInvalidConfig = errors.New("the virtual node has no valid configuration for its provider")

// writeError responds with the provider's error: 503 if the provider is
// unreachable, 502 if it refused access or failed, else the provider's own code,
// since the request was invalid.
func writeError(w http.ResponseWriter, err error) {
	var status apierrors.APIStatus
	switch isStatus := errors.As(err, &status); {
	case errors.Is(err, errInvalidConfig):
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
	case errors.Is(err, context.DeadlineExceeded):
		http.Error(w, "the provider did not respond in time; retry when the virtual node is Ready: "+err.Error(), http.StatusServiceUnavailable)
	case !isStatus:
		http.Error(w, "the provider is unreachable; retry when the virtual node is Ready: "+err.Error(), http.StatusServiceUnavailable)
	case apierrors.IsUnauthorized(err) || apierrors.IsForbidden(err):
		http.Error(w, "the provider refused access; the agent renews it, retry in a minute: "+err.Error(), http.StatusBadGateway)
	case status.Status().Code < 400 || status.Status().Code >= 500:
		http.Error(w, "the provider failed: "+err.Error(), http.StatusBadGateway)
	default:
		http.Error(w, err.Error(), int(status.Status().Code))
	}
}
