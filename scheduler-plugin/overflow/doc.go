// Package overflow is the scheduler plugin "Overflow": pods that do not fit in
// this cluster get capacity in another.
//
// # The life of a pod
//
//	no node fits ─► PostFilter ─► workQueue ─► demandController: pods of one owner and
//	                                           shape become one Reservation (server-side apply)
//	                                                │ broker, agents
//	Activate ◄─ grantCache ◄─ informer ◄────────────┘ status.allocations[].virtualNodeReady
//	   │
//	PreFilter looks up the pod's grants
//	Filter    admits it to a virtual node only within them
//	Score     prefers the nodes of this cluster
//	PreBind   labels the pod with its hold
//
// When one pod of an owner and shape does not fit, the request includes those
// that the scheduler has not tried yet, and the count is raised only after the
// last request was decided: many pods result in few requests. Only pods that the
// agent lets tolerate a virtual node are activated.
//
// The used part of a grant is counted in the scheduler's own snapshot of the
// node, which includes assumed pods: there is no second record that could
// diverge.
//
// A Reservation serves the pods that its labels select (root owner and shape, see
// package demand). One that was created by hand without these labels holds
// capacity, but serves no pods.
//
// Scheduling depends neither on the Reservation CRD nor on API calls in the
// scheduling cycle: if the CRD is missing, pods are scheduled in this cluster and
// the informers retry in the background. A standby replica only watches.
//
// # Configuration
//
//	apiVersion: kubescheduler.config.k8s.io/v1
//	kind: KubeSchedulerConfiguration
//	leaderElection:
//	  leaderElect: true
//	  resourceName: spillway-scheduler
//	  resourceNamespace: spillway-system
//	profiles:
//	- schedulerName: spillway-scheduler
//	  plugins:
//	    multiPoint:
//	      enabled:
//	      - name: Overflow
//	        weight: 20
//	  pluginConfig:
//	  - name: Overflow
//	    args:
//	      apiVersion: broker.fluidos.eu/v1alpha1
//	      kind: OverflowArgs
//	      overflow: AfterPreemption
//	      batchQuiet: 200ms
//	      batchLongest: 1s
//
// The weight puts the nodes of this cluster before any virtual node: it exceeds
// the sum of the default plugins' weights, 12. For overflow: BeforePreemption the
// plugin must also be enabled before DefaultPreemption, because PostFilter plugins
// run in that order:
//
//	plugins:
//	  multiPoint: {enabled: [{name: Overflow, weight: 20}]}
//	  postFilter: {enabled: [{name: Overflow}]}
//
// Then no pod is preempted until the broker has found that no cluster has enough
// capacity.
package overflow
