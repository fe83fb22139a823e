package demo

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	resourcehelpers "k8s.io/component-helpers/resource"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/playground/environment"
	"github.com/spillway-dev/spillway/virtual-node/nodeconfig"
)

// gpu is the resource by which GPUs are asked for.
const gpu corev1.ResourceName = "nvidia.com/gpu"

// scene is what the API servers showed at one moment.
type scene struct {
	members map[string]member
	// pods of the story's namespace at home.
	pods []pod
	// virtual nodes at home, by provider.
	virtual map[string]virtualNode
	// setUp is all that stands because pods overflow: Reservations, instructions,
	// links, guest namespaces.
	setUp []thing
	// onTheBooks are Reservations that are over, and of which the broker still
	// counts something as in use with a provider that does not answer: silence
	// frees nothing.
	onTheBooks []string
	// counted are the clusters that the broker counts on.
	counted []string
	// obstacles are what the story's Reservations say of themselves while they
	// are not Ready.
	obstacles []string
	// over are the broker's Reservations that are over, with the providers that
	// have not confirmed it.
	over map[string][]string
	// news are the events about the story's pods and Reservations.
	news []event
}

// member is what one member's API server says of it.
type member struct {
	answers bool
	// nodes that are Ready, virtual ones not counted, and what they have.
	nodes       int
	cores, gpus int64
	// What the cluster's own pods and its guests request, bound to those nodes.
	own, guests, usedGPUs int64
	// guestsRun is how many guests run there.
	guestsRun int
	// guestNamespaces that exist.
	guestNamespaces []string
}

// pod is one of the story's pods.
type pod struct {
	uid       types.UID
	name, app string
	phase     corev1.PodPhase
	node      string
	runs      bool
	// leaving is set once it is to end.
	leaving bool
	// why it does not run, where its status says so.
	why string
}

// away is the provider it is in, or "" at home.
func (p pod) away() string {
	if provider, ok := strings.CutPrefix(p.node, broker.VirtualNodePrefix); ok {
		return provider
	}
	return ""
}

// thing is an object that Spillway made: what it is, its name, and the cluster it
// is in.
type thing struct{ what, name, in string }

func (t thing) String() string { return strings.TrimSpace(t.what+" "+t.name) + " in " + t.in }

// virtualThing is a thing that is told of apart.
const virtualThing = "the virtual node"

func describeThings(things []thing) string {
	var all []string
	for _, t := range things {
		all = append(all, t.String())
	}
	return strings.Join(all, ", ")
}

type virtualNode struct {
	cores, gpus   int64
	ready, parked bool
}

type event struct {
	uid  types.UID
	at   time.Time
	text string
}

// running counts an app's pods that run at home and with each provider.
func (s scene) running(app string) (home int, away map[string]int) {
	away = map[string]int{}
	for _, p := range s.pods {
		switch {
		case p.app != app || !p.runs:
		case p.away() != "":
			away[p.away()]++
		default:
			home++
		}
	}
	return home, away
}

// look reads the scene from every API server. A provider that does not answer
// is part of the scene; the home cluster and the hub must.
func look(ctx context.Context, p *environment.Playground, home, namespace string) (scene, error) {
	s := scene{members: map[string]member{}, virtual: map[string]virtualNode{}, over: map[string][]string{}}
	var mu sync.Mutex
	var looking sync.WaitGroup
	var problems []error
	for _, c := range p.Clusters() {
		looking.Go(func() {
			ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
			defer cancel()
			var seen scene
			var err error
			if c.Name == environment.Hub {
				err = lookAtHub(ctx, c.Client, &seen)
			} else {
				err = lookAtMember(ctx, c.Client, c.Name, &seen)
				if c.Name == home && err == nil {
					err = lookAtHome(ctx, c.Client, namespace, &seen)
				}
			}
			mu.Lock()
			defer mu.Unlock()
			maps.Copy(s.members, seen.members)
			maps.Copy(s.over, seen.over)
			maps.Copy(s.virtual, seen.virtual)
			s.pods, s.news, s.obstacles = append(s.pods, seen.pods...), append(s.news, seen.news...), append(s.obstacles, seen.obstacles...)
			s.setUp, s.counted = append(s.setUp, seen.setUp...), append(s.counted, seen.counted...)
			if err != nil && (c.Name == environment.Hub || c.Name == home) {
				problems = append(problems, fmt.Errorf("looking at %s: %w", c.Name, err))
			} else if err != nil {
				s.members[c.Name] = member{}
			}
		})
	}
	looking.Wait()
	s.keepBooks()
	slices.SortFunc(s.setUp, func(a, b thing) int { return strings.Compare(a.String(), b.String()) })
	slices.Sort(s.counted)
	slices.SortFunc(s.pods, func(a, b pod) int { return strings.Compare(a.name, b.name) })
	return s, errors.Join(problems...)
}

