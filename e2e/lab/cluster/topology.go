// Package cluster creates the lab's Kubernetes clusters with kind and connects them
// by plain routes between their nodes.
package cluster

// A Cluster of the lab.
type Cluster struct {
	// Name, which is also its cluster ID.
	Name string
	// PodCIDR and ServiceCIDR are distinct, so that pods reach each other by
	// plain routes.
	PodCIDR, ServiceCIDR string
	// Workers is the number of worker nodes. Without one, pods run on the control
	// plane node.
	Workers int
	// MilliCPU is the allocatable CPU of each node.
	MilliCPU int
	// GPUs is the capacity of the extended resource nvidia.com/gpu by node. There is
	// no device behind it.
	GPUs map[string]int
	// Member is whether Liqo and an agent run in the cluster.
	Member bool
}

// Topology is the lab's clusters: a hub for the broker and three members. rome is
// small, so that a few pods of 300m fill it.
var Topology = []Cluster{
	{Name: "hub", PodCIDR: "10.10.0.0/16", ServiceCIDR: "10.110.0.0/16", MilliCPU: 2000},
	{Name: "rome", PodCIDR: "10.11.0.0/16", ServiceCIDR: "10.111.0.0/16", MilliCPU: 2000, Member: true},
	{Name: "paris", PodCIDR: "10.12.0.0/16", ServiceCIDR: "10.112.0.0/16", MilliCPU: 2000, Member: true, Workers: 2,
		GPUs: map[string]int{"paris-worker2": 2}},
	{Name: "berlin", PodCIDR: "10.13.0.0/16", ServiceCIDR: "10.113.0.0/16", MilliCPU: 2000, Member: true,
		GPUs: map[string]int{"berlin-control-plane": 2}},
}

// Nodes returns the names of the cluster's node containers.
func (c Cluster) Nodes() []string {
	nodes := []string{c.ControlPlane()}
	for i := range c.Workers {
		name := c.Name + "-worker"
		if i > 0 {
			name += string(rune('1' + i))
		}
		nodes = append(nodes, name)
	}
	return nodes
}

// ControlPlane returns the name of the node with the API server.
func (c Cluster) ControlPlane() string { return c.Name + "-control-plane" }

// Context returns the cluster's context in the lab's kubeconfig.
func (c Cluster) Context() string { return "kind-" + c.Name }
