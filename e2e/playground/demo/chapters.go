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

// The story's clusters: pods overflow from home to first, which is cheaper, and
// from there to second, which has GPUs.
const (
	home   = "rome"
	first  = "paris"
	second = "berlin"
)

// The story's namespace and workloads in it.
const (
	shop  = "shop"
	web   = "web"
	train = "train"
)

// How many pods of web there are: as many as have room at home, more, few.
const (
	atFirst = 6
	many    = 14
	few     = 4
	fitHome = 8
	trains  = 2
)

// cast is who takes part.
var cast = environment.Options{Members: []environment.Member{
	{
		Name: home, Overflows: true,
		Nodes:  []environment.NodeGroup{{Prefix: "rome", Count: 2, Resources: room("4", 0)}},
		Values: []string{"lend.enabled=false"},
	},
	{
		Name:   first,
		Nodes:  []environment.NodeGroup{{Prefix: "paris", Count: 3, Resources: room("4", 0)}},
		Values: []string{"cost.cpu=0.03"},
	},
	{
		Name:   second,
		Nodes:  []environment.NodeGroup{{Prefix: "berlin", Count: 2, Resources: room("4", 2), Labels: map[string]string{"nvidia.com/gpu.product": "A100"}}},
		Values: []string{"cost.cpu=0.05"},
	},
}}

// chapter is something that is done, and what must then be seen.
type chapter struct {
	title, text string
	// do starts it; nothing where nil.
	do func(context.Context, *environment.Playground) error
	// check says what came true, or what is still missing.
	check func(scene) (string, error)
	// deadline for all of it.
	deadline time.Duration
}

// breakBefore is the chapter, counted from 0, that sabotage comes before.
const breakBefore = 2

var chapters = []chapter{
	{
		title: "Who is who",
		text: `rome is home: two nodes of four cores. paris has more room. berlin has GPUs, and
asks a higher price. Each has an agent that tells the broker, in the hub, what it
can lend. No cluster holds a key to another.`,
		check:    everybodyIsThere,
		deadline: 90 * time.Second,
	},
	{
		title: "Home fills",
		text: `An ordinary Deployment, "web", six pods of one core each, in a namespace labelled
broker.fluidos.eu/overflow=enabled. They fit at home, so nothing special happens.`,
		do:       openShop,
		check:    homeFills,
		deadline: 90 * time.Second,
	},
	{
		title: "Pods overflow",
		text: `web is scaled to fourteen: six more than rome has room for. Nothing else is done.
The scheduler notes what does not fit, the broker finds a provider that has room
for it, a virtual node with exactly that capacity appears, and the pods go there.`,
		do:       func(ctx context.Context, p *environment.Playground) error { return scaleWeb(ctx, p, many) },
		check:    podsOverflow,
		deadline: 90 * time.Second,
	},
	{
		title:    "A GPU job goes where the GPUs are",
		text:     `A Job, "train", two pods that ask for a GPU each. rome has none, paris has none.`,
		do:       startTraining,
		check:    trainingIsDone,
		deadline: 90 * time.Second,
	},
	{
		title: "A provider dies",
		text: `Every process of paris gets SIGKILL, as in a power cut. The pods there are lost;
others take their place where there is room.`,
		do:       killFirst,
		check:    podsMoved,
		deadline: 150 * time.Second,
	},
	{
		title: "Need falls, and everything goes",
		text: `web is scaled to four, and the finished Job is deleted. Whatever was set up for
overflowing must go by itself: virtual nodes, reservations, links, and the
namespace for guests in berlin.`,
		do:       needFalls,
		check:    everythingIsGone,
		deadline: 150 * time.Second,
	},
}

func everybodyIsThere(s scene) (string, error) {
	var nodes, cores, gpus int64
	for _, m := range cast.Members {
		seen := s.members[m.Name]
		if !seen.answers || seen.nodes != m.Nodes[0].Count {
			return "", fmt.Errorf("%s shows %d Ready nodes of %d", m.Name, seen.nodes, m.Nodes[0].Count)
		}
		if !slices.Contains(s.counted, m.Name) {
			return "", fmt.Errorf("the broker does not count on %s yet", m.Name)
		}
		nodes, cores, gpus = nodes+int64(seen.nodes), cores+seen.cores, gpus+seen.gpus
	}
	if len(s.setUp) > 0 {
		return "", fmt.Errorf("there is something from before: %s", describeThings(s.setUp))
	}
	return fmt.Sprintf("%d clusters, %d nodes, %d cores, %d GPUs", len(cast.Members), nodes, cores, gpus), nil
}

func homeFills(s scene) (string, error) {
	at, away := s.running(web)
	switch {
	case len(away) > 0 || len(s.setUp) > 0:
		return "", fmt.Errorf("pods fit at home, yet there is %s, and %s", describe(0, away), describeThings(s.setUp))
	case at != atFirst:
		return "", fmt.Errorf("%d of %d pods run", at, atFirst)
	}
	return fmt.Sprintf("%d pods run at home, nothing was asked for", at), nil
}

