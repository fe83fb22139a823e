// Package liqo is the driver that peers clusters and makes virtual nodes with Liqo
// v1.2.0, whose controllers run in both clusters. Package consumer is the consumer's side,
// package provider the provider's; here is what both need: messages, proofs, the tenant
// namespace. Neither needs a kubeconfig of the other cluster; the content of Liqo's
// handshake travels in sealed messages through the broker.
//
//	consumer (rome)                          provider (paris)
//	Namespace liqo-tenant-paris
//	          ── Hello ──────────────────►   Namespace liqo-tenant-rome, nonce
//	          ◄─────────────── Offer ─────
//	signs the nonce
//	          ── Request ────────────────►   Tenant rome → Liqo signs a certificate
//	          ◄─────────────── Grant ─────
//	Identity controlplane-paris → Liqo replicates objects from here on:
//	ResourceSlice spillway-paris ────────►   Provider answers it: status, Quota
//	VirtualNode spillway-paris → virtual kubelet → Node spillway-paris
//	NamespaceOffloading → NamespaceMap ──►   Namespace <name>-rome
//
// Package session has the handshake. Both sides recompute everything from objects.
// Objects that Spillway did not make are never changed: a peering made with
// liqoctl, or a namespace that its owner offloads, is reported.
//
// Liqo's networking is not changed. Which networks it has connected is read: guests have addresses
// in them.
package liqo
