// Package environment is Spillway on whole clusters, without docker and without
// privileges: control planes as processes (package cluster), the charts
// installed on each, and the charts' programs running as their ServiceAccounts,
// held to the same roles and policies as anywhere. What kubelets and containers
// would do, kwok plays.
//
//	p, err := playground.Start(ctx, playground.Options{Members: …})
//	defer p.Stop()
//	p.Cluster("rome").Client.Create(…)
//	p.Kill("paris")
//
// It needs the charts, the modules beside package build, and nothing else. It is
// for tests and demonstrations on one machine: nothing in it is meant to last.
package environment
