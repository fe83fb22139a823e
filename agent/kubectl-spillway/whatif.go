package main

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/explain"
	"github.com/spillway-dev/spillway/agent/internal/health"
	"github.com/spillway-dev/spillway/agent/internal/manifest"
	"github.com/spillway-dev/spillway/agent/internal/whatif"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/rehearsal"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

func newWhatIf(o *options) *cobra.Command {
	var files []string
	hubContext, consumer := "", ""
	command := &cobra.Command{
		Use:   "what-if -f FILE",
		Short: "Say what the broker would decide for a manifest, without asking for anything",
		Long: `Says what would become of the pods of a manifest that do not fit at home: whether they may overflow, what would be
requested, what waits in front of them, which cluster would be chosen, and the score of each cluster. It decides as the
broker does, on what you may read in the hub, and creates nothing. Several objects are answered for one after the other,
as if each had got what it would get; all are new, also those of which one of the same name exists.

What only the broker's process knows is left out: which providers have refused such pods a moment ago, and how they have
kept their promises. Whether the broker has approved the cluster is not checked.
Exits with 0 if all would be placed, 1 if not, and 2 if that is not known.`,
		Example: `  kubectl spillway what-if -f deployment.yaml --hub-context=hub
  helm template web ./chart | kubectl spillway what-if -f - --hub-context=hub -o wide`,
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(command *cobra.Command, _ []string) error {
			if len(files) == 0 {
				return errors.New("name a manifest by -f FILE, or standard input by -f -")
			}
			c, err := o.client()
			if err != nil {
				return err
			}
			answers, err := o.whatIf(newReader(command.Context(), c), files, hubContext, consumer)
			if err != nil {
				return err
			}
			if err := o.print(answers, answers.Text); err != nil {
				return err
			}
			switch placed, known := answers.Placed(); {
			case !known:
				return errors.New("what the broker would decide is not known: see above")
			case !placed:
				return errNo
			}
			return nil
		},
	}
	flags := command.Flags()
	flags.StringSliceVarP(&files, "filename", "f", nil, "Manifest in YAML or JSON, with one object or several; - is standard input.")
	flags.StringVar(&hubContext, "hub-context", "", "Context of the hub, unless this cluster is the hub.")
	flags.StringVar(&consumer, "consumer", "", "ID of the cluster that would ask. The one of the context if empty.")
	if err := command.RegisterFlagCompletionFunc("hub-context", o.completeContexts); err != nil {
		panic(err) // no such flag
	}
	return command
}

// whatIf reads what the answers are made from.
func (o *options) whatIf(r *reader, files []string, hubContext, consumer string) (*whatif.Answers, error) {
	namespace, err := o.namespace()
	if err != nil {
		return nil, err
	}
	objects, err := manifest.Read(files, o.In)
	if err != nil {
		return nil, err
	}
	in := whatif.Input{Cluster: consumer, Namespaces: map[string]*explain.Observed{}}
	var notes []string
	for _, object := range objects {
		w, ok, err := whatif.Of(object, namespace)
		if err != nil {
			return nil, err
		}
		if ok {
			in.Workloads = append(in.Workloads, w)
		}
	}
	if len(in.Workloads) == 0 {
		return nil, errors.New("the manifest has neither an object with pods nor a Reservation")
	}
	for i := range in.Workloads {
		w := &in.Workloads[i]
		if in.Namespaces[w.Namespace] == nil {
			in.Namespaces[w.Namespace] = o.observeNamespace(r, w.Namespace)
		}
		if w.Pod != nil {
			notes = append(notes, manifest.Admit(r.ctx, r, w)...)
			w.Least = o.least(r, w, objects)
		}
	}
	if err := r.err(o); err != nil {
		return nil, err
	}
	more, err := o.observeHub(r, &in, hubContext)
	if err != nil {
		return nil, err
	}
	answers := whatif.Run(in)
	answers.Notes = slices.Concat(notes, more, answers.Notes)
	return &answers, nil
}

