package v1alpha1

// Quotas limit what one cluster uses of the broker, and how many clusters there are.
type Quotas struct {
	// clusters is the maximum number of clusters that have joined: who has the join token
	// may join any number of them, and each has the other quotas. At the maximum, no further
	// one can join; those that have joined stay, and may join again.
	// +kubebuilder:default=10000
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1000000
	Clusters *int32 `json:"clusters,omitempty"`
	// reservationsPerCluster is the maximum number of Reservations of one consumer.
	// +kubebuilder:default=1000
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=100000
	ReservationsPerCluster *int32 `json:"reservationsPerCluster,omitempty"`
	// reservations is the maximum number of Reservations of all consumers: etcd, and the
	// memory of the broker, have room for so many.
	// +kubebuilder:default=50000
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1000000
	Reservations *int32 `json:"reservations,omitempty"`
	// capacityPerCluster is the maximum of resources that providers hold for one consumer. Of those
	// that are not set, there is no maximum. Where it is set, Reservations of the same priority
	// whose consumer holds less of it are tried earlier: by up to 10 minutes of waiting.
	CapacityPerCluster *ResourceQuantities `json:"capacityPerCluster,omitempty"`
	// reservationBytes is the maximum size of the spec of a new Reservation in bytes of JSON.
	// +kubebuilder:default=8192
	// +kubebuilder:validation:Minimum=1024
	// +kubebuilder:validation:Maximum=16384
	ReservationBytes *int32 `json:"reservationBytes,omitempty"`
	// relayBytesPerCluster is the maximum size in bytes of the relayed messages that wait
	// for one cluster, and of those that wait for others and were sent by it.
	// +kubebuilder:default=2097152
	// +kubebuilder:validation:Minimum=131072
	// +kubebuilder:validation:Maximum=33554432
	RelayBytesPerCluster *int32 `json:"relayBytesPerCluster,omitempty"`
	// streamsPerCluster is the maximum number of open watch streams of one cluster. One
	// more ends the oldest.
	// +kubebuilder:default=16
	// +kubebuilder:validation:Minimum=4
	// +kubebuilder:validation:Maximum=256
	StreamsPerCluster *int32 `json:"streamsPerCluster,omitempty"`
	// writesPerSecond is the rate of one cluster's calls that change a Reservation or send
	// a relayed message. A provider's answers and deletions do not count: they are as many
	// as its holds and the Reservations created.
	// +kubebuilder:default=20
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1000
	WritesPerSecond *int32 `json:"writesPerSecond,omitempty"`
	// writeBurst is the number of such calls that a cluster may make at once after it has
	// made none for some time.
	// +kubebuilder:default=200
	// +kubebuilder:validation:Minimum=10
	// +kubebuilder:validation:Maximum=10000
	WriteBurst *int32 `json:"writeBurst,omitempty"`
	// maxPriority is the highest priority that counts in the queue: a Reservation of a
	// higher one is queued with this one, so that no cluster is always first. With 0, the
	// age alone decides, except for Reservations of a negative priority.
	// +kubebuilder:default=1000
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000000000
	MaxPriority *int32 `json:"maxPriority,omitempty"`
}
