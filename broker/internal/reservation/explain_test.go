package reservation_test

import (
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/decide"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// explain: the requester, and no other cluster, learns why each cluster is not chosen.
func explain(e *env) {
	p := e.start(nil)
	p.advertise(e.spec("paris", "100m"))
	closed := e.spec("berlin", "8")
	closed.Lending.Consumers = []string{"oslo"}
	p.advertise(closed)
	e.request("r", 3)
	e.expectRejection("r", "paris", "", "0 of 2 pods")
	// The status names all clusters for the hub's administrator; the messages are for rome, too.
	r := e.get("r")
	if got := rejection(r, "berlin"); got.Reason != capacity.ReasonConsumerNotAdmitted {
		e.Errorf("berlin is %+v", got)
	}
	for _, c := range r.Status.Conditions {
		if strings.Contains(c.Message, "berlin") {
			e.Errorf("%s names berlin: %s", c.Type, c.Message)
		}
	}
	e.expectCondition("r", broker.ConditionQueued, true, "1 cluster does not offer capacity to rome")

	rejections, err := p.Explain("rome", "r")
	expect.NoError(e, err)
	reasons := map[string]string{}
	for _, rejection := range rejections {
		reasons[rejection.Cluster] = rejection.Reason
		if rejection.Message == "" || rejection.Reason == capacity.ReasonConsumerNotAdmitted && rejection.Message != "The cluster does not offer capacity to rome (lend.consumers does not list it)." {
			e.Errorf("the message for %s is %q", rejection.Cluster, rejection.Message)
		}
	}
	if len(reasons) != 2 || reasons["berlin"] != capacity.ReasonConsumerNotAdmitted || reasons["paris"] == "" || reasons["paris"] == decide.ReasonNotPreferred {
		e.Errorf("the reasons are %v", reasons)
	}
	for _, other := range []string{"paris", "oslo", ""} {
		if _, err := p.Explain(other, "r"); !apierrors.IsNotFound(err) {
			e.Errorf("%q got %v", other, err)
		}
	}
	if _, err := p.Explain("rome", "none"); !apierrors.IsNotFound(err) {
		e.Errorf("a Reservation that does not exist: %v", err)
	}
}
