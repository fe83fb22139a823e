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

// gpu is the GPU resource of the demo.
const gpu corev1.ResourceName = "nvidia.com/gpu"

// snapshot is the state of all API servers at one moment.
type snapshot struct {
	members map[string]member
	// pods of the demo's namespace at home.
	pods []pod
	// virtual nodes at home, by provider.
	virtual map[string]virtualNode
	// objects exist because pods overflow: Reservations, instructions, virtual node
	// configurations, guest namespaces.
	objects []object
	// unconfirmed lists providers that are unreachable and have not confirmed the
	// release of a hold: the broker keeps charging it.
	unconfirmed []string
	// active are the clusters whose advertisements the broker considers active.
	active []string
	// notReady holds the Ready conditions of Reservations that are not Ready.
	notReady []string
	// ended are the broker's released Reservations, with the providers that have not
	// confirmed the release.
	ended map[string][]string
	// events of the demo's pods and Reservations.
	events []event
}

// member is the state of one member cluster.
type member struct {
	reachable bool
	// nodes that are Ready, virtual ones not active, and what they have.
	nodes       int
	cores, gpus int64
	// own and guests are the cores requested by pods bound to those nodes.
	own, guests, usedGPUs int64
	// guestsRun is how many guests run there.
	guestsRun int
	// guestNamespaces that exist.
	guestNamespaces []string
}

// pod is one of the demo's pods.
type pod struct {
	uid       types.UID
	name, app string
	phase     corev1.PodPhase
	node      string
	runs      bool
	// terminating is true once the pod has a deletion timestamp.
	terminating bool
	// why the pod does not run, from its status.
	why string
}

// away is the provider that runs the pod, or "" for home.
func (p pod) away() string {
	if provider, ok := strings.CutPrefix(p.node, broker.VirtualNodePrefix); ok {
		return provider
	}
	return ""
}

// object is an object that Spillway created: its kind, name and cluster.
type object struct{ what, name, in string }

func (o object) String() string { return strings.TrimSpace(o.what+" "+o.name) + " in " + o.in }

// virtualNodeKind is reported separately.
const virtualNodeKind = "the virtual node"

