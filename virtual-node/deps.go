// Package main will be spillway-virtual-node.
package main

import (
	_ "github.com/virtual-kubelet/virtual-kubelet/node"
	_ "github.com/virtual-kubelet/virtual-kubelet/node/api"
	_ "github.com/virtual-kubelet/virtual-kubelet/node/nodeutil"
	_ "k8s.io/apiserver/pkg/authentication/authenticatorfactory"
	_ "k8s.io/kubelet/pkg/apis/stats/v1alpha1"
	_ "k8s.io/metrics/pkg/apis/metrics/v1beta1"
)

func main() {}
