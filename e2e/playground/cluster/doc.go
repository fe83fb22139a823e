// Package cluster runs complete Kubernetes control planes as plain processes:
// etcd, API server, controller manager and scheduler, with package kubelet where the
// nodes and their containers would be. Everything listens on 127.0.0.1 only, and all
// state lies in one directory.
package cluster