func describeObjects(objects []object) string {
	var all []string
	for _, t := range objects {
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
func (s snapshot) running(app string) (home int, away map[string]int) {
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

// observe reads a snapshot from every API server. A provider may be unreachable,
// home and the hub may not.
func observe(ctx context.Context, p *environment.Playground, home, namespace string) (snapshot, error) {
	s := snapshot{members: map[string]member{}, virtual: map[string]virtualNode{}, ended: map[string][]string{}}
	var mu sync.Mutex
	var wait sync.WaitGroup
	var errs []error
	for _, c := range p.Clusters() {
		wait.Go(func() {
			ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
			defer cancel()
			var seen snapshot
			var err error
			if c.Name == environment.Hub {
				err = observeHub(ctx, c.Client, &seen)
			} else {
				err = observeMember(ctx, c.Client, c.Name, &seen)
				if c.Name == home && err == nil {
					err = observeHome(ctx, c.Client, namespace, &seen)
				}
			}
			mu.Lock()
			defer mu.Unlock()
			maps.Copy(s.members, seen.members)
			maps.Copy(s.ended, seen.ended)
			maps.Copy(s.virtual, seen.virtual)
			s.pods, s.events, s.notReady = append(s.pods, seen.pods...), append(s.events, seen.events...), append(s.notReady, seen.notReady...)
			s.objects, s.active = append(s.objects, seen.objects...), append(s.active, seen.active...)
			if err != nil && (c.Name == environment.Hub || c.Name == home) {
				errs = append(errs, fmt.Errorf("observing %s: %w", c.Name, err))
			} else if err != nil {
				s.members[c.Name] = member{}
			}
		})
	}
	wait.Wait()
	s.separateUnconfirmed()
	slices.SortFunc(s.objects, func(a, b object) int { return strings.Compare(a.String(), b.String()) })
	slices.Sort(s.active)
	slices.SortFunc(s.pods, func(a, b pod) int { return strings.Compare(a.name, b.name) })
	return s, errors.Join(errs...)
}

// separateUnconfirmed removes from objects the broker's Reservations that exist only
// because an unreachable provider has not confirmed their release.
func (s *snapshot) separateUnconfirmed() {
	s.objects = slices.DeleteFunc(s.objects, func(o object) bool {
		holders, ended := s.ended[o.name]
		if o.in != environment.Hub || !ended || len(holders) == 0 {
			return false
		}
		for _, provider := range holders {
			if s.members[provider].reachable {
				return false
			}
		}
		s.unconfirmed = append(s.unconfirmed, holders...)
		return true
	})
}

func observeHub(ctx context.Context, api client.Client, s *snapshot) error {
	var offers broker.ClusterAdvertisementList
	var reservations broker.ReservationList
	if err := errors.Join(api.List(ctx, &offers), api.List(ctx, &reservations)); err != nil {
		return err
	}
	s.ended = map[string][]string{}
	for _, r := range reservations.Items {
		s.objects = append(s.objects, object{"the broker's Reservation", r.Name, environment.Hub})
		if r.DeletionTimestamp != nil || r.Status.Phase == broker.ReservationReleased {
			s.ended[r.Name] = nil
		}
	}
	for _, offer := range offers.Items {
		if offer.Status.Active {
			s.active = append(s.active, offer.Spec.ClusterID)
		}
		for _, hold := range offer.Status.Holds {
			if _, ended := s.ended[hold.ReservationName]; ended {
				s.ended[hold.ReservationName] = append(s.ended[hold.ReservationName], offer.Spec.ClusterID)
			}
		}
	}
	return nil
}

// observeMember reads a member's nodes, pods and guests.
func observeMember(ctx context.Context, api client.Client, name string, s *snapshot) error {
	var nodes corev1.NodeList
	var pods corev1.PodList
	var guests corev1.NamespaceList
	var orders broker.ProviderInstructionList
	if err := errors.Join(api.List(ctx, &nodes), api.List(ctx, &pods), api.List(ctx, &guests, client.HasLabels{broker.LabelGuestsOf}), api.List(ctx, &orders)); err != nil {
		return err
	}
	m := member{reachable: true}
	real := map[string]bool{}
	s.virtual = map[string]virtualNode{}
	for _, n := range nodes.Items {
		cores, gpus := n.Status.Allocatable.Cpu().Value(), amount(n.Status.Allocatable, gpu)
		if provider := n.Labels[broker.LabelProvider]; provider != "" {
			s.virtual[provider] = virtualNode{cores: cores, gpus: gpus, ready: isReady(n), parked: n.Status.Allocatable.Pods().IsZero()}
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
		s.objects = append(s.objects, object{"the namespace for guests", n.Name, name})
	}
	for _, o := range orders.Items {
		s.objects = append(s.objects, object{"the ProviderInstruction", o.Name, name})
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

// observeHome reads the demo's pods and the objects created for them.
func observeHome(ctx context.Context, api client.Client, namespace string, s *snapshot) error {
	var pods corev1.PodList
	var reservations broker.ReservationList
	var instructions broker.ReservationInstructionList
	var configs corev1.SecretList
	var events corev1.EventList
	if err := errors.Join(
		api.List(ctx, &pods, client.InNamespace(namespace)),
		api.List(ctx, &reservations), api.List(ctx, &instructions),
		api.List(ctx, &configs, client.MatchingLabels{nodeconfig.LabelComponent: nodeconfig.Component}),
		api.List(ctx, &events, client.InNamespace(namespace)),
	); err != nil {
		return err
	}
	for _, p := range pods.Items {
		s.pods = append(s.pods, pod{
			uid: p.UID, name: p.Name, app: p.Labels["app"], phase: p.Status.Phase, node: p.Spec.NodeName,
			runs: isRunning(p), terminating: p.DeletionTimestamp != nil, why: why(p),
		})
	}
	for _, r := range reservations.Items {
		s.objects = append(s.objects, object{"the Reservation", r.Namespace + "/" + r.Name, home})
		if ready := meta.FindStatusCondition(r.Status.Conditions, broker.ConditionReady); ready == nil {
			s.notReady = append(s.notReady, fmt.Sprintf("Reservation %s: no answer from the broker yet", r.Name))
		} else if ready.Status != metav1.ConditionTrue {
			s.notReady = append(s.notReady, fmt.Sprintf("Reservation %s: %s", r.Name, ready.Message))
		}
	}
	for _, r := range instructions.Items {
		s.objects = append(s.objects, object{"the ReservationInstruction", r.Name, home})
	}
	for _, l := range configs.Items {
		s.objects = append(s.objects, object{"the virtual node configuration of " + l.Labels[broker.LabelProvider], "", home})
	}
	for provider := range s.virtual {
		s.objects = append(s.objects, object{virtualNodeKind, broker.VirtualNodeName(provider), home})
	}
	for _, e := range events.Items {
		if fromSpillway(e) {
			s.events = append(s.events, event{uid: e.UID, at: e.CreationTimestamp.Time, text: e.Message})
		}
	}
	slices.SortFunc(s.events, func(a, b event) int { return a.at.Compare(b.at) })
	return nil
}

// fromSpillway reports whether Spillway recorded an event.
func fromSpillway(e corev1.Event) bool {
	return strings.HasPrefix(e.Reason, "Overflow") || strings.HasPrefix(e.ReportingController, "spillway-agent") || strings.HasPrefix(e.Source.Component, "spillway-agent")
}

func isReady(n corev1.Node) bool {
	return slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
}

// isRunning reports whether a pod is Ready and not terminating.
func isRunning(p corev1.Pod) bool {
	return p.DeletionTimestamp == nil && p.Status.Phase == corev1.PodRunning && slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}

// why returns the reason in a pod's status for not running: a container's, or else
// the scheduler's.
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
