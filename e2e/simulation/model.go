package main

import (
	"context"
	"fmt"
	"hash/fnv"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agent "github.com/spillway-dev/spillway/agent/simulated"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/simulation/stepwise"
)

// labelInstruction marks a guest with the ReservationInstruction that it runs on.
const labelInstruction = "simulation.example.com/instruction"

// modelCache are the steps of a cluster's model as of the versions of its inputs.
type modelCache struct {
	versions [3]int64
	steps    []stepwise.Step
	// until is when the time to leave of a guest is over, zero if none waits for that.
	until time.Time
}

// modelSteps are the steps of what the simulation does not run: the consumer's virtual
// nodes, the pods on them, and the guests at the providers. A guest starts within what
// the provider enforces and a node has; it stops when its instruction has no capacity
// for it.
func (w *world) modelSteps(c *cluster) []stepwise.Step {
	var versions [3]int64
	for i, other := range w.clusters {
		versions[i] = other.server.Version()
	}
	if c.model.versions != versions || !c.model.until.IsZero() && !c.clock.Now().Before(c.model.until) {
		c.model = modelCache{versions: versions}
		c.model.steps = w.computeModelSteps(c)
	}
	return c.model.steps
}

func (w *world) computeModelSteps(c *cluster) (steps []stepwise.Step) {
	if c.forgotten {
		// Who ends the membership of a cluster ends its guests.
		for _, provider := range w.clusters {
			if guests := provider.guests(c.id, ""); len(guests) > 0 {
				steps = append(steps, c.stopStep(provider, guests[0]))
			}
		}
		return steps
	}
	var list broker.ReservationInstructionList
	must(c.client.List(context.Background(), &list))
	known := map[string]bool{}
	for i := range list.Items {
		instruction := &list.Items[i]
		known[instruction.Name] = true
		provider := w.cluster(instruction.Spec.TargetClusterID)
		guests := provider.guests(c.id, instruction.Name)
		ended := c.ended(instruction)
		want := int(broker.HeldCapacity{PodSets: instruction.Spec.PodSets}.Pods())
		if ended {
			want = 0
		}
		useless := want > 0 && len(guests) == 0 && unusable(instruction)
		status := modelStatus(instruction, ended && len(guests) == 0, useless)
		if w := instruction.Spec.Withdrawal; w != nil && len(guests) <= want {
			status.LeftAttempt = w.Attempt
		}
		if !equality.Semantic.DeepEqual(status, instruction.Status) {
			steps = append(steps, stepwise.Step{Name: c.id + " virtual node of " + instruction.Name, Do: func() {
				if useless && !meta.IsStatusConditionTrue(instruction.Status.Conditions, broker.ConditionUnusable) {
					w.useless++
				}
				instruction.Status = status
				must(c.client.Status().Update(context.Background(), instruction))
			}})
		}
		switch {
		case len(guests) > want && !ended && c.mayStay(instruction):
		case len(guests) > want:
			steps = append(steps, c.stopStep(provider, guests[0]))
		case len(guests) < want && !useless && provider.admits(c.id):
			if node := provider.freeNode(); node != "" {
				steps = append(steps, stepwise.Step{Name: c.id + " starts a guest in " + provider.id + " on " + instruction.Name, Do: func() {
					provider.addPod(node, map[string]string{agent.LabelConsumer: c.id, labelInstruction: instruction.Name})
				}})
			}
		}
	}
	for _, provider := range w.clusters {
		for _, guest := range provider.guests(c.id, "") {
			if !known[guest.Labels[labelInstruction]] {
				steps = append(steps, c.stopStep(provider, guest))
				break
			}
		}
	}
	return steps
}

// mayStay reports whether guests beyond the grant may stay for now: the provider has
// withdrawn their capacity, and the time to leave is not over.
func (c *cluster) mayStay(instruction *broker.ReservationInstruction) bool {
	w := instruction.Spec.Withdrawal
	if w == nil || w.Attempt <= instruction.Status.LeftAttempt || !c.clock.Now().Before(w.LeaveBy.Time) {
		return false
	}
	if c.model.until.IsZero() || w.LeaveBy.Time.Before(c.model.until) {
		c.model.until = w.LeaveBy.Time
	}
	return true
}

func (c *cluster) stopStep(provider *cluster, guest *corev1.Pod) stepwise.Step {
	return stepwise.Step{Name: c.id + " stops guest " + guest.Name, Do: func() {
		must(client.IgnoreNotFound(provider.client.Delete(context.Background(), guest)))
	}}
}

