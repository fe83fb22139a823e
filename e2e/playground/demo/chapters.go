package demo

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/playground/environment"
)

// The demo's clusters: pods overflow from home to first, which is cheaper, and then
// to second, which has GPUs.
const (
	home   = "rome"
	first  = "paris"
	second = "berlin"
)

// The demo's namespace and workloads.
const (
	shop  = "shop"
	web   = "web"
	train = "train"
)

// Pod counts: what fits at home, more, and few.
const (
	atFirst = 6
	many    = 14
	few     = 4
	fitHome = 8
	trains  = 2
)

// cast lists the member clusters.
var cast = environment.Options{Members: []environment.Member{
	{
		Name: home, Overflows: true,
		Nodes:  []environment.NodeGroup{{Prefix: "rome", Count: 2, Resources: capacity("4", 0)}},
		Values: []string{"lend.enabled=false"},
	},
	{
		Name:   first,
		Nodes:  []environment.NodeGroup{{Prefix: "paris", Count: 3, Resources: capacity("4", 0)}},
		Values: []string{"cost.cpu=0.03", "cost.memory=0.004"},
	},
	{
		Name:   second,
		Nodes:  []environment.NodeGroup{{Prefix: "berlin", Count: 2, Resources: capacity("4", 2), Labels: map[string]string{"nvidia.com/gpu.product": "A100"}}},
		Values: []string{"cost.cpu=0.05", "cost.memory=0.006"},
	},
}}

// chapter is an action and its expected outcome.
type chapter struct {
	title, text string
	// ask is the command that shows the outcome.
	ask string
	// do performs the action; nil for none.
	do func(context.Context, *environment.Playground) error
	// check returns the outcome, or an error that says what is missing.
	check func(snapshot) (string, error)
	// deadline for the action and its outcome.
	deadline time.Duration
}

// sabotageBefore is the chapter, active from 0, that sabotage comes before.
const sabotageBefore = 2

var chapters = []chapter{
	{
		title: "Clusters join",
		text: `rome is the consumer: two nodes of four cores. paris and berlin are providers: paris
has more capacity, berlin has GPUs and a higher price. Each has an agent that advertises
to the broker in the hub. No cluster has credentials of another.`,
		ask:      "kubectl spillway clusters --hub-context=hub",
		check:    clustersJoined,
		deadline: 90 * time.Second,
	},
	{
		title: "Home fills",
		text: `An ordinary Deployment, "web", six pods of one core each, in a namespace labelled
broker.fluidos.eu/overflow=enabled. They fit at home, so no capacity is requested.`,
		do:       createDeployment,
		ask:      "kubectl spillway status",
		check:    homeFills,
		deadline: 90 * time.Second,
	},
	{
		title: "Pods overflow",
		text: `web is scaled to fourteen: six more than fit in rome. No other action is taken.
The scheduler requests capacity for the pods that do not fit, the broker picks a
provider, a virtual node with exactly that capacity appears, and the pods run there.`,
		do:       func(ctx context.Context, p *environment.Playground) error { return scaleWeb(ctx, p, many) },
		ask:      "kubectl spillway explain -n shop deployment/web",
		check:    podsOverflow,
		deadline: 90 * time.Second,
	},
	{
		title:    "A GPU job goes where the GPUs are",
		text:     `A Job, "train", two pods that request a GPU each. rome has none, paris has none.`,
		do:       startTraining,
		ask:      "kubectl spillway explain -n shop job/train",
		check:    trainingIsDone,
		deadline: 90 * time.Second,
	},
	{
		title: "A provider fails",
		text: `Every process of paris gets SIGKILL, as in a power cut. The pods there are lost;
their controllers replace them, at home or in berlin.`,
		do:       killFirst,
		ask:      "kubectl spillway top --once",
		check:    podsMoved,
		deadline: 150 * time.Second,
	},
	{
		title: "Scale down, clean up",
		text: `web is scaled to four, and the finished Job is deleted. All that was
created for the overflow is removed: virtual nodes, Reservations, peerings, and the
guest namespace in berlin.`,
		do:       scaleDown,
		ask:      "kubectl spillway clusters",
		check:    allRemoved,
		deadline: 150 * time.Second,
	},
}

