// Package store is what this broker knows of its Reservations, ClusterAdvertisements and
// BrokerConfig, and when it last received each cluster's advertisement. It follows the watches
// on every replica, and knows what the broker has written itself before the watch repeats it.
// Its indexes find what a change or a call concerns without a list.
package store
