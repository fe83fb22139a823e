// Package liqo is the driver that peers clusters and makes virtual nodes with Liqo
// v1.2.0, whose controllers run in both clusters: Driver is the consumer's side,
// Provider the provider's. Neither needs a kubeconfig of the other cluster; the
// content of Liqo's handshake travels in sealed messages through the broker.
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
// Liqo's networking is neither used nor changed. Secrets of a mapped namespace are
// reflected by Liqo's default rule (all but those marked otherwise): its other rule
// reflects only marked ones, and with it an ordinary pod that mounts a Secret
// would not start.
package liqo