// keepBooks takes those of the broker's Reservations out of setUp that are only
// kept for a provider that does not answer.
func (s *scene) keepBooks() {
	s.setUp = slices.DeleteFunc(s.setUp, func(t thing) bool {
		holders, over := s.over[t.name]
		if t.in != environment.Hub || !over || len(holders) == 0 {
			return false
		}
		for _, provider := range holders {
			if s.members[provider].answers {
				return false
			}
		}
		s.onTheBooks = append(s.onTheBooks, holders...)
		return true
	})
}

func lookAtHub(ctx context.Context, api client.Client, s *scene) error {
	var offers broker.ClusterAdvertisementList
	var reservations broker.ReservationList
	if err := errors.Join(api.List(ctx, &offers), api.List(ctx, &reservations)); err != nil {
		return err
	}
	s.over = map[string][]string{}
	for _, r := range reservations.Items {
		s.setUp = append(s.setUp, thing{"the broker's Reservation", r.Name, environment.Hub})
		if r.DeletionTimestamp != nil || r.Status.Phase == broker.ReservationReleased {
			s.over[r.Name] = nil
		}
	}
	for _, offer := range offers.Items {
		if offer.Status.Active {
			s.counted = append(s.counted, offer.Spec.ClusterID)
		}
		for _, hold := range offer.Status.Holds {
			if _, over := s.over[hold.ReservationName]; over {
				s.over[hold.ReservationName] = append(s.over[hold.ReservationName], offer.Spec.ClusterID)
			}
		}
	}
	return nil
}

// lookAtMember reads what a member has, and what it does for others.
func lookAtMember(ctx context.Context, api client.Client, name string, s *scene) error {
	var nodes corev1.NodeList
	var pods corev1.PodList
	var guests corev1.NamespaceList
	var orders broker.ProviderInstructionList
	if err := errors.Join(api.List(ctx, &nodes), api.List(ctx, &pods), api.List(ctx, &guests, client.HasLabels{broker.LabelGuestsOf}), api.List(ctx, &orders)); err != nil {
		return err
	}
	m := member{answers: true}
	real := map[string]bool{}
	s.virtual = map[string]virtualNode{}
	for _, n := range nodes.Items {
		cores, gpus := n.Status.Allocatable.Cpu().Value(), amount(n.Status.Allocatable, gpu)
		if provider := n.Labels[broker.LabelProvider]; provider != "" {
			s.virtual[provider] = virtualNode{cores: cores, gpus: gpus, ready: isReady(n), parked: n.Spec.Unschedulable}
			continue
		}
		if isReady(n) {
			real[n.Name] = true
			m.nodes, m.cores, m.gpus = m.nodes+1, m.cores+cores, m.gpus+gpus
		}
	}
	guestOf := map[string]bool{}
	for _, n := range guests.Items {
		guestOf[n.Name] = true
		m.guestNamespaces = append(m.guestNamespaces, n.Name)
		s.setUp = append(s.setUp, thing{"the namespace for guests", n.Name, name})
	}
	for _, o := range orders.Items {
		s.setUp = append(s.setUp, thing{"the ProviderInstruction", o.Name, name})
	}
	for _, p := range pods.Items {
		if !real[p.Spec.NodeName] || p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed {
			continue
		}
		requests := resourcehelpers.PodRequests(&p, resourcehelpers.PodResourcesOptions{})
		m.usedGPUs += amount(requests, gpu)
		if !guestOf[p.Namespace] {
			m.own += requests.Cpu().Value()
			continue
		}
		m.guests += requests.Cpu().Value()
		if p.Status.Phase == corev1.PodRunning && p.DeletionTimestamp == nil {
			m.guestsRun++
		}
	}
	s.members = map[string]member{name: m}
	return nil
}

