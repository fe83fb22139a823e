package reservation_test

import (
	"fmt"
	"strings"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/controlplane"
)

// columns: kubectl get reservations in the hub says for whom it is, what is wanted, granted, where, at
// which price, the position in the queue and the state.
func columns(e *env) {
	p := e.start(nil)
	p.advertise(e.spec("paris", "1"))
	e.request("rome-1", 15, func(r *broker.Reservation) {
		r.Annotations = map[string]string{broker.LabelSourceNamespace: "shop", broker.LabelSourceName: "web-5f0c"}
		r.Labels = map[string]string{broker.LabelSourceNamespace: "shop"}
	})
	e.expectLine("rome-1", "Owner=rome/shop/web-5f0c, Wanted=15 pods, Granted=none, Where=, Price/H=, Queue=1, State=InsufficientCapacity, Age=")
	berlin := e.spec("berlin", "1")
	berlin.Cost = nil
	p.advertise(berlin)
	e.expectLine("rome-1", "Owner=rome/shop/web-5f0c, Wanted=15 pods, Granted=none, Where=, Price/H=, Queue=, State=WaitingForProvider, Age=")
	p.answer("paris", "rome-1", true, "")
	e.expectLine("rome-1", "Wanted=15 pods, Granted=10 pods, Where=paris, Price/H=0.10 EUR, Queue=, State=WaitingForProvider, Age=")
	p.answer("berlin", "rome-1", true, "")
	// What a consumer says of a grant before it is written is not of that grant.
	e.expectLine("rome-1", "Granted=15 pods, Where=berlin, paris, Price/H=0.10 EUR + unknown, Queue=, State=WaitingForVirtualNode, Age=")
	p.use("rome-1", "berlin", "paris")
	e.expectLine("rome-1", "Wanted=15 pods, Granted=15 pods, Where=berlin, paris, Price/H=0.10 EUR + unknown, Queue=, State=Ready, Age=")

	e.request("for-rome", 1, func(r *broker.Reservation) {
		total := cpu("200m")
		r.Spec.PodSets, r.Spec.RequestedResources = nil, &total
	})
	e.expectLine("for-rome", "Owner=rome, Wanted=cpu 200m, Granted=none, Where=, Price/H=, Queue=, State=WaitingForProvider, Age=")
	if wide, err := controlplane.Line(e.Context(), e.config, true, "reservations", e.namespace, "for-rome"); err != nil || !strings.Contains(wide, ", Phase=Reserved, Used=, ") || !strings.Contains(wide, ", Requester=rome, ") {
		e.Errorf("kubectl get reservations -o wide: %s (%v)", wide, err)
	}
}

// expectLine waits until kubectl get prints a part.
func (e *env) expectLine(name, part string) {
	e.Helper()
	e.eventually(fmt.Sprintf("%q of %s", part, name), func() error {
		line, err := controlplane.Line(e.Context(), e.config, false, "reservations", e.namespace, name)
		if err == nil && !strings.Contains(line, part) {
			err = fmt.Errorf("it is %q", line)
		}
		return err
	})
}
