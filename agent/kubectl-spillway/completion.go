package main

import (
	"maps"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// maxCompletions is how many names a completion offers.
const maxCompletions = 500

// complete lets the shell complete the values of flags.
func (o *options) complete(command *cobra.Command) {
	fixed := func(values ...string) cobra.CompletionFunc {
		return cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp)
	}
	for flag, function := range map[string]cobra.CompletionFunc{
		"output": fixed(outputWide, outputJSON, outputYAML),
		"namespace": func(command *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
			return o.names(command, corev1.SchemeGroupVersion.WithKind("Namespace"), "", ""), cobra.ShellCompDirectiveNoFileComp
		},
		"context": o.completeContexts,
	} {
		if err := command.RegisterFlagCompletionFunc(flag, function); err != nil {
			panic(err) // no such flag
		}
	}
}

// completeContexts completes contexts of the kubeconfig.
func (o *options) completeContexts(*cobra.Command, []string, string) (names []string, _ cobra.ShellCompDirective) {
	if raw, err := o.flags.ToRawKubeConfigLoader().RawConfig(); err == nil {
		names = slices.Sorted(maps.Keys(raw.Contexts))
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

// completeObjects completes what explain takes: pods, and TYPE/NAME.
func (o *options) completeObjects(command *cobra.Command, arguments []string, typed string) ([]string, cobra.ShellCompDirective) {
	kind, _, slash := strings.Cut(typed, "/")
	namespace, err := o.namespace()
	if len(arguments) > 1 || err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	prefix := kind + "/"
	if len(arguments) == 1 {
		kind, prefix, slash = arguments[0], "", true
	}
	if !slash {
		kinds := []string{"deployment/", "statefulset/", "job/", "reservation/"}
		return append(o.names(command, corev1.SchemeGroupVersion.WithKind("Pod"), namespace, ""), kinds...), cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveNoSpace
	}
	gvk, err := o.kindOf(kind)
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return o.names(command, gvk, namespace, prefix), cobra.ShellCompDirectiveNoFileComp
}

// names lists the objects of a kind; none if that fails.
func (o *options) names(command *cobra.Command, gvk schema.GroupVersionKind, namespace, prefix string) (names []string) {
	c, err := o.client()
	if err != nil {
		return nil
	}
	list := &metav1.PartialObjectMetadataList{}
	list.SetGroupVersionKind(gvk.GroupVersion().WithKind(gvk.Kind + "List"))
	if err := c.List(command.Context(), list, client.InNamespace(namespace), client.Limit(maxCompletions)); err != nil {
		return nil
	}
	for i := range list.Items {
		names = append(names, prefix+list.Items[i].Name)
	}
	return names
}
