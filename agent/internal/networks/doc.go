// Package networks knows the addresses of this cluster itself: of its nodes, its pods, its
// Services and its API server. A provider that reports one of them as the address of a guest
// would direct the traffic of this cluster's Services there. The package keeps them in a
// ConfigMap, from which the chart's policy takes them, and for the drivers, which drop them
// from what providers report.
package networks
