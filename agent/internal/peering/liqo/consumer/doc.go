// Package consumer is the consumer's side of driver liqo: it peers with providers, sizes
// their virtual nodes within what they answer, maps namespaces to them, and removes all of
// it stage by stage.
//
// Of the ConfigMaps and Secrets in a mapped namespace, Liqo copies to the provider only those
// that are marked for it. The Driver marks what pods on virtual nodes refer to, unless its
// owner has decided about it, and removes the marks once the namespace is not mapped any more.
// With Options.ReflectAll Liqo copies all that are not marked otherwise.
package consumer
