// Package overflow is the scheduler plugin "Overflow": pods that do not fit in
// this cluster get capacity in another.
//
// # The life of a pod
//
//	no node fits ─► PostFilter ─► WorkQueue ─► request.Controller: pods of one owner and
//	               closes the gate             shape become one Reservation (server-side apply)
//	                                                │ broker, agents
//	Activate ◄─ Waker ◄─ GrantCache ◄─ informer ◄───┘ status.allocations[].virtualNodeReady
//	   │
//	PreEnqueue holds the pods that no place has become free for
//	PreFilter  looks up the pod's grants
//	Filter     admits it to a virtual node only within them, and to a node of this cluster
//	           only beside the nominated pods of other schedulers
//	Score      prefers the nodes of this cluster
//	Reserve    counts it, and chooses the hold to charge
//	Permit     holds the pods of a gang until enough of them have places
//	Bind       labels the pod with its hold and shape, with the binding
//
// When one pod of an owner and shape does not fit, the request includes those
// that the scheduler has not tried yet, and the count is raised only after the
// last request was decided: many pods result in few requests.
//
// The gate opens for as many pods as there are places, by priority, then age: for room
// on a node of this cluster, for a free slot of a grant, after a change of the pod's
// spec, and at the latest when its retry is due. Only pods that can overflow are held. One
// that was not tried yet is held for 2 to 3 s at most, if another one of its owner and shape
// has just not fit: it is requested with that, and often bound when it is tried first. Gangs
// are not, nor is any pod with overflow: BeforePreemption or askAfter.
//
// One pod of each request has event OverflowRequested at once. What pods wait for is looked at
// each minute: then the others have it, if they have waited for a grant for 10 s. Most of a crowd
// have OverflowGranted by then. A pod has one event of a reason in 55 s, the same one
// again after an hour.
//
// What is free on each node, and how many pods use each grant, is counted from the
// events of the informers and from the pods that the scheduler assumes (placements).
//
// A pod of another scheduler that is nominated to a node keeps its room there, as those of
// its own queue do with kube-scheduler: a guest of another cluster is nominated before the
// placeholder is deleted that has held its place.
//
// With overflow: BeforePreemption, preemption waits until the broker has refused, a
// policy allows no more, the API server rejects the request or, by a quota or an admission
// policy, has refused it four times, or decisionTimeout has passed. Pods on virtual nodes are
// never preempted.
//
// A pod of an opted-in namespace that waits for the cluster's own scheduler has event
// OverflowNotPossible within a minute, and again each hour, from the replica that leads: it was
// created before the namespace opted in, or while no replica was available.
//
// What is requested is validated again each time: a pod or a namespace that opts out
// is dropped, a pod that was resized counts for its new shape.
//
// A Reservation of the plugin serves the pods of its owner and shape (its labels, see
// package demand). One that was made by hand, here or in the hub, is a pool of capacity
// for each provider: the pods that it serves are bound to it without a request.
//
// Where an OverflowPolicy has returnHome, pods that have overflowed are evicted once a node
// of this cluster has room for their replacements, which prefer it (package moves; returnhome
// decides). That happens outside of scheduling cycles, in the leader.
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
//	    filter: {enabled: [{name: Overflow}]}
//	    bind: {enabled: [{name: Overflow}]}
//	  pluginConfig:
//	  - name: Overflow
//	    args:
//	      apiVersion: broker.fluidos.eu/v1alpha1
//	      kind: OverflowArgs
//	      overflow: AfterPreemption
//	      decisionTimeout: 10s
//	      askAfter: 0s
//	      gangTimeout: 1m
//
// The weight puts the nodes of this cluster before any virtual node: it exceeds
// the sum of the default plugins' weights, 12. Filter must run before
// NodeResourcesFit, or a full virtual node is a candidate for preemption, and Bind
// before DefaultBinder. For overflow: BeforePreemption the plugin must also be enabled
// before DefaultPreemption (postFilter), because PostFilter plugins run in that order.
package overflow
