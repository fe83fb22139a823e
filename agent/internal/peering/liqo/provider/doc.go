// Package provider is the provider's side of driver liqo: it lets consumers peer, answers
// their ResourceSlices with what is granted, confines their guests in the namespaces that
// Liqo creates, and removes what was made for a consumer.
package provider