func clustersJoined(s snapshot) (string, error) {
	var nodes, cores, gpus int64
	for _, m := range cast.Members {
		seen := s.members[m.Name]
		if !seen.reachable || seen.nodes != m.Nodes[0].Count {
			return "", fmt.Errorf("%s has %d Ready nodes of %d", m.Name, seen.nodes, m.Nodes[0].Count)
		}
		if !slices.Contains(s.active, m.Name) {
			return "", fmt.Errorf("the advertisement of %s is not active yet", m.Name)
		}
		nodes, cores, gpus = nodes+int64(seen.nodes), cores+seen.cores, gpus+seen.gpus
	}
	if len(s.objects) > 0 {
		return "", fmt.Errorf("objects from before exist: %s", describeObjects(s.objects))
	}
	return fmt.Sprintf("%d clusters, %d nodes, %d cores, %d GPUs", len(cast.Members), nodes, cores, gpus), nil
}

func homeFills(s snapshot) (string, error) {
	at, away := s.running(web)
	switch {
	case len(away) > 0 || len(s.objects) > 0:
		return "", fmt.Errorf("all pods fit at home, but found %s and %s", describe(0, away), describeObjects(s.objects))
	case at != atFirst:
		return "", fmt.Errorf("%d of %d pods run", at, atFirst)
	}
	return fmt.Sprintf("%d pods run at home, no capacity requested", at), nil
}

func podsOverflow(s snapshot) (string, error) {
	at, away := s.running(web)
	sum := total(away)
	switch {
	case at+sum != many:
		return "", fmt.Errorf("%d of %d pods run (%s)%s", at+sum, many, describe(at, away), s.waiting(web))
	case at != fitHome:
		return "", fmt.Errorf("%d pods run at home, where %d fit", at, fitHome)
	}
	if err := s.guestsRunning(away); err != nil {
		return "", err
	}
	return describe(at, away), nil
}

func trainingIsDone(s snapshot) (string, error) {
	finished := 0
	for _, p := range s.pods {
		if p.app != train || p.phase != corev1.PodSucceeded {
			continue
		}
		if p.away() != second {
			return "", fmt.Errorf("%s finished on %s, which has no GPU", p.name, p.node)
		}
		finished++
	}
	if finished < trains {
		return "", fmt.Errorf("%d of %d pods of the Job have finished in %s%s", finished, trains, second, s.waiting(train))
	}
	return fmt.Sprintf("%d pods found a GPU each in %s, and finished", finished, second), nil
}

func podsMoved(s snapshot) (string, error) {
	if s.members[first].reachable {
		return "", fmt.Errorf("%s is still reachable", first)
	}
	at, away := s.running(web)
	switch {
	case away[first] > 0:
		return "", fmt.Errorf("%d pods still count as running in %s", away[first], first)
	case at+total(away) != many:
		return "", fmt.Errorf("%d of %d pods run (%s)%s", at+total(away), many, describe(at, away), s.waiting(web))
	}
	if err := s.guestsRunning(away); err != nil {
		return "", err
	}
	return describe(at, away), nil
}

func allRemoved(s snapshot) (string, error) {
	at, away := s.running(web)
	switch {
	case at != few || len(away) > 0 || len(s.pods) != few:
		return "", fmt.Errorf("want %d pods, all at home: %d run (%s), %d exist", few, at+total(away), describe(at, away), len(s.pods))
	case !s.members[second].reachable:
		return "", fmt.Errorf("%s is unreachable", second)
	case len(s.objects) > 0:
		return "", fmt.Errorf("not removed yet: %s", describeObjects(s.objects))
	}
	what := fmt.Sprintf("%d pods at home; no virtual node, Reservation or guest namespace is left", at)
	if len(s.unconfirmed) > 0 {
		what += fmt.Sprintf(" (%s is unreachable: its holds stay charged until it confirms their release)", strings.Join(s.unconfirmed, ", "))
	}
	return what, nil
}

// guestsRunning checks at the providers that the pods which run there according to
// home really do.
func (s snapshot) guestsRunning(away map[string]int) error {
	for provider, pods := range away {
		m := s.members[provider]
		node, ok := s.virtual[provider]
		switch {
		case !ok || !node.ready:
			return fmt.Errorf("%d pods run in %s, but its virtual node is not Ready", pods, provider)
		case m.guestsRun != pods:
			return fmt.Errorf("home shows %d running pods in %s, the provider shows %d", pods, provider, m.guestsRun)
		}
	}
	return nil
}

