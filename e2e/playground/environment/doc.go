// Package environment runs Spillway on complete clusters, without docker and without
// privileges: control planes as processes (package cluster), the charts installed on
// each, and the charts' programs running as their ServiceAccounts, with the charts'
// RBAC and policies. Package kubelet simulates kubelets and containers.
//
//	p, err := environment.Start(ctx, environment.Options{Members: …})
//	defer p.Stop()
//	p.Cluster("rome").Client.Create(…)
//	p.Kill("paris")
//
// It needs the charts and the modules below e2e/lab/binaries, and nothing else. It
// serves tests and demonstrations on one machine.
package environment
