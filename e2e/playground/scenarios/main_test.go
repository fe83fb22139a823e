// Package scenarios_test shows, on the playground, what Spillway does for its users: the
// broker, the agents with driver direct, the scheduler and virtual-node are real, and kubelets
// are simulated. What needs containers or their networks is shown on the lab (e2e/scenarios).
//
// All tests but that of as_the_original_test.go, which by the file's name is the first, share one
// playground. Each brings its own nodes (begin) and namespaces (optedIn, namespaceIn), and none
// begins before all of the former one is gone. The one in without_broker_test.go, the last by the
// file's name, ends the playground.
package scenarios_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/e2e/playground/demo"
	"github.com/spillway-dev/spillway/e2e/playground/environment"
	"github.com/spillway-dev/spillway/virtual-node/nodeconfig"
)

// answer is the deadline for what takes about a minute on an idle machine at most.
const answer = 4 * time.Minute

// labelScenario marks the namespaces of a test.
const labelScenario = "playground.example.com/scenario"

// shared is the playground of all tests, in directory dir: nil before the first test, and
// once it is stopped.
var (
	shared *environment.Playground
	dir    string
	// unclean is the first test that left something.
	unclean string
)

func TestMain(m *testing.M) {
	var err error
	if dir, err = os.MkdirTemp("", "spillway-scenarios-"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := m.Run()
	if shared != nil {
		running := processes()
		if err := errors.Join(shared.Stop(), nothingRemains(running)); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	_ = os.RemoveAll(dir)
	os.Exit(code)
}

// processes are the process IDs of the playground.
func processes() (all []int) {
	for _, c := range shared.Clusters() {
		for _, process := range c.Processes() {
			all = append(all, process.Pid())
		}
	}
	return all
}

// nothingRemains expects that a playground that was stopped left no process and no file.
func nothingRemains(running []int) error {
	var errs []error
	for _, pid := range running {
		if expect.ProcessExists(pid) {
			errs = append(errs, fmt.Errorf("process %d still exists", pid))
		}
	}
	if len(running) < 20 {
		errs = append(errs, fmt.Errorf("%d processes ran, expected more", len(running)))
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		errs = append(errs, fmt.Errorf("left in the directory: %v %v", left, err))
	}
	return errors.Join(errs...)
}

// playgroundTest is a test on the shared playground: a hub, a consumer, rome, and two
// providers: paris, which is cheaper, and berlin.
type playgroundTest struct {
	t                        *testing.T
	p                        *environment.Playground
	hub, rome, paris, berlin client.WithWatch
	// upgraded are the members whose charts have other values, with how their advertisement
	// shows them, nil if it does not.
	upgraded map[string]func(*broker.ClusterAdvertisement) bool
	door     *door
}

// nodes of the members by their name.
type nodes map[string][]environment.NodeGroup

// group is a number of nodes called <prefix>-1 and so on.
func group(prefix string, count int, pairs ...string) environment.NodeGroup {
	return environment.NodeGroup{Prefix: prefix, Count: count, Resources: expect.Resources(pairs...)}
}

// begin starts a test on the shared playground with nodes of its own. When the test ends, it
// expects that nothing is left.
func begin(t *testing.T, all nodes) *playgroundTest {
	t.Helper()
	if unclean != "" {
		t.Fatalf("%s has left something", unclean)
	}
	if shared == nil {
		var members []environment.Member
		for _, m := range demo.Members() {
			m.Nodes = nil
			// Long enough for a grant to reach rome after paris has been asked, on a slow machine.
			m.Values = append(m.Values[:len(m.Values):len(m.Values)], "peering.idleTime=5s", "peering.finishedPodRetention=2m")
			members = append(members, m)
		}
		p, err := environment.Start(t.Context(), environment.Options{Dir: dir, Log: t.Logf, Members: members})
		expect.NoError(t, err)
		shared = p
	}
	s := &playgroundTest{
		t: t, p: shared, hub: shared.Cluster(environment.Hub).Client, rome: shared.Cluster("rome").Client,
		paris: shared.Cluster("paris").Client, berlin: shared.Cluster("berlin").Client,
		upgraded: map[string]func(*broker.ClusterAdvertisement) bool{},
	}
	t.Cleanup(s.end)
	for name, groups := range all {
		for _, g := range groups {
			expect.NoError(t, s.p.Cluster(name).AddNodes(t.Context(), g.Prefix, g.Count, g.Resources, g.Labels))
		}
	}
	for name, groups := range all {
		want := corev1.ResourceList{}
		for _, g := range groups {
			for range g.Count {
				broker.AddTo(want, g.Resources)
			}
		}
		s.eventually("the nodes of "+name+" are ready", func() error { return s.nodesReady(name) })
		s.advertised(name, "all of its nodes", func(ad *broker.ClusterAdvertisement) bool {
			return ad.Status.Active && cpuOf(ad.Spec.Resources.Capacity).Cmp(*want.Cpu()) == 0
		})
	}
	return s
}

func cpuOf(resources broker.ResourceQuantities) *resource.Quantity {
	list := resources.List()
	return list.Cpu()
}

// nodesReady returns an error for a node that takes no pods yet.
func (s *playgroundTest) nodesReady(cluster string) error {
	var list corev1.NodeList
	if err := s.p.Cluster(cluster).Client.List(context.Background(), &list); err != nil {
		return err
	}
	for _, node := range list.Items {
		if len(node.Spec.Taints) > 0 || len(node.Status.Conditions) == 0 {
			return fmt.Errorf("%s has taints %v", node.Name, node.Spec.Taints)
		}
	}
	return nil
}

// end deletes what a test has made, expects that nothing else is left, and removes its nodes.
func (s *playgroundTest) end() {
	s.t.Helper()
	if s.t.Failed() {
		s.t.Log(s.p.Logs(20))
	}
	if s.p != shared {
		return // stopped
	}
	unclean = s.t.Name()
	ctx := context.Background()
	for _, c := range s.p.Clusters() {
		var namespaces corev1.NamespaceList
		expect.NoError(s.t, c.Client.List(ctx, &namespaces, client.HasLabels{labelScenario}))
		for _, ns := range namespaces.Items {
			expect.NoError(s.t, client.IgnoreNotFound(c.Client.Delete(ctx, &ns)))
			// The namespace controller waits for 5s before it deletes anything.
			for _, o := range []client.Object{&appsv1.Deployment{}, &batchv1.Job{}, &corev1.Pod{}, &broker.Reservation{}} {
				expect.NoError(s.t, c.Client.DeleteAllOf(ctx, o, client.InNamespace(ns.Name), client.PropagationPolicy(metav1.DeletePropagationBackground)))
			}
		}
	}
	// What is last to go: a list of everything at each poll would keep the machine busy.
	for _, label := range []string{labelScenario, broker.LabelGuestsOf} {
		for _, c := range []client.Client{s.rome, s.paris, s.berlin} {
			s.eventually("no namespace with label "+label+" is left", func() error {
				var namespaces corev1.NamespaceList
				if err := c.List(ctx, &namespaces, client.HasLabels{label}); err != nil || len(namespaces.Items) == 0 {
					return err
				}
				return fmt.Errorf("%s still exists: %+v", namespaces.Items[0].Name, namespaces.Items[0].Status.Conditions)
			})
		}
	}
	s.eventually("nothing is left of the test", func() error {
		left, err := s.left()
		if err == nil && len(left) > 0 {
			err = errors.New(strings.Join(left, ", "))
		}
		return err
	})
	for _, m := range demo.Members() {
		var list corev1.NodeList
		expect.NoError(s.t, s.p.Cluster(m.Name).Client.List(ctx, &list))
		for _, node := range list.Items {
			expect.NoError(s.t, s.p.Cluster(m.Name).Client.Delete(ctx, &node))
		}
		changed, upgraded := s.upgraded[m.Name]
		if upgraded {
			expect.NoError(s.t, s.p.Upgrade(ctx, m.Name))
		}
		s.advertised(m.Name, "no node", func(ad *broker.ClusterAdvertisement) bool {
			return ad.Status.Active && cpuOf(ad.Spec.Resources.Capacity).IsZero() && (changed == nil || !changed(ad))
		})
	}
	unclean = ""
}

// namespaceAccess selects the permissions of spillway-virtual-node, but for those of the chart.
var namespaceAccess = fields.ParseSelectorOrDie("metadata.name=spillway-virtual-node,metadata.namespace!=kube-node-lease,metadata.namespace!=spillway-virtual-nodes")

// left lists what is in a cluster because pods run there or overflow.
func (s *playgroundTest) left() (left []string, _ error) {
	ctx := context.Background()
	for _, c := range s.p.Clusters() {
		for what, of := range map[string]struct {
			list    client.ObjectList
			options []client.ListOption
		}{
			"pod":                    {list: &corev1.PodList{}},
			"Reservation":            {list: &broker.ReservationList{}},
			"ReservationInstruction": {list: &broker.ReservationInstructionList{}},
			"ProviderInstruction":    {list: &broker.ProviderInstructionList{}},
			"virtual node":           {&corev1.NodeList{}, []client.ListOption{client.HasLabels{broker.LabelProvider}}},
			"guest namespace":        {&corev1.NamespaceList{}, []client.ListOption{client.HasLabels{broker.LabelGuestsOf}}},
			"namespace":              {&corev1.NamespaceList{}, []client.ListOption{client.HasLabels{labelScenario}}},
			"peering":                {&corev1.SecretList{}, []client.ListOption{client.MatchingLabels{nodeconfig.LabelComponent: nodeconfig.Component}}},
			"namespace access":       {&rbacv1.RoleBindingList{}, []client.ListOption{client.MatchingFieldsSelector{Selector: namespaceAccess}}},
		} {
			if err := c.Client.List(ctx, of.list, of.options...); meta.IsNoMatchError(err) {
				continue // the hub has no instructions
			} else if err != nil {
				return nil, fmt.Errorf("listing each %s of %s: %w", what, c.Name, err)
			}
			err := meta.EachListItem(of.list, func(o runtime.Object) error {
				left = append(left, fmt.Sprintf("%s %s in %s", what, client.ObjectKeyFromObject(o.(client.Object)), c.Name))
				return nil
			})
			if err != nil {
				return nil, err
			}
		}
	}
	var ads broker.ClusterAdvertisementList
	err := s.hub.List(ctx, &ads)
	for _, ad := range ads.Items {
		for _, hold := range ad.Status.Holds {
			left = append(left, fmt.Sprintf("hold %s of %s", hold.ReservationName, ad.Name))
		}
	}
	return left, err
}

// upgrade gives a member's chart other values until the test ends, and waits until its
// advertisement shows them, unless shows is nil.
func (s *playgroundTest) upgrade(member string, shows func(*broker.ClusterAdvertisement) bool, values ...string) {
	s.t.Helper()
	s.upgraded[member] = shows
	expect.NoError(s.t, s.p.Upgrade(s.t.Context(), member, values...))
	if shows != nil {
		s.advertised(member, strings.Join(values, " "), shows)
	}
}

// eventually waits for ok, and fails early when a process of the playground ended.
func (s *playgroundTest) eventually(what string, ok func() error) {
	s.t.Helper()
	expect.EventuallyWithin(s.t, answer, what, func() (bool, string) {
		expect.NoError(s.t, s.p.Err())
		err := ok()
		return err == nil, fmt.Sprint(err)
	})
}

// advertised waits until the advertisement of a cluster in the hub is as it is to be.
func (s *playgroundTest) advertised(cluster, what string, is func(*broker.ClusterAdvertisement) bool) {
	s.t.Helper()
	s.eventually(cluster+" advertises "+what, func() error {
		ad := &broker.ClusterAdvertisement{}
		if err := s.hub.Get(context.Background(), client.ObjectKey{Namespace: environment.Namespace, Name: cluster}, ad); err != nil {
			return err
		}
		if !is(ad) {
			return fmt.Errorf("%+v", ad.Spec)
		}
		return nil
	})
}
