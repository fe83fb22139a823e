// Package cluster makes the lab's Kubernetes clusters with kind: real control
// planes, kubelets and containers, joined by plain routes.
package cluster

// A Cluster of the lab.
type Cluster struct {
	// Name, which is also its cluster ID.
	Name string
	// PodCIDR and ServiceCIDR are distinct, so that pods reach each other by
	// plain routes.
	PodCIDR, ServiceCIDR string
	// Workers besides the control plane; with none, the control plane takes pods.
	Workers int
	// MilliCPU that each node offers to pods, whatever the machine has.
	MilliCPU int
	// GPUs by node: extended resources nvidia.com/gpu that nothing stands behind.
	GPUs map[string]int
	// Member says whether Liqo and an agent run here.
	Member bool
}

// Topology is the lab: a hub for the broker and three members. rome is small,
// so that a few pods of 300m fill it.
var Topology = []Cluster{
	{Name: "hub", PodCIDR: "10.10.0.0/16", ServiceCIDR: "10.110.0.0/16", MilliCPU: 2000},
	{Name: "rome", PodCIDR: "10.11.0.0/16", ServiceCIDR: "10.111.0.0/16", MilliCPU: 2000, Member: true},
	{Name: "paris", PodCIDR: "10.12.0.0/16", ServiceCIDR: "10.112.0.0/16", MilliCPU: 2000, Member: true, Workers: 2,
		GPUs: map[string]int{"paris-worker2": 2}},
	{Name: "berlin", PodCIDR: "10.13.0.0/16", ServiceCIDR: "10.113.0.0/16", MilliCPU: 2000, Member: true,
		GPUs: map[string]int{"berlin-control-plane": 2}},
}

// Nodes are the names of the cluster's node containers.
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

// ControlPlane is the name of the node with the API server.
func (c Cluster) ControlPlane() string { return c.Name + "-control-plane" }

// Context is the cluster's context in the lab's kubeconfig.
func (c Cluster) Context() string { return "kind-" + c.Name }
