// Package overflow is the scheduler plugin "Overflow": pods that do not fit at
// home get room in another cluster.
//
// # The life of a pod
//
//	no node fits ─► PostFilter ─► inbox ─► asker: pods of one owner and shape become
//	                                       one Reservation (server-side apply)
//	                                                │ broker, agents
//	Activate ◄─ book of grants ◄─ informer ◄────────┘ status.allocations[].virtualNodeReady
//	   │
//	PreFilter finds the pod's grants in the book
//	Filter    lets it onto a virtual node within them, and nobody else
//	Score     prefers home
//	PreBind   writes the hold's label on the pod
//
// Where one pod of an owner and shape was turned away, those that the scheduler
// has not come to yet are asked for along with it, and more is asked for on top
// when the answer is there: a crowd of pods is a few asks, not one for each.
// Activated are only the pods that the agent has opened a virtual node to.
//
// What is taken of a grant is counted on the scheduler's own snapshot of the
// node, which holds assumed pods too: there is no second book that could drift
// from it.
//
// A Reservation serves the pods that its labels name (root owner and shape, see
// package demand). One that was written by hand without those labels holds
// capacity, but serves no pods.
//
// Nothing here is part of the scheduler's start-up, and nothing in the
// scheduling cycle waits for the API server: where the Reservation CRD is
// missing, pods are scheduled at home as ever, and the plugin tries again in the
// background. A standby replica only watches.
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
// The weight puts home before any virtual node: it outweighs the default
// plugins' 12 together. For overflow: BeforePreemption the plugin must also stand
// before DefaultPreemption, because the order of PostFilter plugins is the order
// in which they are asked:
//
//	plugins:
//	  multiPoint: {enabled: [{name: Overflow, weight: 20}]}
//	  postFilter: {enabled: [{name: Overflow}]}
//
// Then nobody is pushed out for a pod until the broker has said that no cluster
// has room for it.
package overflow