// waiting describes what an app's pending pods wait for.
func (s snapshot) waiting(app string) string {
	n := 0
	var reasons []string
	for _, p := range s.pods {
		if p.app != app || p.runs || p.terminating || p.phase != corev1.PodPending {
			continue
		}
		n++
		reason := fmt.Sprintf("bound to %q: %s", p.node, p.why)
		if p.node == "" {
			reason = p.why
		}
		if !slices.Contains(reasons, reason) {
			reasons = append(reasons, reason)
		}
	}
	if n == 0 {
		return ""
	}
	text := fmt.Sprintf("; %d are pending (%s)", n, strings.Join(reasons, "; "))
	switch {
	case len(s.notReady) > 0:
		text += "; " + strings.Join(s.notReady, "; ")
	case len(s.objects) == 0:
		text += ", and no capacity was requested"
	}
	return text
}

func total(away map[string]int) (n int) {
	for _, pods := range away {
		n += pods
	}
	return n
}

// describe is "8 at home, 6 in paris".
func describe(at int, away map[string]int) string {
	parts := []string{fmt.Sprintf("%d at home", at)}
	for _, provider := range slices.Sorted(maps.Keys(away)) {
		parts = append(parts, fmt.Sprintf("%d in %s", away[provider], provider))
	}
	return strings.Join(parts, ", ")
}

func createDeployment(ctx context.Context, p *environment.Playground) error {
	api := p.Cluster(home).Client
	labels := map[string]string{"app": web}
	return errors.Join(
		api.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: shop, Labels: map[string]string{broker.LabelOverflow: broker.OverflowEnabled}}}),
		api.Create(ctx, &appsv1.Deployment{
			ObjectMeta: metav1.ObjectMeta{Namespace: shop, Name: web},
			Spec: appsv1.DeploymentSpec{
				Replicas: ptr.To(int32(atFirst)), Selector: &metav1.LabelSelector{MatchLabels: labels},
				Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: container(capacity("1", 0), "serve")},
			},
		}),
	)
}

func scaleWeb(ctx context.Context, p *environment.Playground, replicas int) error {
	return p.Cluster(home).Client.Patch(ctx, &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: shop, Name: web}},
		client.RawPatch("application/merge-patch+json", fmt.Appendf(nil, `{"spec":{"replicas":%d}}`, replicas)))
}

func startTraining(ctx context.Context, p *environment.Playground) error {
	spec := container(capacity("1", 1), "work", "5s")
	spec.RestartPolicy = corev1.RestartPolicyNever
	return p.Cluster(home).Client.Create(ctx, &batchv1.Job{
		ObjectMeta: metav1.ObjectMeta{Namespace: shop, Name: train},
		Spec: batchv1.JobSpec{
			Parallelism: ptr.To(int32(trains)), Completions: ptr.To(int32(trains)),
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"app": train}}, Spec: spec},
		},
	})
}

func killFirst(_ context.Context, p *environment.Playground) error {
	p.Kill(first)
	return nil
}

func scaleDown(ctx context.Context, p *environment.Playground) error {
	job := &batchv1.Job{ObjectMeta: metav1.ObjectMeta{Namespace: shop, Name: train}}
	return errors.Join(
		scaleWeb(ctx, p, few),
		client.IgnoreNotFound(p.Cluster(home).Client.Delete(ctx, job, client.PropagationPolicy(metav1.DeletePropagationBackground))),
	)
}

// capacity is the capacity of a node or the requests of a pod, with 1 GiB for each core.
func capacity(cores string, gpus int64) corev1.ResourceList {
	cpu := resource.MustParse(cores)
	list := corev1.ResourceList{
		corev1.ResourceCPU:    cpu,
		corev1.ResourceMemory: *resource.NewQuantity(cpu.Value()<<30, resource.BinarySI),
	}
	if gpus > 0 {
		list[gpu] = *resource.NewQuantity(gpus, resource.DecimalSI)
	}
	return list
}

// container is an ordinary pod.
func container(requests corev1.ResourceList, args ...string) corev1.PodSpec {
	limits := corev1.ResourceList{}
	if gpus, ok := requests[gpu]; ok { // extended resources require equal limits
		limits[gpu] = gpus
	}
	return corev1.PodSpec{
		TerminationGracePeriodSeconds: ptr.To(int64(1)),
		Containers: []corev1.Container{{
			Name: "main", Image: "registry.example.org/app:1", Args: args,
			Resources: corev1.ResourceRequirements{Requests: requests, Limits: limits},
		}},
	}
}