func podsOverflow(s scene) (string, error) {
	at, away := s.running(web)
	sum := total(away)
	switch {
	case at+sum != many:
		return "", fmt.Errorf("%d of %d pods run (%s)%s", at+sum, many, describe(at, away), s.waiting(web))
	case at != fitHome:
		return "", fmt.Errorf("%d pods run at home, where %d fit", at, fitHome)
	}
	if err := s.guestsAgree(away); err != nil {
		return "", err
	}
	return describe(at, away), nil
}

func trainingIsDone(s scene) (string, error) {
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

func podsMoved(s scene) (string, error) {
	if s.members[first].answers {
		return "", fmt.Errorf("%s still answers", first)
	}
	at, away := s.running(web)
	switch {
	case away[first] > 0:
		return "", fmt.Errorf("%d pods still count as running in %s", away[first], first)
	case at+total(away) != many:
		return "", fmt.Errorf("%d of %d pods run (%s)%s", at+total(away), many, describe(at, away), s.waiting(web))
	}
	if err := s.guestsAgree(away); err != nil {
		return "", err
	}
	return describe(at, away), nil
}

func everythingIsGone(s scene) (string, error) {
	at, away := s.running(web)
	switch {
	case at != few || len(away) > 0 || len(s.pods) != few:
		return "", fmt.Errorf("want %d pods, all at home: %d run (%s), %d exist", few, at+total(away), describe(at, away), len(s.pods))
	case !s.members[second].answers:
		return "", fmt.Errorf("%s does not answer", second)
	case len(s.setUp) > 0:
		return "", fmt.Errorf("still there: %s", describeThings(s.setUp))
	}
	what := fmt.Sprintf("%d pods at home; no virtual node, no reservation, no guest namespace is left", at)
	if len(s.onTheBooks) > 0 {
		what += fmt.Sprintf(" (for %s, which is dead, the broker promises nothing until it says what still runs there)", strings.Join(s.onTheBooks, ", "))
	}
	return what, nil
}

// guestsAgree checks, at the providers themselves, that the pods which run there
// by what home says really do.
func (s scene) guestsAgree(away map[string]int) error {
	for provider, pods := range away {
		m := s.members[provider]
		node, ok := s.virtual[provider]
		switch {
		case !ok || !node.ready:
			return fmt.Errorf("%d pods run in %s, but its virtual node is not Ready", pods, provider)
		case m.guestsRun != pods:
			return fmt.Errorf("home says that %d pods run in %s, which itself says %d", pods, provider, m.guestsRun)
		}
	}
	return nil
}

// waiting says what an app's pods that do not run wait for.
func (s scene) waiting(app string) string {
	n := 0
	var reasons []string
	for _, p := range s.pods {
		if p.app != app || p.runs || p.leaving || p.phase != corev1.PodPending {
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
	case len(s.obstacles) > 0:
		text += "; " + strings.Join(s.obstacles, "; ")
	case len(s.setUp) == 0:
		text += ", and nothing was asked for"
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

func openShop(ctx context.Context, p *environment.Playground) error {
	api := p.Cluster(home).Client
	labels := map[string]string{"app": web}
	return errors.Join(
		api.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: shop, Labels: map[string]string{broker.LabelOverflow: broker.OverflowEnabled}}}),
		api.Create(ctx, &appsv1.Deployment{
			ObjectMeta: metav1.ObjectMeta{Namespace: shop, Name: web},
			Spec: appsv1.DeploymentSpec{
				Replicas: ptr.To(int32(atFirst)), Selector: &metav1.LabelSelector{MatchLabels: labels},
				Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: container(room("1", 0), "serve")},
			},
		}),
	)
}

func scaleWeb(ctx context.Context, p *environment.Playground, replicas int) error {
	return p.Cluster(home).Client.Patch(ctx, &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: shop, Name: web}},
		client.RawPatch("application/merge-patch+json", fmt.Appendf(nil, `{"spec":{"replicas":%d}}`, replicas)))
}

func startTraining(ctx context.Context, p *environment.Playground) error {
	spec := container(room("1", 1), "work", "5s")
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

func needFalls(ctx context.Context, p *environment.Playground) error {
	job := &batchv1.Job{ObjectMeta: metav1.ObjectMeta{Namespace: shop, Name: train}}
	return errors.Join(
		scaleWeb(ctx, p, few),
		client.IgnoreNotFound(p.Cluster(home).Client.Delete(ctx, job, client.PropagationPolicy(metav1.DeletePropagationBackground))),
	)
}

// room is what a node has, or a pod asks for: as much memory for each core as is
// usual.
func room(cores string, gpus int64) corev1.ResourceList {
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

// container is a pod that nothing in which knows of Spillway.
func container(requests corev1.ResourceList, args ...string) corev1.PodSpec {
	limits := corev1.ResourceList{}
	if gpus, ok := requests[gpu]; ok { // such resources want equal limits
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
