package health

import (
	"slices"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"

	"github.com/spillway-dev/spillway/agent/internal/explain"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/text"
)

// Kinds that are read beside those of package explain.
const (
	Deployments    = "deployments.apps"
	Leases         = "leases.coordination.k8s.io"
	Advertisements = "clusteradvertisements.broker.fluidos.eu"
)

// Programs, as their Deployments and Leases are named.
const (
	Broker      = "spillway-broker"
	Agent       = "spillway-agent"
	Scheduler   = broker.SchedulerName
	VirtualNode = "spillway-virtual-node"
)

// CopyName is the name of the agent's copy of its cluster's advertisement.
const CopyName = "cluster-advertisement"

// Observed is what a caller can see of Spillway in a cluster.
type Observed struct {
	// Now by the caller's clock.
	Now time.Time
	// System is the namespace of Spillway; Deployments, Leases, Advertisements and Instructions are its.
	System         string
	Deployments    []appsv1.Deployment
	Leases         []coordinationv1.Lease
	Advertisements []broker.ClusterAdvertisement
	Instructions   []broker.ReservationInstruction
	// Reservations of all namespaces, and the virtual Nodes.
	Reservations []broker.Reservation
	Nodes        []corev1.Node
	Unreadable   []explain.Unreadable
}

// Report says whether all is well.
type Report struct {
	// Cluster is the ID of the cluster, empty if it is unknown.
	Cluster    string               `json:"cluster,omitempty"`
	Well       bool                 `json:"well"`
	Steps      []explain.Step       `json:"steps"`
	Fixes      []explain.Fix        `json:"fixes,omitempty"`
	Unreadable []explain.Unreadable `json:"unreadable,omitempty"`
}

// public are the steps that everyone may see.
var public = []string{"Kubernetes", "CRDs", "Clocks"}

// Known reports whether anything of Spillway could be read, or is seen to be wrong.
func (r *Report) Known() bool {
	return slices.ContainsFunc(r.Steps, func(s explain.Step) bool {
		return s.State == explain.Failed || s.State != explain.Unknown && s.State != explain.Skipped && !slices.Contains(public, s.Name)
	})
}

// Text returns the report as lines for people.
func (r *Report) Text(style explain.Style) string {
	head := "Cluster " + r.Cluster
	if r.Cluster == "" {
		head = "This cluster"
	}
	end := "All is well."
	switch {
	case !r.Well:
		end = "Not all is well."
	case slices.ContainsFunc(r.Steps, func(s explain.Step) bool { return s.State == explain.Unknown }):
		end = "All is well that you may see."
	}
	return explain.Page(style, []string{head}, r.Steps, end, r.Fixes, r.Unreadable)
}

// finish sums the steps up, and bounds what other clusters have written.
func (r *Report) finish() {
	r.Well = true
	for i := range r.Steps {
		r.Well = r.Well && r.Steps[i].State != explain.Failed
	}
	r.Cluster = text.Line(r.Cluster, 63)
	explain.Printable(r.Steps, r.Fixes, r.Unreadable)
}

func (o *Observed) unreadable(what string) bool {
	return slices.ContainsFunc(o.Unreadable, func(u explain.Unreadable) bool { return u.What == what })
}

func (o *Observed) deployment(name string) *appsv1.Deployment {
	for i := range o.Deployments {
		if o.Deployments[i].Name == name {
			return &o.Deployments[i]
		}
	}
	return nil
}

func (o *Observed) lease(name string) *coordinationv1.Lease {
	for i := range o.Leases {
		if o.Leases[i].Name == name {
			return &o.Leases[i]
		}
	}
	return nil
}

// own returns the copy of the cluster's own advertisement, nil if there is none.
func (o *Observed) own() *broker.ClusterAdvertisement {
	for i := range o.Advertisements {
		if o.Advertisements[i].Name == CopyName {
			return &o.Advertisements[i]
		}
	}
	return nil
}

// advertised are those of a hub.
func (o *Observed) advertised() (all []*broker.ClusterAdvertisement) {
	for i := range o.Advertisements {
		if o.Advertisements[i].Name != CopyName {
			all = append(all, &o.Advertisements[i])
		}
	}
	return all
}

// ClusterID of the cluster, empty if nothing says so.
func (o *Observed) ClusterID() string {
	if own := o.own(); own != nil {
		return own.Spec.ClusterID
	}
	for i := range o.Reservations {
		if r := &o.Reservations[i]; r.Spec.RequesterID != "" && r.Namespace != o.System {
			return r.Spec.RequesterID
		}
	}
	return ""
}

// since words how long ago something was: clocks differ, so that it may be in the future.
func since(now, at time.Time) string { return max(now.Sub(at), 0).Round(time.Second).String() }

func ago(now, at time.Time) string { return since(now, at) + " ago" }
