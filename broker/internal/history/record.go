package history

import (
	"maps"
	"math/big"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/spillway-dev/spillway/broker/capacity"
)

// Record is what is kept of one Reservation of the hub. Times are zero for what has not happened.
type Record struct {
	UID  types.UID `json:"uid"`
	Name string    `json:"name"`
	// Requester is the consumer, Namespace the Reservation's there, and Owner whose pods it was
	// for: empty if it was made by hand or in the hub.
	Requester string `json:"requester"`
	Namespace string `json:"namespace,omitempty"`
	OwnerKind string `json:"ownerKind,omitempty"`
	Owner     string `json:"owner,omitempty"`
	// Requested is what it requested when it was first counted, such as "5 pods".
	Requested string `json:"requested,omitempty"`

	Asked time.Time `json:"asked,omitzero"`
	Ended time.Time `json:"ended,omitzero"`
	// Reason is why it has ended.
	Reason string `json:"reason,omitempty"`
	// Until is up to when it is counted.
	Until time.Time `json:"until"`

	// Shares are what each provider gave.
	Shares map[string]Share `json:"shares,omitempty"`
	// Days are the sums of the days that the store may not have yet: at least the last one.
	Days []Day `json:"days,omitempty"`
}

// Share is what one provider gave a Reservation.
type Share struct {
	// Why is why this cluster was chosen.
	Why string `json:"why,omitempty"`
	// Most is the most that was promised at one time, and PricePerHour what that cost then, in
	// Currency; nil if the provider stated no price.
	Most         capacity.Vector `json:"most,omitempty"`
	PricePerHour *big.Rat        `json:"pricePerHour,omitempty"`
	Currency     string          `json:"currency,omitempty"`

	Granted   time.Time `json:"granted,omitzero"`
	FirstUsed time.Time `json:"firstUsed,omitzero"`
	Released  time.Time `json:"released,omitzero"`

	// Total is what has been counted.
	Total Sum `json:"total"`
	// Rate is what is counted until it changes.
	Rate Rate `json:"rate,omitzero"`
}

// Rate is what a provider gives at one time.
type Rate struct {
	Promised capacity.Vector `json:"promised,omitempty"`
	Used     capacity.Vector `json:"used,omitempty"`
	// PricePerHour in Currency; nil if it is unknown.
	PricePerHour *big.Rat `json:"pricePerHour,omitempty"`
	Currency     string   `json:"currency,omitempty"`
}

func (r Rate) equal(b Rate) bool {
	samePrice := r.PricePerHour == b.PricePerHour || r.PricePerHour != nil && b.PricePerHour != nil && r.PricePerHour.Cmp(b.PricePerHour) == 0
	return samePrice && r.Currency == b.Currency && maps.Equal(r.Promised, b.Promised) && maps.Equal(r.Used, b.Used)
}

// Sum is capacity over time: what was promised, what guests used of that, and its cost.
type Sum struct {
	Promised Amount   `json:"promised,omitempty"`
	Used     Amount   `json:"used,omitempty"`
	Cost     *big.Rat `json:"cost,omitempty"`
}

// plus is the sum of both.
func (s Sum) plus(b Sum) Sum {
	cost := s.Cost
	if cost == nil {
		cost = new(big.Rat)
	}
	if b.Cost != nil {
		cost = new(big.Rat).Add(cost, b.Cost)
	}
	return Sum{Promised: s.Promised.Plus(b.Promised), Used: s.Used.Plus(b.Used), Cost: cost}
}

// over is a rate for as long as that.
func (r Rate) over(d time.Duration) Sum {
	cost := new(big.Rat)
	if r.PricePerHour != nil {
		cost.Mul(r.PricePerHour, big.NewRat(d.Milliseconds(), time.Hour.Milliseconds()))
	}
	return Sum{Promised: over(r.Promised, d), Used: over(r.Used, d), Cost: cost}
}

// Day is the sum of one day (UTC, as 2006-01-02) at one provider, of what had a price in that
// currency; an empty one stands for an unknown price.
type Day struct {
	Provider string `json:"provider"`
	Day      string `json:"day"`
	Currency string `json:"currency,omitempty"`
	Sum
}

// DateOf is the day of a time.
func DateOf(at time.Time) string { return at.UTC().Format(time.DateOnly) }
