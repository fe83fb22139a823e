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

// guest is a pod at the provider as one request sees it.
type guest struct {
	homeNamespace, homePod string
	namespace, name        string
	config                 *rest.Config
	client                 kubernetes.Interface
}

// locate finds the guest that a request is about. Where it cannot, it has
// answered the request and returns false.
func (a *api) locate(w http.ResponseWriter, r *http.Request) (guest, bool) {
	g := guest{homeNamespace: r.PathValue("namespace"), homePod: r.PathValue("pod")}
	var ok bool
	if g.namespace, g.name, ok = a.guests.Locate(g.homeNamespace, g.homePod); !ok {
		http.Error(w, fmt.Sprintf("pod %s/%s does not run on virtual node %s, or is not at the provider yet: its events say how far it is",
			g.homeNamespace, g.homePod, a.node), http.StatusNotFound)
		return guest{}, false
	}
	config, err := a.guests.Provider()
	if err != nil {
		answerProblem(w, fmt.Errorf("%w: %w", errNoConnection, err))
		return guest{}, false
	}
	// A limit on a whole request would end streams that are to stay open.
	g.config = rest.CopyConfig(config)
	g.config.Timeout = 0
	if g.client, err = kubernetes.NewForConfig(g.config); err != nil {
		answerProblem(w, fmt.Errorf("%w: %w", errNoConnection, err))
		return guest{}, false
	}
	return g, true
}

// at is a request for a subresource of the guest.
func (g guest) at(verb, subresource string) *rest.Request {
	return g.client.CoreV1().RESTClient().Verb(verb).
		Namespace(g.namespace).Resource("pods").Name(g.name).SubResource(subresource)
}

// homeNames puts the pod's name at home in place of the guest's, which those who
// ask have never heard of.
func (g guest) homeNames(err error) error {
	if err == nil || !strings.Contains(err.Error(), g.name) {
		return err
	}
	return renamed{error: err, text: strings.ReplaceAll(err.Error(), g.name, g.homePod)}
}

// renamed is an error in other words.
type renamed struct {
	error
	text string
}

func (e renamed) Error() string { return e.text }
func (e renamed) Unwrap() error { return e.error }

// errNoConnection means that the link to the provider cannot be used now.
var errNoConnection = errors.New("the virtual node has no usable connection to its provider")

// answerProblem answers in words why the provider did not do what was asked: 503
// where it is not reached, 502 where it refuses the virtual node or fails itself,
// and otherwise its own code, since what was wrong was the request.
func answerProblem(w http.ResponseWriter, err error) {
	http.Error(w, problem(err), problemCode(err))
}

func problemCode(err error) int {
	var status apierrors.APIStatus
	switch {
	case errors.Is(err, errNoConnection) || !errors.As(err, &status):
		return http.StatusServiceUnavailable
	case refused(err) || status.Status().Code < 400 || status.Status().Code >= 500:
		return http.StatusBadGateway
	default:
		return int(status.Status().Code)
	}
}

func problem(err error) string {
	var status apierrors.APIStatus
	switch {
	case errors.Is(err, errNoConnection):
		return err.Error()
	case errors.Is(err, context.DeadlineExceeded):
		return "the provider did not answer in time; try again once its virtual node is Ready: " + err.Error()
	case !errors.As(err, &status):
		return "the provider cannot be reached; try again once its virtual node is Ready: " + err.Error()
	case refused(err):
		return "the provider refuses the virtual node; its agent renews the access, try again in a minute: " + err.Error()
	default:
		return "the provider answers: " + err.Error()
	}
}

// refused is true where the provider does not accept the link's token, or not for
// this.
func refused(err error) bool {
	return apierrors.IsUnauthorized(err) || apierrors.IsForbidden(err)
}