// observeNamespace reads what keeps pods of a namespace from overflowing.
func (o *options) observeNamespace(r *reader, namespace string) *explain.Observed {
	observed, ns := &explain.Observed{System: o.system}, &corev1.Namespace{}
	var reservations broker.ReservationList
	var policies broker.OverflowPolicyList
	denied := len(r.wait())
	r.list(explain.Reservations, &reservations, client.InNamespace(namespace))
	r.list(explain.Policies, &policies)
	if r.get(explain.Namespaces, ns, "", namespace) {
		observed.Namespace = ns
	}
	observed.Unreadable = slices.Clone(r.wait()[denied:])
	if observed.Namespace == nil && len(observed.Unreadable) == 0 {
		observed.Unreadable = []explain.Unreadable{{What: explain.Namespaces, Reason: "namespace " + namespace + " does not exist yet"}}
	}
	observed.Reservations, observed.Policies = reservations.Items, policies.Items
	return observed
}

// least returns how many pods the gang of a workload needs, by what describes it in the manifest or the
// cluster; nil if it is in none or that is unknown.
func (o *options) least(r *reader, w *whatif.Workload, among []*unstructured.Unstructured) *int32 {
	gang, in := demand.GangOf(w.Pod)
	if !in {
		return nil
	}
	kind, resource, name := "PodGroup", "podgroups", gang.PodGroup
	if gang.Workload != "" {
		kind, resource, name = "Workload", "workloads", gang.Workload
	}
	for _, object := range among {
		if object.GetKind() == kind && object.GroupVersionKind().Group == gang.API && object.GetName() == name {
			return ptr.To(int32(min(explain.Minimum(object, gang), 1<<30)))
		}
	}
	group, err := o.read(r, w.Namespace, resource+"."+gang.API, name)
	if err != nil {
		if !meta.IsNoMatchError(err) {
			r.note("get", explain.PodGroups, w.Namespace, err)
		}
		return nil
	}
	return ptr.To(int32(min(explain.Minimum(group, gang), 1<<30)))
}

// observeHub reads what the broker would decide on, and which cluster would ask.
func (o *options) observeHub(r *reader, in *whatif.Input, hubContext string) (notes []string, err error) {
	there, r := o, newReader(r.ctx, r.Client)
	if hubContext != "" {
		there = o.in(hubContext)
		if in.Cluster == "" {
			if in.Cluster, err = o.ownID(r); err != nil {
				return nil, err
			}
		}
		c, err := there.client()
		if err != nil {
			return nil, err
		}
		r = newReader(r.ctx, c)
	}
	var ads broker.ClusterAdvertisementList
	var reservations broker.ReservationList
	var configs broker.BrokerConfigList
	for what, list := range map[string]client.ObjectList{health.Advertisements: &ads, explain.Reservations: &reservations, brokerConfigs: &configs} {
		err := r.List(r.ctx, list, client.InNamespace(o.system))
		if r.note("list", what, o.system, err) {
			continue
		}
		if r.failed != nil {
			return nil, r.err(there)
		}
		missing := r.denied[len(r.denied)-1]
		why := "it could not be read: " + missing.Reason
		if missing.Permission != "" {
			why = "you may not " + missing.Permission + ", in " + there.cluster()
		}
		switch what {
		case health.Advertisements:
			in.NoHub = why
		case explain.Reservations:
			notes = append(notes, "The queue is not known, and taken as empty: "+why+".")
		default:
			notes = append(notes, "The BrokerConfig is not known, and taken as the defaults: "+why+".")
		}
	}
	slices.Sort(notes)
	known := slices.ContainsFunc(ads.Items, func(a broker.ClusterAdvertisement) bool { return a.Name == a.Spec.ClusterID })
	switch {
	case in.NoHub != "":
		return nil, nil
	case !known && hubContext == "":
		in.NoHub = there.cluster() + " is not the hub, or no cluster has joined: name the context of the hub by --hub-context"
		return nil, nil
	case in.Cluster == "":
		if in.Cluster, err = o.ownID(r); err != nil {
			return nil, err
		}
	}
	in.Hub = rehearsal.New(time.Now(), ads.Items, reservations.Items, configs.Items)
	return notes, nil
}

// brokerConfigs is what BrokerConfigs are called.
const brokerConfigs = "brokerconfigs." + broker.Group

// ownID returns the ID of the cluster.
func (o *options) ownID(r *reader) (string, error) {
	observed, err := o.observeSystem(r)
	if err != nil {
		return "", err
	}
	if id := observed.ClusterID(); id != "" {
		return id, nil
	}
	return "", fmt.Errorf("nothing says which cluster %s is: name the one that would ask by --consumer", o.cluster())
}
