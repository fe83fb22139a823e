package reservation

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol/objects"
)

// TestOfBroker: in a hub that is also a consumer, what belongs to the broker is not asked for, also
// if another cluster has written it without any label.
func TestOfBroker(t *testing.T) {
	for name, c := range map[string]struct {
		object metav1.ObjectMeta
		want   bool
	}{
		"its own":                      {metav1.ObjectMeta{Namespace: "shop", Finalizers: []string{broker.FinalizerRequest}}, false},
		"the broker's copy":            {metav1.ObjectMeta{Namespace: broker.SystemNamespace, Labels: map[string]string{broker.LabelRequester: "rome"}}, true},
		"of the hub":                   {metav1.ObjectMeta{Namespace: broker.SystemNamespace, Finalizers: []string{broker.FinalizerLedger}}, true},
		"in another cluster's letters": {metav1.ObjectMeta{Namespace: objects.Namespace("rome")}, true},
	} {
		if got := ofBroker(&broker.Reservation{ObjectMeta: c.object}); got != c.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}
