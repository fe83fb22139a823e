// Package settings has what the BrokerConfig says, with the defaults of what it does not say.
// It is pure.
package settings

import (
	"cmp"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/answers"
	"github.com/spillway-dev/spillway/broker/internal/decide"
)

// Name is the name of the BrokerConfig that is used.
const Name = "default"

// Settings are the BrokerConfig with defaults.
type Settings struct {
	Weights              broker.ScoreWeights
	ExchangeRates        []broker.ExchangeRate
	StaleAfter, FreshFor time.Duration
	// MaxDuration is the longest lease, DefaultDuration that of Reservations that name none; 0 for
	// none.
	MaxDuration, DefaultDuration time.Duration

	DefaultLease  time.Duration
	ProofDeadline time.Duration
	RetryAfter    time.Duration
	Queueing      broker.Queueing
	KeepFreeFor   time.Duration
	// Capacity is the maximum that providers hold for one consumer, of the resources that it has;
	// nil for none.
	Capacity capacity.Vector
	// MaxPriority is the highest priority that counts.
	MaxPriority int32
	// Admission of clusters about which no operator has decided.
	Admission broker.Admission

	// Clusters is how many may join. Reservations are those of all, ReservationBytes the size of a
	// new one's spec.
	Clusters, Reservations, ReservationBytes int
	// These limit one cluster: how many Reservations and open streams it has, and the size of the
	// messages that wait for it, and of those that it has sent.
	ReservationsPerCluster, StreamsPerCluster, RelayBytesPerCluster int
	// WritesPerSecond is the rate of a cluster's writes, WriteBurst how many it may make at once.
	WritesPerSecond, WriteBurst int
}

// Of fills in the defaults of a BrokerConfig: of one that does not exist, the API server has
// filled in none.
func Of(spec *broker.BrokerConfigSpec) Settings {
	duration := func(d *metav1.Duration, fallback time.Duration) time.Duration {
		return ptr.Deref(d, metav1.Duration{Duration: fallback}).Duration
	}
	quotas := ptr.Deref(spec.Quotas, broker.Quotas{})
	return Settings{
		Weights:       ptr.Deref(spec.Weights, decide.DefaultWeights),
		ExchangeRates: spec.ExchangeRates,
		StaleAfter:    duration(spec.StaleAfter, 10*time.Minute),
		FreshFor:      duration(spec.FreshFor, 90*time.Second),

		MaxDuration:     duration(spec.MaxDuration, 0),
		DefaultDuration: duration(spec.DefaultDuration, 0),

		DefaultLease:  duration(spec.DefaultLease, time.Hour),
		ProofDeadline: duration(spec.ProofDeadline, answers.DefaultDeadline),
		RetryAfter:    duration(spec.RetryAfter, 30*time.Second),
		Queueing:      spec.Queueing,
		KeepFreeFor:   duration(spec.KeepFreeFor, 0),
		Capacity:      limit(quotas.CapacityPerCluster),
		MaxPriority:   ptr.Deref(quotas.MaxPriority, 1000),
		Admission:     cmp.Or(ptr.Deref(spec.Joining, broker.Joining{}).Admission, broker.AdmissionAutomatic),

		Clusters:               int(ptr.Deref(quotas.Clusters, 10_000)),
		Reservations:           int(ptr.Deref(quotas.Reservations, 50_000)),
		ReservationBytes:       int(ptr.Deref(quotas.ReservationBytes, 8<<10)),
		ReservationsPerCluster: int(ptr.Deref(quotas.ReservationsPerCluster, 1000)),
		StreamsPerCluster:      int(ptr.Deref(quotas.StreamsPerCluster, 16)),
		RelayBytesPerCluster:   int(ptr.Deref(quotas.RelayBytesPerCluster, 2<<20)),
		WritesPerSecond:        int(ptr.Deref(quotas.WritesPerSecond, 20)),
		WriteBurst:             int(ptr.Deref(quotas.WriteBurst, 200)),
	}
}

// limit has also the resources of which the amount is zero.
func limit(most *broker.ResourceQuantities) capacity.Vector {
	if most == nil {
		return nil
	}
	return capacity.Floor(most.Limits())
}

// Duration is the length of a Reservation's lease; 0 if only silence ends it.
func (s Settings) Duration(requested *metav1.Duration) time.Duration {
	length := ptr.Deref(requested, metav1.Duration{Duration: cmp.Or(s.DefaultDuration, s.MaxDuration)}).Duration
	if s.MaxDuration > 0 {
		return min(length, s.MaxDuration)
	}
	return length
}