// ended reports whether the Reservation of an instruction is deleted or being deleted.
func (c *cluster) ended(instruction *broker.ReservationInstruction) bool {
	var source broker.Reservation
	err := c.client.Get(context.Background(), types.NamespacedName{Namespace: instruction.Spec.SourceNamespace, Name: instruction.Spec.SourceName}, &source)
	must(client.IgnoreNotFound(err))
	return err != nil || source.UID != instruction.Spec.SourceUID || source.DeletionTimestamp != nil
}

// unusable reports whether no pod of the consumer can use what an instruction is for, as where
// the name of its namespace is taken at the provider: one attempt in eight.
func unusable(instruction *broker.ReservationInstruction) bool {
	hash := fnv.New32a()
	fmt.Fprint(hash, instruction.Name, instruction.Spec.Attempt)
	return hash.Sum32()%8 == 0
}

// modelStatus is the status of a virtual node that has its capacity at once; useless is
// whether no pod can use it.
func modelStatus(instruction *broker.ReservationInstruction, released, useless bool) broker.ReservationInstructionStatus {
	status := *instruction.Status.DeepCopy()
	status.Delivered, status.ObservedAttempt, status.ObservedGeneration = true, instruction.Spec.Attempt, instruction.Generation
	status.Carried = &broker.HeldCapacity{Totals: instruction.Spec.RequestedResources, PodSets: instruction.Spec.PodSets}
	set := func(kind string, value bool) {
		condition := metav1.Condition{Type: kind, Status: metav1.ConditionFalse, Reason: "Simulated"}
		if value {
			condition.Status = metav1.ConditionTrue
		}
		meta.SetStatusCondition(&status.Conditions, condition)
	}
	set(broker.ConditionPeered, true)
	set(broker.ConditionVirtualNodeReady, !useless)
	if meta.RemoveStatusCondition(&status.Conditions, broker.ConditionUnusable); useless {
		status.Carried = nil
		set(broker.ConditionUnusable, true)
	}
	set(broker.ConditionRequesterReleased, released)
	for i := range status.Conditions {
		status.Conditions[i].LastTransitionTime = metav1.Unix(0, 0)
	}
	return status
}

// podList lists a cluster's pods without copying.
func (c *cluster) podList() []corev1.Pod {
	var list corev1.PodList
	must(c.client.List(context.Background(), &list, client.UnsafeDisableDeepCopy))
	return list.Items
}

// guests lists the guests of a consumer, of one instruction unless it is empty.
func (c *cluster) guests(consumer, instruction string) (out []*corev1.Pod) {
	pods := c.podList()
	for i := range pods {
		labels := pods[i].Labels
		if labels[agent.LabelConsumer] == consumer && (instruction == "" || labels[labelInstruction] == instruction) {
			out = append(out, &pods[i])
		}
	}
	return out
}

// admits reports whether the provider lets a consumer start one more guest.
func (c *cluster) admits(consumer string) bool {
	resources, pods := c.grants.Of(consumer)
	running := len(c.guests(consumer, ""))
	return int64(running) < resources.Cpu().Value() && running < int(pods)
}

// freeNode is a node with a free CPU; "" if there is none.
func (c *cluster) freeNode() string {
	var nodes corev1.NodeList
	must(c.client.List(context.Background(), &nodes, client.UnsafeDisableDeepCopy))
	pods := c.podList()
	for i := range nodes.Items {
		if nodes.Items[i].Spec.Unschedulable {
			continue
		}
		used := 0
		for _, pod := range pods {
			if pod.Spec.NodeName == nodes.Items[i].Name {
				used++
			}
		}
		if used < cpuPerNode {
			return nodes.Items[i].Name
		}
	}
	return ""
}

// addPod runs a pod of one CPU on a node.
func (c *cluster) addPod(node string, labels map[string]string) {
	c.pods++
	must(c.client.Create(context.Background(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: workloads, Name: fmt.Sprintf("pod-%d", c.pods), Labels: labels},
		Spec: corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: "main", Resources: corev1.ResourceRequirements{
			Requests: corev1.ResourceList{corev1.ResourceCPU: *resource.NewQuantity(1, resource.DecimalSI)},
		}}}},
	}))
}

// localPods are the cluster's own pods.
func (c *cluster) localPods() (out []*corev1.Pod) {
	return slices.DeleteFunc(c.allPods(), func(pod *corev1.Pod) bool { return pod.Labels[agent.LabelConsumer] != "" })
}

func (c *cluster) allPods() (out []*corev1.Pod) {
	pods := c.podList()
	for i := range pods {
		out = append(out, &pods[i])
	}
	return out
}