// lookAtHome reads the story's own pods, and what stands for them.
func lookAtHome(ctx context.Context, api client.Client, namespace string, s *scene) error {
	var pods corev1.PodList
	var reservations broker.ReservationList
	var instructions broker.ReservationInstructionList
	var links corev1.SecretList
	var events corev1.EventList
	if err := errors.Join(
		api.List(ctx, &pods, client.InNamespace(namespace)),
		api.List(ctx, &reservations), api.List(ctx, &instructions),
		api.List(ctx, &links, client.MatchingLabels{nodeconfig.LabelComponent: nodeconfig.Component}),
		api.List(ctx, &events, client.InNamespace(namespace)),
	); err != nil {
		return err
	}
	for _, p := range pods.Items {
		s.pods = append(s.pods, pod{
			uid: p.UID, name: p.Name, app: p.Labels["app"], phase: p.Status.Phase, node: p.Spec.NodeName,
			runs: isRunning(p), leaving: p.DeletionTimestamp != nil, why: why(p),
		})
	}
	for _, r := range reservations.Items {
		s.setUp = append(s.setUp, thing{"the Reservation", r.Namespace + "/" + r.Name, home})
		if ready := meta.FindStatusCondition(r.Status.Conditions, broker.ConditionReady); ready == nil {
			s.obstacles = append(s.obstacles, fmt.Sprintf("Reservation %s: nobody has answered it", r.Name))
		} else if ready.Status != metav1.ConditionTrue {
			s.obstacles = append(s.obstacles, fmt.Sprintf("Reservation %s: %s", r.Name, ready.Message))
		}
	}
	for _, r := range instructions.Items {
		s.setUp = append(s.setUp, thing{"the ReservationInstruction", r.Name, home})
	}
	for _, l := range links.Items {
		s.setUp = append(s.setUp, thing{"the link to " + l.Labels[broker.LabelProvider], "", home})
	}
	for provider := range s.virtual {
		s.setUp = append(s.setUp, thing{virtualThing, broker.VirtualNodeName(provider), home})
	}
	for _, e := range events.Items {
		if toldByUs(e) {
			s.news = append(s.news, event{uid: e.UID, at: e.CreationTimestamp.Time, text: e.Message})
		}
	}
	slices.SortFunc(s.news, func(a, b event) int { return a.at.Compare(b.at) })
	return nil
}

// toldByUs reports whether Spillway wrote an event, and not about the daily
// round of pods.
func toldByUs(e corev1.Event) bool {
	return strings.HasPrefix(e.Reason, "Overflow") || strings.HasPrefix(e.ReportingController, "spillway-agent") || strings.HasPrefix(e.Source.Component, "spillway-agent")
}

func isReady(n corev1.Node) bool {
	return slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
}

// isRunning reports whether a pod is Ready and stays.
func isRunning(p corev1.Pod) bool {
	return p.DeletionTimestamp == nil && p.Status.Phase == corev1.PodRunning && slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}

// why is what a pod's status says against its running: a container's, or else the
// scheduler's.
func why(p corev1.Pod) string {
	for _, c := range p.Status.ContainerStatuses {
		if c.State.Waiting != nil && c.State.Waiting.Reason != "" {
			return strings.TrimSuffix(c.State.Waiting.Reason+": "+c.State.Waiting.Message, ": ")
		}
	}
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Status != corev1.ConditionTrue {
			return c.Message
		}
	}
	return p.Status.Message
}

func amount(list corev1.ResourceList, name corev1.ResourceName) int64 {
	q := list[name]
	return q.Value()
}
